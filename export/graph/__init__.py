"""Exports a checkpoint as an ONNX graph with the task's head, and applies ONNX Runtime's fusions."""
