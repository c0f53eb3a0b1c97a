"""Engines that run on CPUs: ONNX Runtime and OpenVINO."""
