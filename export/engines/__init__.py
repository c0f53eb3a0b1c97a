"""Builds TensorRT engines: for other GPUs, and for the local one."""
