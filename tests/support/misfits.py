"""Graphs of a few bytes that are not what their manifest says, for every engine that reads ONNX."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx

from bertserve.serving.models.verified_dir import digest
from tests.support.poison import TINY_SIZE, tiny_model
from tests.support.specs import model_spec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bertserve.serving.engine.specs import ModelSpec


def model_at(folder: Path, model: onnx.ModelProto | bytes, size: int = TINY_SIZE, **changes: object) -> ModelSpec:
    path = folder / "model.onnx"
    path.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
    fields = {"path": str(path), "sha256": digest(path), "vocab_size": 100, "max_length": 16, **changes}
    return model_spec("tiny", size=size, **fields)


def renamed_input() -> onnx.ModelProto:
    model = tiny_model()
    model.graph.input[0].name = model.graph.node[0].input[0] = "tokens"
    return model


def more_inputs() -> onnx.ModelProto:
    model = tiny_model()
    model.graph.input.add().CopyFrom(onnx.helper.make_tensor_value_info("more", onnx.TensorProto.INT32, ["B"]))
    return model


def long_inputs() -> onnx.ModelProto:
    """A model that takes numbers of 64 bits."""
    model = tiny_model()
    for tensor in model.graph.input:
        tensor.type.tensor_type.elem_type = onnx.TensorProto.INT64
    return model


def renamed_output() -> onnx.ModelProto:
    model = tiny_model()
    model.graph.output[0].name = model.graph.node[-1].output[0] = "logits"
    return model


def more_outputs() -> onnx.ModelProto:
    model = tiny_model()
    model.graph.output.add().CopyFrom(onnx.helper.make_tensor_value_info("mean", onnx.TensorProto.FLOAT, ["B", 1]))
    return model


MISFITS: dict[str, tuple[Callable[[], onnx.ModelProto | bytes], str]] = {
    "another-input": (renamed_input, "inputs"),
    "one-more-input": (more_inputs, "inputs"),
    "inputs-of-64-bits": (long_inputs, "inputs"),
    "another-output": (renamed_output, "outputs"),
    "one-more-output": (more_outputs, "outputs"),
    "unknown-operator": (lambda: tiny_model(before=[onnx.helper.make_node("NoSuch", [], ["x"])]), "cannot load"),
    "no-model": (lambda: b"not a model", "cannot load"),
}
