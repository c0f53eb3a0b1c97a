"""Models split by layers on simulated GPUs, whose kernels are the same graphs run by ONNX Runtime on the CPU.

In one process what a part does on its GPU is compared; real servers show processes that share GPUs, and their end.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from array import array
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import onnx
import pytest

from export.cli.export import main as export
from export.graph import task_model
from export.split import flow, layers
from serving.engine.base import Batch, DeviceLost, LaneKind
from serving.engine.cpu.ort import OrtCpuBackend
from serving.engine.gpu.ort_cuda import OrtCudaBackend
from serving.engine.gpu.tensorrt import TensorRtBackend
from serving.engine.parts import chain, devices, processes
from serving.engine.parts.exchange import pair, send
from serving.engine.parts.processes import Order, Place
from serving.engine.specs import PartFile
from serving.errors import BundleError, EngineFault
from serving.models.bundle import open_bundle, part_entry
from serving.models.manifest import MANIFEST
from serving.models.verified_dir import digest
from serving.records import EncodedText, ModelIndex
from tests.support.checkpoints import write_task_checkpoint
from tests.support.clients import get, post_json
from tests.support.exports import fused, opened
from tests.support.gpus import without_gpu
from tests.support.server import Server, child_pids, is_running
from tests.support.short_form import in_short
from tests.support.simulated_gpus import ENGINES, LARGEST_BATCH_TOKENS, Bench, as_plan, environment
from tests.support.specs import model_spec
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from serving.engine.base import Backend
    from serving.engine.specs import ModelSpec

T4 = {"name": "Tesla T4", "capability": [7, 5], "memory": 16 << 30}
WHOLE, SPLIT = ModelIndex(0), ModelIndex(1)
MASK_ID = 4
PARTS = 2
IDS = [[2, 95, 96, 97, 98, 3], [2, 70, 80, 90, 3], [2, 3]]


def cut_for_engines(folder: Path) -> list[Path]:
    """The parts of the graph before it was fused."""
    flow.read_sizes_of_inputs(folder / "raw.onnx", folder / "sized.onnx")
    return layers.split(folder / "sized.onnx", [folder / f"{at}.onnx" for at in range(PARTS)], engines=True)


@pytest.fixture(scope="module", params=in_short(("embed", "fill_mask"), "fill_mask"))
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[ModelSpec]:
    """A tiny model: whole, in parts that share a table, and in parts that TensorRT could have."""
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint = opened(write_task_checkpoint(folder / "checkpoint", "bert", request.param, num_hidden_layers=4))
    graph = fused(checkpoint, folder)
    found = [task_model.spec_of(checkpoint, graph)]
    shared = layers.split(graph, [folder / f"shared{at}.onnx" for at in range(PARTS)])
    assert len(shared) == 2 * PARTS - 1
    found += [task_model.spec_of(checkpoint, *files, split=PARTS) for files in (shared, cut_for_engines(folder))]
    onnx.save(onnx.load(graph), folder / "whole.onnx")
    return [*found, task_model.spec_of(checkpoint, folder / "whole.onnx")]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def plans(model: ModelSpec, flavour: str) -> ModelSpec:
    """A model in parts, each an engine of a simulated TensorRT."""
    first, *others = [as_plan(graph, flavour) for graph in chain.files(model)]
    parts = tuple(PartFile(other.path, other.sha256) for other in others)
    return msgspec.structs.replace(first, parts=parts, split_by="layers")


def load(bench: Bench, engine: str, models: Sequence[ModelSpec]) -> Backend:
    """A whole model and one in parts on an engine of `ENGINES`, all in this process."""
    whole, shared, alone, whole_for_engines = models
    place = Place("ort-cuda" if engine == "ort-cuda" else "tensorrt", 0, LARGEST_BATCH_TOKENS)

    def load_split(model: ModelSpec) -> Any:
        return devices.load_here(model, place, bench.device)

    if engine == "ort-cuda":
        return OrtCudaBackend([whole, shared], bench.device, LARGEST_BATCH_TOKENS, load_split)
    specs = [as_plan(whole_for_engines, engine), plans(alone, engine)]
    return TensorRtBackend(specs, bench.device, LARGEST_BATCH_TOKENS, load_split=load_split)


def texts(*lengths: int) -> list[EncodedText]:
    """Texts of these lengths, each with a mask token where there is room."""
    rng = np.random.default_rng(7)
    made = [rng.integers(5, 90, length) for length in lengths]
    for ids in made:
        ids[1:2] = MASK_ID
    return [EncodedText(array("i", ids.tolist())) for ids in made]


@pytest.mark.parametrize("engine", ENGINES)
def test_parts_answer_as_the_whole(bench: Bench, models: list[ModelSpec], engine: str) -> None:
    """Alone, padded in both directions and in several runs, on every lane, beside a whole model that takes turns."""
    cpu, gpu = OrtCpuBackend(models[:1], 1), load(bench, engine, models)
    assert list(gpu.lanes()) == [LaneKind.WIDE, *[LaneKind.NARROW] * PARTS]
    for lengths in ((9,), (3, 20, 17), (32,), (5,) * 5, (11,) * 40):
        batch = texts(*lengths)
        expected = cpu.runner(0).run(Batch(WHOLE, batch))
        for lane, model in ((0, WHOLE), (0, SPLIT), (PARTS, SPLIT), (1, WHOLE)):
            found = gpu.runner(lane).run(Batch(model, batch))
            assert found.finite == [True] * len(batch)
            for one, other in zip(found.arrays, expected.arrays, strict=True):
                np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.parametrize("engine", ENGINES[1:])
def test_a_failure_in_a_part_is_told_apart_by_its_card(bench: Bench, models: list[ModelSpec], engine: str) -> None:
    """One that passes costs a batch; one that stays loses the device, and so does memory that is full."""
    gpu = load(bench, engine, models)
    batch = Batch(SPLIT, texts(9))
    bench.machine.fail["cuStreamSynchronize"] = 1
    with pytest.raises(EngineFault, match="CUDA_ERROR_INVALID_VALUE"):
        gpu.runner(0).run(batch)
    bench.machine.fail.clear()
    gpu.runner(0).run(batch)
    bench.machine.fail["cuStreamSynchronize"] = 700
    with pytest.raises(DeviceLost, match="CUDA error 700"):
        gpu.runner(0).run(batch)


@without_gpu
def test_a_part_whose_card_is_not_there_refuses_by_its_name(models: list[ModelSpec]) -> None:
    """The very process of a part, on this machine."""
    inbox, outbox, arena = *pair(), os.memfd_create("arena")
    control = processes.start("part 2 of 2", "part", [[inbox, outbox]], [arena])
    send(control, Order([chain.files(models[1])[1]], 1, 0, place=Place("ort-cuda", 1, LARGEST_BATCH_TOKENS)))
    with pytest.raises(BundleError, match=r"shared1\.onnx cannot run on GPU 1: no NVIDIA driver found"):
        processes.loaded("part 2 of 2", control)
    for each in (inbox, outbox, control):
        each.close()
    os.close(arena)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model in two parts in fp32, and as engines for a T4 that nobody has compared."""
    folder = tmp_path_factory.mktemp("split")
    checkpoint = write_task_checkpoint(folder / "small", "bert", "embed", num_hidden_layers=4)
    words = ["--out", str(folder / "models"), "--precision", "fp32", "--split", "2"]
    assert export([str(checkpoint), *words]) == 0
    bundle = open_bundle(folder / "models" / "small" / "1")
    fused(opened(checkpoint), folder)
    made = [
        as_plan(model_spec(path=str(part), max_length=bundle.manifest.max_length), "rtx")
        for part in cut_for_engines(folder)
    ]
    files = [bundle.path / f"model.sm75.fp16.part{number}of2.engine" for number in (1, 2)]
    for file, plan in zip(files, made, strict=True):
        shutil.copy(plan.path, file)
    manifest = json.loads((bundle.path / MANIFEST).read_bytes())
    entry = {
        **manifest["artifacts"][0],
        "kind": "tensorrt",
        "target": "sm75",
        "precision": "fp16",
        "file": files[0].name,
        "lookups": False,
        "sha256": digest(files[0]),
        "size_bytes": files[0].stat().st_size,
        "data": None,
        "engine": msgspec.to_builtins(made[0].build),
        "parts": [msgspec.to_builtins(part_entry(file)) for file in files[1:]],
    }
    manifest["artifacts"].append(entry)
    (bundle.path / MANIFEST).write_text(json.dumps(manifest))
    return folder / "models"


