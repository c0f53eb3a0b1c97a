"""`make bench-gpu`: how fast the GPU at hand runs BERT-base and BERT-large, alone and behind the server.

Ends within eight minutes: each part has its share of them, and what there was no time for is named as not measured.
Weights are random and made here, from a fixed seed. Where no GPU can be used it says what it would run and why it
cannot.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from export.benchmarks import roofline
from export.benchmarks.gpu_cells import (
    COMPARED,
    LENGTHS,
    SERVED_TOKENS,
    Cell,
    Prepared,
    cell_of,
    engine_cells,
    engines,
    gpu_rates,
    prepare,
    torch_cells,
)
from export.benchmarks.gpu_served import CLIENTS, Served, serve
from export.errors import ExportError
from serving.engine.gpu import cuda_driver, discovery
from serving.engine.gpu.cuda import Device
from serving.engine.gpu.model import SIZES
from serving.errors import BundleError
from serving.host import installing
from serving.options import OptionParser

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from serving.engine.gpu.discovery import Machine

BUDGET_S = 460.0
MODELS = {"base": roofline.BASE, "large": roofline.LARGE}
_MIB = 1 << 20
_PACKAGES = ("onnxruntime-gpu", "tensorrt-rtx-cu13", "tensorrt", "cuda-bindings", "torch", "transformers")


class Clock:
    """What is left of the eight minutes."""

    def __init__(self, budget_s: float) -> None:
        self._end = time.monotonic() + budget_s

    @property
    def left_s(self) -> float:
        """Seconds."""
        return self._end - time.monotonic()

    def share(self, part: float) -> float:
        """When a part must end that has this share of what is left."""
        return time.monotonic() + part * max(0.0, self.left_s)


class Report:
    """What was found, as the page says it; each section is written as soon as it is known."""

    def __init__(self, out: Path, machine: Machine, arguments: str) -> None:
        self._out = out
        self.tables: list[str] = []
        self.missing: list[str] = []
        self._head = [
            "# On a GPU",
            "",
            f"Made by `make bench-gpu{arguments}`, which runs `python -m export.benchmarks.gpu`.",
            "",
            *(f"- {name}: {value}" for name, value in facts(machine).items()),
            "",
        ]

    def add(self, *lines: str) -> None:
        """A section."""
        self.tables += [*lines, ""]
        self.write()

    def write(self) -> None:
        """The page as it is by now."""
        missing = ["## Not measured", "", *(f"- {line}" for line in self.missing), ""] if self.missing else []
        self._out.write_text("\n".join([*self._head, *self.tables, *missing]), encoding="utf-8")


def facts(machine: Machine) -> dict[str, str]:
    """What it ran on and with."""
    gpu = machine.gpus[0]
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "Date": datetime.now(UTC).date().isoformat(),
        "GPU": f"{gpu.name}, compute capability {gpu.compute_capability},"
        f" {gpu.memory_bytes // _MIB:,} MiB; driver for CUDA {'{}.{}'.format(*machine.cuda)}",
        "CPU": f"{os.cpu_count()} cores, {platform.machine()}",
        "Python": platform.python_version(),
        **versions,
    }


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


def main(argv: Sequence[str] | None = None, look: Callable[[], Machine] = discovery.look) -> int:
    """Measures and writes: 0 done, 1 there is no GPU that could be used."""
    parser = OptionParser(prog="python -m export.benchmarks.gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks/gpu.md"), metavar="FILE")
    parser.add_argument("--costs", type=Path, default=Path("docs/benchmarks/gpu-costs.json"), metavar="FILE")
    parser.add_argument("--engine", default="auto", help="of the server (default: auto)")
    parser.add_argument("--seconds", type=float, default=BUDGET_S, help="to end within (default: %(default).0f)")
    options = parser.parse_args(argv)
    clock = Clock(options.seconds)
    machine = look()
    problem = machine.problem
    if not problem:
        try:
            import torch  # noqa: PLC0415  slow to import, and not needed to say that there is no GPU

            problem = (
                "" if torch.cuda.is_available() else "PyTorch is installed without CUDA, which the GPU is measured with"
            )
        except ModuleNotFoundError:
            problem = f"PyTorch is not installed: {installing('export')}"
    if problem:
        print(f"{plan()}\n\nIt cannot: {problem}.")  # noqa: T201  a command
        return 1
    report = Report(options.out, machine, "")
    with tempfile.TemporaryDirectory() as folder:
        _measure(torch, machine, Path(folder), options, clock, report)
    report.write()
    print(f"written: {options.out} and {options.costs}, {clock.left_s:.0f} s before the end")  # noqa: T201  a command
    return 0


def _measure(
    torch: Any,  # noqa: ANN401  a module
    machine: Machine,
    folder: Path,
    options: argparse.Namespace,
    clock: Clock,
    report: Report,
) -> None:
    rates = {size: gpu_rates(torch, encoder, clock.share(0.05)) for size, encoder in MODELS.items()}
    for size, (bandwidth, rate) in rates.items():
        report.add(
            f"BERT-{size}: {bandwidth / 1e9:,.0f} GB/s of a copy, {rate / 1e12:,.1f} TFLOPS on its own products"
            f" ({SIZES[-1]} texts of {SERVED_TOKENS} tokens, FP16)."
        )
    best: dict[str, tuple[str, list[Cell]]] = {}
    for size in MODELS:
        model = prepare(size, folder / size)
        until = clock.share(0.3 if size == "base" else 0.5)
        best[size] = _engines(machine, model, size, rates[size], until, report)
        _compared(torch, model, best[size][1], clock.share(0.15), report)
        torch.cuda.empty_cache()
    _write_costs(options.costs, machine, *best["base"])
    try:
        _write_served(serve(folder, options.engine, clock.share(0.95)), best["base"][1], options.costs, report)
    except (ExportError, OSError) as error:
        report.missing.append(f"the server end to end: {error}")


def _engines(
    machine: Machine, model: Prepared, size: str, rates: tuple[float, float], until: float, report: Report
) -> tuple[str, list[Cell]]:
    """Every engine's table; the one with the least time for one text of 128 tokens is returned."""
    cells_by_engine: dict[str, list[Cell]] = {}
    device = Device(cuda_driver.load(), 0)
    for name, load in engines(machine, model, device):
        if time.monotonic() > until:
            report.missing.append(f"{model.name} with {name}: the time was up")
            continue
        try:
            cells_by_engine[name] = engine_cells(load(), model.checkpoint.size("vocab_size"), until)
        except (BundleError, ExportError, cuda_driver.CudaError) as error:
            report.missing.append(f"{model.name} with {name}: {error}")
            continue
        rows = [
            (
                *(str(cell.tokens), str(cell.texts), f"{cell.p50_us / 1e3:.3f}", f"{cell.p99_us / 1e3:.3f}"),
                *(f"{cell.per_s:,.0f}", _over_floor(cell, MODELS[size], rates), _of_rate(cell, MODELS[size], rates[1])),
            )
            for cell in cells_by_engine[name]
        ]
        head = ("tokens", "texts", "p50 ms", "p99 ms", "texts/s", "over the floor", "of the matrix rate")
        report.add(f"## {model.name}, {name}, engine only", "", *_table(head, rows))
    if not cells_by_engine:
        return "none", []
    return min(
        cells_by_engine.items(), key=lambda item: next((c.p50_us for c in item[1] if c[:2] == (1, SERVED_TOKENS)), 1e12)
    )


