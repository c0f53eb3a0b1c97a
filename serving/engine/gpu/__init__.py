"""Engines that run on NVIDIA GPUs: TensorRT and ONNX Runtime's CUDA provider."""
