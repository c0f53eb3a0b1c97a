"""The reference libraries of checkpoints, Sentence Transformers and Transformers, and their answers to texts."""
