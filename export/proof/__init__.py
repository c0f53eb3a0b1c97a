"""Compares artifacts with PyTorch: numbers, decisions, and the task's metric."""
