"""An artifact beside PyTorch: its numbers, its decisions, the task's own metric."""
