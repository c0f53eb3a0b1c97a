"""A model on Triton's Python backend that answers zeros, in the shape that its configuration says.

Written into a Triton repository as `model.py`.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import triton_python_backend_utils as triton


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._outputs = json.loads(args["model_config"])["output"]

    def execute(self, requests: list[Any]) -> list[Any]:
        return [triton.InferenceResponse(self._zeros(request)) for request in requests]

    def _zeros(self, request: Any) -> list[Any]:
        rows, wanted = len(request.inputs()[0].as_numpy()), request.requested_output_names()
        return [
            triton.Tensor(output["name"], np.zeros((rows, *output["dims"]), np.float32))
            for output in self._outputs
            if output["name"] in wanted
        ]
