"""Benchmarks of exports and GPUs: real exports, and `make bench-gpu`."""
