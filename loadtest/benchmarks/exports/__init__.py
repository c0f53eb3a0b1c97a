"""What exports and GPUs were measured with: real exports, and `make bench-gpu`."""
