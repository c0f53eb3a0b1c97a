"""Reads and checks checkpoints without PyTorch, and defines the model families."""
