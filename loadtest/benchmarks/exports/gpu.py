"""`make bench-gpu`: how fast the GPU at hand runs BERT-base and BERT-large, alone and behind the server.

Ends within eight minutes: each step has its share of them, and what there was no time for is named as not measured.
Weights are random and made here, from a fixed seed. Where no GPU can be used it says what it would run and why it
cannot.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from export.errors import ExportError
from loadtest.benchmarks.exports.gpu_cells import (
    COMPARED,
    LENGTHS,
    SERVED_TOKENS,
    Cell,
    cell_of,
    engine_cells,
    engines,
    gpu_rates,
    prepare,
    torch_cells,
)
from loadtest.benchmarks.exports.gpu_served import CLIENTS, serve
from loadtest.benchmarks.runner import Benchmark, Option, Page, Part
from loadtest.benchmarks.show import table
from loadtest.capacity import encoder_kernels
from loadtest.errors import BenchError
from serving.engine.gpu import cuda_driver, discovery
from serving.engine.gpu.cuda import Device
from serving.engine.gpu.model import SIZES
from serving.errors import BundleError
from serving.host import installed, installing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from loadtest.benchmarks.exports.gpu_cells import Prepared
    from loadtest.benchmarks.store import Step, Store
    from serving.engine.gpu.discovery import Machine

BUDGET_S = 460.0
MODELS = {"base": encoder_kernels.BASE, "large": encoder_kernels.LARGE}
_SHARES = {"base": 0.3, "large": 0.5}
"""Of the time that is left, what the engines of a model may take."""
_RATES_SHARE, _TORCH_SHARE, _SERVED_SHARE = 0.05, 0.15, 0.95
_MIB = 1 << 20
_PACKAGES = ("onnxruntime-gpu", "tensorrt-rtx-cu13", "tensorrt", "cuda-bindings", "torch", "transformers")


class GpuBenchmark(Benchmark):
    """Writes docs/benchmarks/gpu-costs.json too, a cost file for `bertserve simulate`, and the server's `/status`."""

    name = "gpu"
    purpose = "BERT-base and BERT-large on the GPU at hand: engines, PyTorch, the server; within eight minutes"
    seconds = BUDGET_S
    models = ""
    errors = (BenchError, ExportError)
    own = (
        Option("--engine", "auto", "of the server (%(default)s)"),
        Option("--costs", Path("docs/benchmarks/gpu-costs.json"), "the cost file (%(default)s)"),
    )

    @cached_property
    def _machine(self) -> Machine:
        machine = discovery.look()
        problem = machine.problem
        if not problem:
            try:
                import torch  # noqa: PLC0415  slow to import, and not needed to say that there is no GPU

                problem = "" if torch.cuda.is_available() else "PyTorch is installed without CUDA, which is needed"
            except ModuleNotFoundError:
                problem = f"PyTorch is not installed: {installing('export')}"
        if problem:
            raise BenchError(f"{plan()}\n\nIt cannot: {problem}.")
        return machine

    @cached_property
    def _torch(self) -> Any:  # noqa: ANN401  a module
        import torch  # noqa: PLC0415  slow to import

        return torch

    @cached_property
    def _folder(self) -> Path:
        return Path(self.stack.enter_context(tempfile.TemporaryDirectory()))

    @cached_property
    def _end(self) -> float:
        return time.monotonic() + float(self.options.seconds)

    def _share(self, part: float) -> float:
        """When a step must end that has this share of what is left."""
        now = time.monotonic()
        return now + part * max(0.0, self._end - now)

    def _prepared(self, size: str) -> Prepared:
        made: dict[str, Prepared] = self.__dict__.setdefault("_made", {})
        if size not in made:
            made[size] = prepare(size, self._folder / size)
        return made[size]

    def facts(self) -> dict[str, Any]:
        gpu, cuda = self._machine.gpus[0], "{}.{}".format(*self._machine.cuda)
        memory = f"{gpu.memory_bytes // _MIB:,} MiB"
        named = {name: installed(name).get(name, "not installed") for name in _PACKAGES}
        said = f"{gpu.name}, compute capability {gpu.compute_capability}, {memory}; driver for CUDA {cuda}"
        return {"gpu": gpu.name, "GPU": said, "versions": named}

    def steps(self) -> Iterator[Step]:
        yield "date", lambda: datetime.now(UTC).date().isoformat()
        for size, encoder in MODELS.items():
            yield f"rates {size}", partial(self._rates, encoder)
        for size in MODELS:
            yield f"engines {size}", partial(self._engines, size)
            yield f"torch {size}", partial(self._compared, size)
        yield "served", self._served

    def _rates(self, encoder: encoder_kernels.Encoder) -> list[float]:
        return list(gpu_rates(self._torch, encoder, self._share(_RATES_SHARE)))

    def _engines(self, size: str) -> dict[str, Any]:
        """The cells of every engine, and what stands against those that have none."""
        until, model = self._share(_SHARES[size]), self._prepared(size)
        found: dict[str, Any] = {}
        for name, load in engines(self._machine, model, Device(cuda_driver.load(), 0)):
            self.say(f"{model.name} with {name}")
            if time.monotonic() > until:
                found[name] = "the time was up"
                continue
            try:
                found[name] = engine_cells(load(), model.checkpoint.size("vocab_size"), until)
            except (BundleError, ExportError, cuda_driver.CudaError) as error:
                found[name] = str(error)
        return found

    def _compared(self, size: str) -> dict[str, list[Cell]]:
        cells = torch_cells(self._torch, self._prepared(size), self._share(_TORCH_SHARE))
        self._torch.cuda.empty_cache()
        return cells

    def _served(self) -> dict[str, Any]:
        self._prepared("base")
        try:
            served = serve(self._folder, self.options.engine, self._share(_SERVED_SHARE))
        except (ExportError, OSError) as error:
            return {"obstacle": str(error)}
        return served._asdict()

    def page(self, store: Store) -> Page:
        steps = store.steps
        parts: list[Part] = [
            f"BERT-{size}: {rates[0] / 1e9:,.0f} GB/s of a copy, {rates[1] / 1e12:,.1f} TFLOPS on its own products"
            f" ({SIZES[-1]} texts of {SERVED_TOKENS} tokens, FP16)."
            for size, rates in store.named("rates ").items()
        ]
        missing = []
        for size, found in store.named("engines ").items():
            for name, cells in found.items():
                if isinstance(cells, str):
                    missing.append(f"BERT-{size} with {name}: {cells}")
                else:
                    parts.append(_engine_table(size, name, [Cell(*cell) for cell in cells], steps[f"rates {size}"]))
            if theirs := steps.get(f"torch {size}"):
                parts.append(_torch_table(size, _best(found)[1], theirs))
        served = steps.get("served", {"obstacle": "not yet"})
        if "obstacle" in served:
            missing.append(f"the server end to end: {served['obstacle']}")
        else:
            parts += _served_parts(served, _best(steps["engines base"])[1])
            missing += (
                [] if served["grpc_us"] else [f"the server over gRPC: {installing('loadtest')} brings the client"]
            )
        if missing:
            parts.append("\n".join(["## Not measured", "", *(f"- {line}" for line in missing)]))
        facts = {"Date": steps.get("date", ""), "GPU": store.facts["GPU"], **store.facts["versions"]}
        return Page("On a GPU", "`make bench-gpu` runs it.", parts, facts=facts)

    def show(self, store: Store) -> str:
        costs: Path = self.options.costs
        if found := store.steps.get("engines base"):
            costs.write_text(json.dumps(_costs(store.facts["gpu"], *_best(found)), indent=1) + "\n", encoding="utf-8")
        if status := store.steps.get("served", {}).get("status"):
            costs.with_name("gpu-status.json").write_text(json.dumps(status, indent=1) + "\n", encoding="utf-8")
        return super().show(store)


