"""The server: what answers HTTP and gRPC, and the engine process behind it.

What runs here is nobody else's business, but two of the libraries that run models report it to their makers unless
they are told not to before they are imported: so that is done here, ahead of every module of the package.
"""

import os
import sys

# ONNX Runtime from 1.29 on, on import: it makes an id for the machine, and tells of every session with the name of its
# model's file and digests of its graph ("Disabling Telemetry" in the Privacy.md of its package).
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# OpenVINO, on import; it does without this package where it is not installed.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