def _over_floor(cell: Cell, encoder: roofline.Encoder, rates: tuple[float, float]) -> str:
    floor = roofline.floor_us(roofline.kernels(encoder, cell.texts, cell.tokens), rates[1], rates[0])
    return f"{cell.p50_us / floor:.2f} x {floor / 1e3:.3f} ms"


def _of_rate(cell: Cell, encoder: roofline.Encoder, rate: float) -> str:
    operations = sum(kernel.operations for kernel in roofline.kernels(encoder, cell.texts, cell.tokens))
    return f"{100 * operations / (cell.p50_us * 1e-6) / rate:.0f}%"


def _compared(torch: Any, model: Prepared, ours: Sequence[Cell], until: float, report: Report) -> None:  # noqa: ANN401
    theirs = torch_cells(torch, model, until)
    rows = []
    for texts, tokens in COMPARED:
        columns = [next((c for c in cells if c[:2] == (texts, tokens)), None) for cells in (ours, *theirs.values())]
        rows.append((str(tokens), str(texts), *("-" if c is None else f"{c.p50_us / 1e3:.3f}" for c in columns)))
    head = ("tokens", "texts", "our best engine", *(f"PyTorch, {name}" for name in theirs))
    report.add(f"## {model.name} beside PyTorch, FP16, p50 ms", "", *_table(head, rows))


def _write_costs(path: Path, machine: Machine, engine: str, cells: Sequence[Cell]) -> None:
    """A table of `bertserve simulate`."""
    points = [
        {"tokens": c.tokens, "texts": c.texts, "ms": c.p50_us / 1e3, "p99_ms": c.p99_us / 1e3, "source": "measured"}
        for c in cells
    ]
    source = {"measured": {"url": "docs/benchmarks/gpu.md", "what": f"{engine}, engine only, `make bench-gpu`"}}
    table = {"title": f"BERT-base FP16 on one {machine.gpus[0].name}", "sources": source, "points": points}
    path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def _write_served(served: Served, cells: Sequence[Cell], costs: Path, report: Report) -> None:
    alone = next((cell.p50_us for cell in cells if cell[:2] == (1, SERVED_TOKENS)), 0.0)
    rows = [
        (
            name,
            *(f"{value / 1e3:.3f}" for value in (c.p50_us, c.p99_us, c.p50_us - statistics.median(served.compute_us))),
        )
        for name, times in (("HTTP", served.http_us), ("gRPC", served.grpc_us))
        if times
        for c in [cell_of(1, SERVED_TOKENS, times)]
    ]
    if not served.grpc_us:
        report.missing.append(f"the server over gRPC: {installing('loadtest')} brings the client")
    costs.with_name("gpu-status.json").write_text(json.dumps(served.status, indent=1) + "\n", encoding="utf-8")
    report.add(
        f"## BERT-base behind the server, one client, {SERVED_TOKENS} tokens",
        "",
        *_table(("over", "p50 ms", "p99 ms", "above the engine ms"), rows),
        "",
        f"The engine alone, in a process of its own kind: {alone / 1e3:.3f} ms. {CLIENTS} clients get"
        f" {served.per_s:,.0f} answers a second; what bounds them is {served.bottleneck}.",
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---:"] * len(head), *rows)]


if __name__ == "__main__":
    sys.exit(main())
