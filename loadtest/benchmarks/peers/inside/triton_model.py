"""A minimal text model for Triton's Python backend, with the engine that its `config.pbtxt` names.

Written into a Triton repository as `model.py`. Parameters: `engine` (`onnxruntime` or `openvino`), `artifact` and
`tokenizer` (files), `max_tokens` (per text), `threads` (per instance), `together` (whether a batch of Triton's dynamic
batcher is computed as one batch, padded to the longest text), `multiple` (every length is padded to a multiple of it).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import triton_python_backend_utils as triton
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray


class TritonPythonModel:
    """The class that the Python backend looks for."""

    def initialize(self, args: dict[str, str]) -> None:
        """Opens the tokenizer and the engine."""
        parameters = json.loads(args["model_config"])["parameters"]
        chosen = {name: value["string_value"] for name, value in parameters.items()}
        self._tokenizer = Tokenizer.from_file(chosen["tokenizer"])
        self._tokenizer.enable_truncation(int(chosen["max_tokens"]))
        self._multiple = int(chosen["multiple"])
        self._together = chosen["together"] == "true"
        open_engine = {"onnxruntime": _onnxruntime, "openvino": _openvino}[chosen["engine"]]
        self._pooled = open_engine(chosen["artifact"], int(chosen["threads"]))

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answers requests of one text each."""
        texts = [triton.get_input_tensor_by_name(request, "text").as_numpy()[0, 0].decode() for request in requests]
        encoded = self._tokenizer.encode_batch_fast(texts)
        groups = [encoded] if self._together else [[encoding] for encoding in encoded]
        return [
            triton.InferenceResponse([triton.Tensor("embedding", row[None])])
            for group in groups
            for row in _normalized(self._pooled(_tensors(group, self._multiple)))
        ]


def _tensors(group: list[Any], multiple: int) -> dict[str, NDArray[np.int32]]:
    longest = -(-max(map(len, group)) // multiple) * multiple
    ids, mask = np.zeros((2, len(group), longest), np.int32)
    for row, encoding in enumerate(group):
        ids[row, : len(encoding)] = encoding.ids
        mask[row, : len(encoding)] = 1
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}


def _normalized(pooled: NDArray[np.float32]) -> NDArray[np.float32]:
    normalized: NDArray[np.float32] = pooled / np.linalg.norm(pooled, axis=1, keepdims=True)
    return normalized


def _onnxruntime(artifact: str, threads: int) -> Callable[[dict[str, Any]], NDArray[np.float32]]:
    import onnxruntime  # noqa: PLC0415  one engine is not loaded for the sake of the other

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(artifact, options, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]

    def pooled(tensors: dict[str, Any]) -> NDArray[np.float32]:
        outputs: list[NDArray[np.float32]] = session.run(None, {name: tensors[name] for name in names})
        return outputs[0]

    return pooled


def _openvino(artifact: str, threads: int) -> Callable[[dict[str, Any]], NDArray[np.float32]]:
    import openvino  # noqa: PLC0415  likewise

    options = {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": threads,
        "ENABLE_CPU_PINNING": False,
        "INFERENCE_PRECISION_HINT": "f32",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 64,
    }
    request = openvino.Core().compile_model(artifact, "CPU", options).create_infer_request()
    names = [port.get_any_name() for port in request.model_inputs]

    def pooled(tensors: dict[str, Any]) -> NDArray[np.float32]:
        request.infer({name: tensors[name] for name in names}, share_inputs=True, share_outputs=True)
        output: NDArray[np.float32] = request.get_output_tensor(0).data
        return output

    return pooled
