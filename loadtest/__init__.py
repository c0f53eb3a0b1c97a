"""Load generators and benchmarks. They access the server only over the network."""

import os

# Disables ONNX Runtime's telemetry in the raw engine and in peers.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