def plan() -> str:
    """What is run where there is a GPU."""
    shapes = ", ".join(f"{texts} x {tokens}" for texts, tokens in COMPARED)
    return (
        "make bench-gpu would run, within eight minutes:\n"
        "  1. the GPU's bandwidth, and its FP16 matrix rate on the model's own shapes\n"
        f"  2. BERT-base and BERT-large, random weights of a fixed seed, FP16, {LENGTHS[0]} to {LENGTHS[-1]} tokens,"
        f" batches of {SIZES[0]} to {SIZES[-1]}: p50, p99 and throughput of each engine that runs here, beside the\n"
        "     launch-aware floor\n"
        f'  3. torch.compile(mode="reduce-overhead") and eager PyTorch on {shapes} (texts x tokens)\n'
        "  4. the server over HTTP and gRPC: p50 and p99 of one client, throughput of many, and its bottleneck\n"
        "and write docs/benchmarks/gpu.md and docs/benchmarks/gpu-costs.json, a cost file for `bertserve simulate`."
    )


def _alone_us(cells: Sequence[Cell], otherwise: float) -> float:
    """p50 of one text of 128 tokens."""
    return next((cell.p50_us for cell in cells if cell[:2] == (1, SERVED_TOKENS)), otherwise)


def _best(found: dict[str, Any]) -> tuple[str, list[Cell]]:
    """The engine with the least time for one text of 128 tokens, and its cells."""
    measured = {name: [Cell(*cell) for cell in cells] for name, cells in found.items() if not isinstance(cells, str)}
    return min(measured.items(), key=lambda item: _alone_us(item[1], 1e12), default=("none", []))