@pytest.mark.parametrize(("engine", "cards"), [("ort-cuda", 2), ("ort-cuda", 1), ("tensorrt", 2)])
def test_a_server_runs_each_part_in_a_process_with_a_card(repository: Path, engine: str, cards: int) -> None:
    """Two on one GPU where there is no other; a part that is killed costs a restart, and none is left over."""
    body = json.dumps({"inputs": IDS}).encode()
    precision = "fp16" if engine == "tensorrt" else "fp32"
    with Server(repository, "--engine", "ort-cpu", "--precision", "fp32") as server:
        expected = post_json(server.http, "/embed", body).json()
    options = ("--engine", engine, "--precision", precision)
    with Server(repository, *options, env=environment({"gpus": [T4] * cards})) as server:
        status = get(server.http, "/status").json()
        assert status["engine"]["lanes"] == ["wide", "narrow", "narrow"]
        assert len(status["choice"]["cards"]) == min(cards, 2)
        np.testing.assert_allclose(post_json(server.http, "/embed", body).json(), expected, atol=1e-5)
        engine_pid = server.engine_pid()
        (part,) = child_pids(engine_pid)
        os.kill(part, signal.SIGKILL)
        wait_for(lambda: not is_running(engine_pid), "the end of the engine process")
        wait_for(lambda: post_json(server.http, "/embed", body).status == 200, "a new engine", 30)
        np.testing.assert_allclose(post_json(server.http, "/embed", body).json(), expected, atol=1e-5)
