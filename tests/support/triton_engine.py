"""An engine model for a Triton that has the Python backend alone: the same ONNX file, run by ONNX Runtime.

Written into a Triton repository as `model.py`, in the place of Triton's own ONNX Runtime backend.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import triton_python_backend_utils as triton


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.inputs = [entry["name"] for entry in json.loads(args["model_config"])["input"]]
        path = Path(args["model_repository"]) / args["model_version"] / "model.onnx"
        self.session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def execute(self, requests: list[Any]) -> list[Any]:
        """Runs what Triton's dynamic batcher put together as one batch, as its own backends do."""
        parts = [
            {name: triton.get_input_tensor_by_name(request, name).as_numpy() for name in self.inputs}
            for request in requests
        ]
        whole = {name: np.concatenate([part[name] for part in parts]) for name in self.inputs}
        (pooled,) = self.session.run(["pooled"], whole)
        sizes = [len(part["input_ids"]) for part in parts]
        rows = np.split(pooled, np.cumsum(sizes)[:-1])
        return [triton.InferenceResponse([triton.Tensor("pooled", np.ascontiguousarray(row))]) for row in rows]
