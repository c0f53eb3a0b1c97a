"""Load generators and benchmarks; they know the server by its wire alone."""

import os

# Neither the raw engine nor a peer shall report to ONNX Runtime's makers what is measured here.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
