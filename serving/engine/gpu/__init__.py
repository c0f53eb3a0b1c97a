"""Engines for NVIDIA GPUs: TensorRT and ONNX Runtime's CUDA provider."""