def _engine_table(size: str, name: str, cells: Sequence[Cell], rates: Sequence[float]) -> Part:
    bandwidth, rate = rates

    def kernels(cell: Cell) -> list[encoder_kernels.Kernel]:
        return encoder_kernels.kernels(MODELS[size], cell.texts, cell.tokens)

    def over_floor(cell: Cell) -> str:
        floor = encoder_kernels.floor_us(kernels(cell), rate, bandwidth)
        return f"{cell.p50_us / floor:.2f} x {floor / 1e3:.3f} ms"

    def of_rate(cell: Cell) -> str:
        return f"{100 * sum(one.operations for one in kernels(cell)) / (cell.p50_us * 1e-6) / rate:.0f}%"

    return table(
        f"BERT-{size}, {name}, engine only",
        "",
        cells,
        ("tokens", lambda cell: cell.tokens),
        ("texts", lambda cell: cell.texts),
        ("p50 ms", lambda cell: f"{cell.p50_us / 1e3:.3f}"),
        ("p99 ms", lambda cell: f"{cell.p99_us / 1e3:.3f}"),
        ("texts/s", lambda cell: f"{cell.per_s:,.0f}"),
        ("over the floor", over_floor),
        ("of the matrix rate", of_rate),
    )


def _torch_table(size: str, ours: Sequence[Cell], theirs: dict[str, Any]) -> Part:
    def p50(cells: Sequence[Any]) -> Callable[[tuple[int, int]], str]:
        by_shape = {cell[:2]: cell.p50_us for cell in (Cell(*each) for each in cells)}
        return lambda shape: f"{by_shape[shape] / 1e3:.3f}" if shape in by_shape else "-"

    return table(
        f"BERT-{size} beside PyTorch, FP16, p50 ms",
        "",
        COMPARED,
        ("tokens", lambda shape: shape[1]),
        ("texts", lambda shape: shape[0]),
        ("our best engine", p50(ours)),
        *((f"PyTorch, {name}", p50(cells)) for name, cells in theirs.items()),
    )


def _costs(gpu: str, engine: str, cells: Sequence[Cell]) -> dict[str, Any]:
    """A table of `bertserve simulate`."""
    points = [
        {"tokens": c.tokens, "texts": c.texts, "ms": c.p50_us / 1e3, "p99_ms": c.p99_us / 1e3, "source": "measured"}
        for c in cells
    ]
    source = {"measured": {"url": "docs/benchmarks/gpu.md", "what": f"{engine}, engine only, `make bench-gpu`"}}
    return {"title": f"BERT-base FP16 on one {gpu}", "sources": source, "points": points}


def _served_parts(served: dict[str, Any], cells: Sequence[Cell]) -> list[Part]:
    compute_us = statistics.median(served["compute_us"])
    times = {"HTTP": served["http_us"], "gRPC": served["grpc_us"]}
    rows = [(name, cell_of(1, SERVED_TOKENS, each)) for name, each in times.items() if each]
    clients = (
        f"The engine alone, in a process of its own kind: {_alone_us(cells, 0.0) / 1e3:.3f} ms. {CLIENTS} clients get"
        f" {served['per_s']:,.0f} answers a second; what bounds them is {served['bottleneck']}."
    )
    return [
        table(
            f"BERT-base behind the server, one client, {SERVED_TOKENS} tokens",
            "",
            rows,
            ("over", lambda row: row[0]),
            ("p50 ms", lambda row: f"{row[1].p50_us / 1e3:.3f}"),
            ("p99 ms", lambda row: f"{row[1].p99_us / 1e3:.3f}"),
            ("above the engine ms", lambda row: f"{(row[1].p50_us - compute_us) / 1e3:.3f}"),
        ),
        clients,
    ]
