"""A checkpoint as an ONNX graph with the task's head inside, and the fusions of ONNX Runtime."""
