"""TensorRT engines: for GPUs elsewhere, and for the one at hand."""
