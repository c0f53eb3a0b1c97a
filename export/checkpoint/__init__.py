"""What a checkpoint is: its files, read and checked without PyTorch, and the families that can be exported."""
