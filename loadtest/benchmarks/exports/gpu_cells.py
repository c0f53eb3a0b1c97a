"""Measurements of `make bench-gpu` without a server: the GPU, the engines on it, and PyTorch."""

from __future__ import annotations

import statistics
import time
from array import array
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from bertserve.export.checkpoint.reader import open_checkpoint
from bertserve.export.checkpoint.source import find
from bertserve.export.engines import tensorrt
from bertserve.export.graph import optimize
from bertserve.export.precision import half
from bertserve.export.progress import quiet
from bertserve.loadtest.benchmarks.exports import encoder_kernels, random_checkpoints
from bertserve.loadtest.report.sample import percentile
from bertserve.serving.engine.base import Batch
from bertserve.serving.engine.gpu.model import SIZES
from bertserve.serving.engine.gpu.tensorrt import TensorRtBackend
from bertserve.serving.records import EncodedText, ModelIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from bertserve.export.checkpoint.reader import Checkpoint
    from bertserve.serving.engine.base import Backend
    from bertserve.serving.engine.gpu.cuda import Device
    from bertserve.serving.engine.gpu.discovery import Machine
    from bertserve.serving.engine.specs import EngineBuild, ModelSpec

LENGTHS = (16, 32, 64, 128, 256, 384)
COMPARED = ((1, 16), (1, 128), (8, 128), (32, 128))
"""Shapes (texts, tokens) on which PyTorch runs too."""

MAX_TOKENS = SIZES[-1] * LENGTHS[-1]
"""Maximum tokens of a batch."""

SERVED_TOKENS = 128
"""Length of the texts sent to a server, and of those that measure the GPU's matrix rate."""

_MIN_RUNS, _MAX_RUNS, _CELL_S = 20, 300, 0.4
_MIB = 1 << 20


class Cell(NamedTuple):
    """Times of batches of `texts` texts of `tokens` tokens each."""

    texts: int
    tokens: int
    p50_us: float
    p99_us: float
    runs: int

    @classmethod
    def of(cls, texts: int, tokens: int, times_us: Sequence[float]) -> Cell:
        p99_us = percentile(sorted(times_us), 99)
        return cls(texts, tokens, statistics.median(times_us), p99_us, len(times_us))

    @property
    def per_s(self) -> float:
        """Texts per second, one batch after another."""
        return 1e6 * self.texts / self.p50_us


