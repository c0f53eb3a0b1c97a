"""Engines on a simulated GPU, in this process; and how a server finds one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper

from bertserve.serving.engine.gpu import ort_cuda, tensorrt, tensorrt_library
from bertserve.serving.engine.gpu.cuda import Device
from bertserve.serving.engine.gpu.cuda_driver import Driver
from bertserve.serving.engine.specs import EngineBuild, ShapeProfile
from bertserve.serving.models.bundle import BundleWriter, file_entry, open_bundle
from bertserve.serving.models.verified_dir import digest
from tests.support.models import ROOT
from tests.support.simulated import simulated_ort, simulated_trt
from tests.support.simulated.cuda.bindings import driver as simulated_driver
from tests.support.tasks import tiny_model, write_bundle

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import SimpleNamespace

    import pytest

    from bertserve.serving.engine.base import Backend
    from bertserve.serving.engine.specs import KernelFiles, ModelSpec
    from tests.support.simulated.cuda.bindings.driver import Machine

SIMULATED = ROOT / "tests" / "support" / "simulated"
ENGINES = ("ort-cuda", "rtx", "enterprise")
LARGEST_BATCH_TOKENS = 512


def environment(described: dict[str, Any] | None = None) -> dict[str, str]:
    """Variables with which a process finds a simulated GPU, and the libraries for it."""
    places = os.pathsep.join(filter(None, [str(SIMULATED), os.environ.get("PYTHONPATH", "")]))
    return {"PYTHONPATH": places, "SIMULATED_GPU": json.dumps(described or {})}


class Bench:
    """A simulated machine with a GPU that engines are loaded on."""

    def __init__(self, patch: pytest.MonkeyPatch, described: dict[str, Any] | None = None) -> None:
        self._patch = patch
        self.machine: Machine = simulated_driver.reset(json.dumps(described or {}))
        self.device = Device(Driver(simulated_driver), 0)
        self.libraries: dict[str, SimpleNamespace] = {}
        self.use_ort()
        patch.setattr(tensorrt_library, "load", self.library)

    def use_ort(self, **options: bool) -> None:
        self.ort = simulated_ort.simulate(onnxruntime, simulated_driver, **options)
        self._patch.setattr(ort_cuda, "ort", self.ort)

    def library(self, flavour: str) -> SimpleNamespace:
        return self.libraries.setdefault(flavour, simulated_trt.simulate(flavour, onnxruntime, simulated_driver))

    def load(self, engine: str, specs: Sequence[ModelSpec], kernels: Sequence[KernelFiles] = ()) -> Backend:
        """Models on an engine of `ENGINES`; those of TensorRT are made of the graphs first."""
        if engine == "ort-cuda":
            return ort_cuda.OrtCudaBackend(specs, self.device, LARGEST_BATCH_TOKENS)
        return tensorrt.TensorRtBackend(
            [as_plan(spec, engine) for spec in specs], self.device, LARGEST_BATCH_TOKENS, kernels
        )


def as_plan(spec: ModelSpec, flavour: str, **changes: Any) -> ModelSpec:
    """The same model as an engine of a simulated TensorRT, beside its graph; `changes` go to its `EngineBuild`."""
    graph = Path(spec.path)
    lengths = [length for length in (16, 32, 64, 128, 256, 512) if length < spec.max_length] + [spec.max_length]
    file = graph.with_name(f"{graph.stem}.{flavour}.engine")
    file.write_bytes(simulated_trt.plan(graph.read_bytes(), flavour, lengths))
    said = {
        "flavour": flavour,
        "version": simulated_trt.VERSIONS[flavour],
        "compute_capability": "7.5",
        "profiles": tuple(ShapeProfile((1, length), (4, length), (32, length)) for length in lengths),
    }
    build = EngineBuild(**{**said, **changes})
    fields = {name: getattr(spec, name) for name in spec.__struct_fields__}
    return type(spec)(**{**fields, "path": str(file), "sha256": digest(file), "build": build})


def _spoiled(graph: bytes, words: int, token: int) -> bytes:
    model = onnx.load_from_string(graph)
    table = next(tensor for tensor in model.graph.initializer if len(tensor.dims) == 2 and tensor.dims[0] == words)
    values = numpy_helper.to_array(table).copy()
    values[token] = np.nan
    table.CopyFrom(numpy_helper.from_array(values, table.name))
    return model.SerializeToString()


def write_gpu_bundle(
    root: Path,
    scratch: Path,
    *,
    inside: str = "7.5",
    unproven: Sequence[str] = (),
    nan: int | None = None,
) -> Path:
    """A bundle of a tiny embedding model with a form for every engine, as simulated libraries run them.

    Args:
        root: The model repository.
        scratch: Where a bundle is made that it begins with.
        inside: What the engine's file says of that.
        unproven: Targets that nobody has compared with PyTorch.
        nan: A token that the model answers NaN to.
    """
    base = open_bundle(write_bundle(scratch, tiny_model("embed")))
    (cpu,) = base.manifest.artifacts
    graph = (base.path / cpu.file).read_bytes()
    if nan is not None:
        graph = _spoiled(graph, base.manifest.vocab_size, nan)
    target = "sm75"
    lengths = [16, 32, base.manifest.max_length]
    build = EngineBuild(
        flavour="rtx",
        version=simulated_trt.VERSIONS["rtx"],
        compute_capability="7.5",
        profiles=tuple(ShapeProfile((1, length), (4, length), (32, length)) for length in lengths),
    )
    plan = simulated_trt.plan(graph, "rtx", lengths, [int(part) for part in inside.split(".")])
    with BundleWriter(root, "embed") as writer:
        for name in (cpu.file, "tokenizer.json"):
            (writer.path / name).write_bytes((base.path / name).read_bytes())
            if name == cpu.file:
                (writer.path / name).write_bytes(graph)
        made = [msgspec.structs.replace(cpu, **msgspec.structs.asdict(file_entry(writer.path / cpu.file)))]
        for file, where, content, extra in (
            ("model.cuda.fp16.onnx", "cuda", graph, {}),
            (f"model.{target}.fp16.engine", target, plan, {"engine": build}),
        ):
            (writer.path / file).write_bytes(content)
            entry = msgspec.structs.asdict(file_entry(writer.path / file))
            proof = {} if where not in unproven else {"parity": None, "invariance": None, "batch_invariant": False}
            made.append(msgspec.structs.replace(cpu, **entry, precision="fp16", target=where, **extra, **proof))
        manifest = msgspec.structs.replace(base.manifest, version=writer.version, artifacts=tuple(made))
        return writer.publish(manifest).path
