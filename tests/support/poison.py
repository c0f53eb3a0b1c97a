"""Bundles that are well-formed and wrong: for tests of what the server does when a model misbehaves."""

from __future__ import annotations

import functools
import json
import struct
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import onnx
import onnx.parser
from onnx import numpy_helper

from bertserve.serving.models.bundle import MANIFEST
from bertserve.serving.models.verified_dir import digest
from bertserve.serving.records import IDS
from bertserve.serving.tasks import TASKS
from tests.support.expected import tokenizer
from tests.support.models import cache_key, copy_bundle, demo_repository, kept
from tests.support.specs import parts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FP32 = "model.fp32.onnx"
TINY_SIZE = 4


ENGINE = "model.sm75.fp16.engine"
ENGINE_BYTES = struct.pack("<4s4xI4xQ4B", b"vtrt", 2, 128, 1, 7, 1, 116) + bytes(100)
"""The head of an engine as TensorRT for RTX 1.7.1 writes it, and nothing behind it."""


def edit_manifest(bundle: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((bundle / MANIFEST).read_bytes())
    change(manifest)
    (bundle / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")


def keep_only_fp32(manifest: dict[str, Any]) -> None:
    manifest["artifacts"] = [entry for entry in manifest["artifacts"] if entry["file"] == FP32]


def sign(bundle: Path) -> None:

    def change(manifest: dict[str, Any]) -> None:
        data = [artifact["data"] for artifact in manifest["artifacts"] if artifact.get("data")]
        for entry in [*manifest["files"], *manifest["artifacts"], *data]:
            file = bundle / entry["file"]
            if file.is_file():
                entry |= {"sha256": digest(file), "size_bytes": file.stat().st_size}

    edit_manifest(bundle, change)


def add_engine(bundle: Path, data: bytes = ENGINE_BYTES) -> None:
    """Adds an engine for a T4 to a bundle, which is honest with the default bytes."""
    (bundle / ENGINE).write_bytes(data)

    def add(manifest: dict[str, Any]) -> None:
        profile = {"min": [1, manifest["max_length"]], "opt": [4, manifest["max_length"]]}
        manifest["artifacts"].append(
            {
                **manifest["artifacts"][0],
                "file": ENGINE,
                "precision": "fp16",
                "target": "sm75",
                "parity": None,
                "invariance": None,
                "batch_invariant": False,
                "engine": {
                    "flavour": "rtx",
                    "version": "1.7.1.116",
                    "compute_capability": "7.5",
                    "profiles": [{**profile, "max": [32, manifest["max_length"]]}],
                },
            }
        )

    edit_manifest(bundle, add)
    sign(bundle)


def tiny_model(*, before: Sequence[onnx.NodeProto] = (), size: int = TINY_SIZE, **changes: Any) -> onnx.ModelProto:
    """A model of a few bytes with the inputs and the output of an embedding model: the mean of the ids, `size` times.

    `changes` replace arguments of `onnx.helper.make_model`.
    """
    graph = onnx.parser.parse_graph(f"""
        tiny (int32[B, S] input_ids, int32[B, S] attention_mask, int32[B, S] token_type_ids)
            => (float[B, {size}] pooled) {{
            kept = Mul (input_ids, attention_mask)
            sums = Add (kept, token_type_ids)
            numbers = Cast <to = {onnx.TensorProto.FLOAT}> (sums)
            mean = ReduceMean <axes = [1], keepdims = 1> (numbers)
            pooled = Concat <axis = 1> ({", ".join(["mean"] * size)})
        }}""")
    for at, node in enumerate(before):
        graph.node.insert(at, node)
    options = {"opset_imports": [onnx.helper.make_opsetid("", 17)], "ir_version": 8} | changes
    return onnx.helper.make_model(graph, **options)


def tiny_bundle(models: Path, root: Path, model: onnx.ModelProto | bytes | None = None) -> Path:
    """A whole and honest bundle with a model of a few bytes, or with the one given; digests are right."""
    bundle = copy_bundle(models, root, without=("model.int8.onnx", FP32))
    model = model or tiny_model()
    (bundle / FP32).write_bytes(model if isinstance(model, bytes) else model.SerializeToString())

    def change(manifest: dict[str, Any]) -> None:
        keep_only_fp32(manifest)
        manifest["hidden_size"] = TINY_SIZE
        manifest["outputs"][0]["shape"] = [-1, TINY_SIZE]

    edit_manifest(bundle, change)
    sign(bundle)
    return bundle


def lighten(bundle: Path) -> None:
    """Replaces a bundle's graphs for a CPU by one of a few bytes that takes and answers tensors of the same shapes."""

    def change(manifest: dict[str, Any]) -> None:
        graph = tiny_model(size=manifest["hidden_size"]).SerializeToString()
        for artifact in manifest["artifacts"]:
            (bundle / artifact["file"]).write_bytes(graph)

    edit_manifest(bundle, change)
    sign(bundle)


@functools.cache
def light_tasks() -> Path:
    """A model of every task, called after it, for the fake engine: its graph has the right tensors and no more.

    So a server of all tasks needs no PyTorch.
    """
    models = demo_repository()

    def make(folder: Path) -> None:
        for task in TASKS:
            bundle = copy_bundle(models, folder, name=task, without=("model.int8.onnx", FP32))
            edit_manifest(bundle, partial(_change_task, task, bundle))
            sign(bundle)

    return kept(f"light-tasks-{cache_key(Path(__file__))}", make)


def _change_task(task: str, bundle: Path, manifest: dict[str, Any]) -> None:
    keep_only_fp32(manifest)
    inputs = TASKS[task].graph_inputs(segments=True)
    outputs = TASKS[task].graph_outputs(hidden_size=TINY_SIZE, labels=2, candidates=8, active=8)
    infos = [
        [
            onnx.helper.make_tensor_value_info(
                spec.name,
                onnx.TensorProto.INT32 if spec.dtype == "int32" else onnx.TensorProto.FLOAT,
                [None if size < 0 else size for size in spec.shape],
            )
            for spec in specs
        ]
        for specs in (inputs, outputs)
    ]
    model = onnx.helper.make_model(
        onnx.helper.make_graph([onnx.helper.make_node("Identity", [IDS], ["same"])], "light", *infos), ir_version=8
    )
    (bundle / FP32).write_bytes(model.SerializeToString())
    manifest |= {
        "model": task,
        "task": task,
        "hidden_size": TINY_SIZE,
        "inputs": msgspec.to_builtins(inputs),
        "outputs": msgspec.to_builtins(outputs),
        **msgspec.to_builtins(parts(task)),
    }


def poisoned_bundle(models: Path, root: Path, *, word: str) -> Path:
    """A bundle whose model answers NaN to each text with one word; digests are right."""
    graph = _with_addend(f"""
        equal = Equal (input_ids, word)
        found = Cast <to = {onnx.TensorProto.FLOAT}> (equal)
        any = ReduceMax <axes = [1], keepdims = 1> (found)
        negative = Neg (any)
        addend = Sqrt (negative)
    """)
    identity = np.array(tokenizer(models).encode(word).ids[1], np.int32)
    graph.graph.initializer.append(numpy_helper.from_array(identity, "word"))
    onnx.checker.check_model(graph)
    return tiny_bundle(models, root, graph)


def _with_addend(nodes: str) -> onnx.ModelProto:
    """A tiny model that adds what these nodes call `addend` to its answer."""
    parsed = onnx.parser.parse_graph(f"addend (int32[B, S] input_ids) => (float[B, 1] addend) {{ {nodes} }}")
    model = tiny_model(before=parsed.node)
    mean = next(node for node in model.graph.node if node.output[0] == "mean")
    mean.output[0] = "means"
    model.graph.node.insert(-1, onnx.helper.make_node("Add", ["means", "addend"], ["mean"]))
    return model


def too_large(place: Path) -> None:
    """Makes a bundle's model one that needs more memory than can be addressed, and is honest otherwise."""
    graph = _with_addend("""
        shape = Shape (input_ids)
        large = Mul (shape, many)
        zeros = ConstantOfShape (large)
        addend = ReduceMax <keepdims = 0> (zeros)
    """)
    graph.graph.initializer.append(numpy_helper.from_array(np.array([1, 1 << 46]), "many"))
    onnx.checker.check_model(graph)
    (place / FP32).write_bytes(graph.SerializeToString())
    sign(place)