def gpu_rates(torch: Any, encoder: encoder_kernels.Encoder, until: float) -> tuple[float, float]:  # noqa: ANN401  a module
    """Bytes per second of a copy, and operations per second on a model's products in FP16."""
    block = torch.empty(256 * _MIB, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(block)
    copied_us = _torch_cell(torch, lambda: target.copy_(block), until).p50_us
    bandwidth = 2 * block.numel() / copied_us * 1e6
    best = 0.0
    for rows, width, out in encoder_kernels.products(encoder, SIZES[-1] * SERVED_TOKENS):
        left = torch.randn(rows, width, dtype=torch.float16, device="cuda")
        right = torch.randn(width, out, dtype=torch.float16, device="cuda")
        us = _torch_cell(torch, partial(torch.matmul, left, right), until).p50_us
        best = max(best, 2e6 * rows * width * out / us)
    return bandwidth, best


def _torch_cell(torch: Any, work: Callable[[], object], until: float, texts: int = 1, tokens: int = 1) -> Cell:  # noqa: ANN401
    """Times a PyTorch workload by the GPU's own clock."""
    for _ in range(5):
        work()
    torch.cuda.synchronize()
    times: list[float] = []
    started = time.monotonic()
    while len(times) < _MIN_RUNS or (len(times) < _MAX_RUNS and time.monotonic() - started < _CELL_S):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        work()
        last.record()
        torch.cuda.synchronize()
        times.append(1e3 * first.elapsed_time(last))
        if time.monotonic() > until:
            break
    return Cell.of(texts, tokens, times)


class Prepared(NamedTuple):
    """A model on disk: the graph for ONNX Runtime, and the one that TensorRT builds from."""

    name: str
    checkpoint: Checkpoint
    fused: Path
    plain: Path

    def spec(self, path: Path, build: EngineBuild | None = None) -> ModelSpec:
        """One of its files, as engines load it."""
        from bertserve.export.graph.task_model import spec_of  # noqa: PLC0415  imports PyTorch

        return msgspec.structs.replace(spec_of(self.checkpoint, path), build=build)


def prepare(size: str, folder: Path) -> Prepared:
    """Writes the fp16 graphs of a random BERT."""
    from bertserve.export.graph import task_model  # noqa: PLC0415  brings PyTorch

    folder.mkdir(parents=True)
    source = random_checkpoints.write(folder / "checkpoint", "bert", "embed", random_checkpoints.WHOLE[size])
    checkpoint = open_checkpoint(find(str(source)), LENGTHS[-1], lambda _: None)
    raw, fused = folder / "raw.onnx", folder / "fused.onnx"
    with quiet():
        task_model.write(task_model.load(checkpoint), raw)
    optimize.fuse(raw, fused, optimize.shape_of(checkpoint))
    half.convert(fused, folder / "cuda.onnx")
    half.convert(raw, folder / "plain.onnx")
    return Prepared(f"BERT-{size}", checkpoint, folder / "cuda.onnx", folder / "plain.onnx")


def engines(machine: Machine, model: Prepared, device: Device) -> Iterator[tuple[str, Callable[[], Backend]]]:
    """Loaders by name, one for each way to run a model; loading raises if this machine lacks it."""

    def ort_cuda() -> Backend:
        from bertserve.serving.engine.gpu.ort_cuda import OrtCudaBackend  # noqa: PLC0415  needs its library

        return OrtCudaBackend([model.spec(model.fused)], device, MAX_TOKENS)

    def tensorrt_engine(target: str) -> Backend:
        file = model.plain.with_name(f"{target}.engine")
        done = tensorrt.build(model.plain, file, target, max_length=LENGTHS[-1], count=lambda _done, _total: None)
        return TensorRtBackend([model.spec(file, build=done.engine)], device, MAX_TOKENS)

    yield "ort-cuda", ort_cuda
    for target, flavour in ((machine.gpus[0].target, "rtx"), (tensorrt.NATIVE, "enterprise")):
        if not machine.libraries[flavour].problem:
            yield f"tensorrt ({flavour})", lambda target=target: tensorrt_engine(target)  # type: ignore[misc]


def engine_cells(backend: Backend, vocabulary: int, until: float) -> list[Cell]:
    """Times of an engine: the compared shapes first, then the rest as long as there is time."""
    runner = backend.runner(0)
    rest = [(texts, tokens) for tokens in LENGTHS for texts in SIZES]
    cells = []
    for texts, tokens in dict.fromkeys([*COMPARED, *rest]):
        if time.monotonic() > until:
            break
        ids = array("i", [1000 + 7919 * index % (vocabulary - 1000) for index in range(tokens)])
        batch = Batch(ModelIndex(0), [EncodedText(ids)] * texts)
        times: list[float] = []
        started = time.monotonic()
        runner.run(batch)
        while len(times) < _MIN_RUNS or (len(times) < _MAX_RUNS and time.monotonic() - started < _CELL_S):
            times.append(runner.run(batch).compute_us)
        cells.append(Cell.of(texts, tokens, times))
    return sorted(cells, key=lambda cell: (cell.tokens, cell.texts))


def torch_cells(torch: Any, prepared: Prepared, until: float) -> dict[str, list[Cell]]:  # noqa: ANN401  a module
    """PyTorch's times on the compared shapes: eager, and compiled with CUDA graphs."""
    from bertserve.export.graph import task_model  # noqa: PLC0415  brings PyTorch

    model = task_model.load(prepared.checkpoint).half().cuda().eval()
    found: dict[str, list[Cell]] = {"eager": [], "torch.compile": []}
    with torch.inference_mode():
        for name, cells in found.items():
            run = model if name == "eager" else torch.compile(model, mode="reduce-overhead")
            for texts, tokens in COMPARED:
                if time.monotonic() > until:
                    break
                ones = torch.ones(texts, tokens, dtype=torch.int32, device="cuda")
                inputs = [ones.clone() for _ in task_model.inputs(prepared.checkpoint)]
                cells.append(_torch_cell(torch, partial(run, *inputs), until, texts, tokens))
    return found
