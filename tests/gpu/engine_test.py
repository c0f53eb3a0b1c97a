"""The CUDA layer and the engines on a real GPU."""

from __future__ import annotations

import subprocess
import sys
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from bertserve.serving.engine.base import Batch
from bertserve.serving.engine.cpu.ort import OrtCpuBackend
from bertserve.serving.engine.gpu.cuda import Buffer
from bertserve.serving.inference.served_models import Repository
from bertserve.serving.records import EncodedText, ModelIndex
from tests.support.expected import cosines
from tests.support.gpu_kernel import kernel
from tests.support.gpus import without_graphs
from tests.support.models import ROOT
from tests.support.skips import excused

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bertserve.serving.engine.base import Backend
    from bertserve.serving.engine.gpu.cuda import Device
    from bertserve.serving.engine.gpu.discovery import Machine
    from bertserve.serving.models.bundle import Bundle

pytestmark = pytest.mark.gpu

TEXTS = 1000
MAX_TOKENS = 4096
COSINE = 0.9999
ALONE = 0.999
SAME = 0.99999


FAULT = """
import ctypes
from bertserve.serving.engine.gpu import cuda_driver
from bertserve.serving.engine.base import DeviceLost
from bertserve.serving.engine.gpu.cuda import Device
from tests.support.gpu_kernel import kernel
device = Device(cuda_driver.load(), 0)
kernel(device)(16)
try:
    device.wait()
except cuda_driver.CudaError as error:
    assert error.sticky, error
    try:
        device.check(str(error), lost=False)
    except DeviceLost:
        print("lost")
"""


def test_a_graph_replays_what_was_captured(device: Device) -> None:
    """Copies and a kernel, written down once: each launch reads what lies at the addresses by then."""
    add_one = kernel(device)
    buffer = Buffer(device, "float32", 32)

    def work() -> None:
        buffer.send((32,))
        add_one(buffer.address)
        buffer.fetch((32,))

    buffer.view((32,))[...] = 5
    graph = device.capture(work)
    device.wait()
    assert buffer.view((32,)).tolist() == [5] * 32
    for expected in (6, 7, 8):
        device.launch(graph)
        device.wait()
        assert buffer.view((32,)).tolist() == [expected] * 32


def test_a_sticky_error_is_known_as_one(machine: Machine) -> None:
    """A kernel that writes nowhere: in a process of its own, which is of no use afterwards."""
    assert machine.gpus
    done = subprocess.run(
        [sys.executable, "-c", FAULT], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "lost", done.stderr


@pytest.fixture(scope="session", params=["ort-cuda", "tensorrt"])
def backend(request: pytest.FixtureRequest, machine: Machine, device: Device, bundle: Bundle, proven: Path) -> Backend:
    """The demo model on each engine that this GPU has."""
    name: str = request.param
    target = machine.gpus[0].target
    if name == "tensorrt" and all(artifact.target != target for artifact in bundle.manifest.artifacts):
        pytest.skip(excused(f"TensorRT builds nothing for {target} here"))
    repository = Repository.open(bundle.path.parents[1], "fp16", engine=name, cache=proven)
    specs = [model.spec() for model in repository.models]
    assert all(spec.batch_invariant for spec in specs)
    if name == "tensorrt":
        from bertserve.serving.engine.gpu.tensorrt import TensorRtBackend  # noqa: PLC0415  only where there is a GPU

        return TensorRtBackend(specs, device, MAX_TOKENS)
    from bertserve.serving.engine.gpu.ort_cuda import OrtCudaBackend  # noqa: PLC0415  likewise

    return OrtCudaBackend(specs, device, MAX_TOKENS)


@pytest.fixture(scope="session")
def texts() -> list[EncodedText]:
    rng = np.random.default_rng(3)
    lengths = rng.integers(3, 200, TEXTS)
    return [EncodedText(array("i", [101, *rng.integers(1000, 20000, length - 2).tolist(), 102])) for length in lengths]


def answers(backend: Backend, texts: Sequence[EncodedText], size: int) -> np.ndarray[Any, Any]:
    """Each text's vector, in batches of a size; none of them may be other than finite."""
    runner = backend.runner(0)
    rows = []
    for at in range(0, len(texts), size):
        output = runner.run(Batch(ModelIndex(0), list(texts[at : at + size])))
        assert all(output.finite)
        rows.append(output.arrays[0])
    return np.concatenate(rows)


def test_the_answers_are_those_of_fp32_on_the_cpu(backend: Backend, bundle: Bundle, texts: list[EncodedText]) -> None:
    """A thousand texts, alone: cosine at least 0.9999."""
    fp32 = [model.spec() for model in Repository.open(bundle.path.parents[1], "fp32").models]
    expected = answers(OrtCpuBackend(fp32, 8), texts, 1)
    assert cosines(answers(backend, texts, 1), expected).min() >= COSINE


@pytest.mark.parametrize("size", [2, 5, 16, 32])
def test_company_changes_no_answer(backend: Backend, texts: list[EncodedText], size: int) -> None:
    """The same text alone and in any batch, padded and not."""
    assert cosines(answers(backend, texts, 1), answers(backend, texts, size)).min() >= ALONE


def test_a_graph_answers_as_the_work_that_it_was_made_of(backend: Backend, texts: list[EncodedText]) -> None:
    """Replay, replay again and piece by piece: kernels are chosen anew without a graph, so last bits may change."""
    runner: Any = backend.runner(0)
    for size in (1, 2, 4):
        batch = Batch(ModelIndex(0), texts[:size])
        replayed, again = (runner.run(batch).arrays[0] for _ in range(2))
        with without_graphs(runner.models[0]):
            queued = runner.run(batch).arrays[0]
        for other in (again, queued):
            print(f"{size} texts: {np.abs(replayed - other).max():.1e}")  # noqa: T201  how much, for docs/benchmarks
            assert cosines(replayed, other).min() >= SAME
        assert size > 1 or np.array_equal(replayed, again)


def test_memory_does_not_grow(backend: Backend, device: Device, texts: list[EncodedText]) -> None:
    """Some thousand batches of 1 to 32 texts leave the GPU's free memory where it was."""
    answers(backend, texts, 7)
    free, _ = device.driver.memory()
    for _ in range(10):
        for size in (1, 3, 8, 32):
            answers(backend, texts[:250], size)
    assert free - device.driver.memory()[0] == 0
