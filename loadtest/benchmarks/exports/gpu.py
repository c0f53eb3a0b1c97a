"""`make bench-gpu`: how fast the local GPU runs BERT-base and BERT-large, alone and behind the server.

Ends within eight minutes: each step has a share of them, and steps without time left are listed as not measured.
Weights are random, from a fixed seed. Without a usable GPU it lists what it would run and why it cannot.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertserve.export.errors import ExportError
from bertserve.export.recipe import WAIVABLE
from bertserve.loadtest.benchmarks.exports import encoder_kernels
from bertserve.loadtest.benchmarks.exports.gpu_cells import (
    COMPARED,
    LENGTHS,
    MAX_TOKENS,
    SERVED_TOKENS,
    Cell,
    engine_cells,
    engines,
    gpu_rates,
    prepare,
    torch_cells,
)
from bertserve.loadtest.benchmarks.runner import Benchmark, Option
from bertserve.loadtest.benchmarks.server_process import BertServer, program
from bertserve.loadtest.benchmarks.turns import measure_round
from bertserve.loadtest.errors import BenchError
from bertserve.loadtest.generator.client import GRPC
from bertserve.serving.engine.gpu import cuda_driver, discovery
from bertserve.serving.engine.gpu.cuda import Device
from bertserve.serving.engine.gpu.model import SIZES
from bertserve.serving.errors import BundleError
from bertserve.serving.host import available_cpus, installed_versions, installing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bertserve.loadtest.benchmarks.exports.gpu_cells import Prepared
    from bertserve.loadtest.benchmarks.store import Step, Store
    from bertserve.serving.engine.gpu.discovery import Machine

BUDGET_S = 460.0
MODELS = {"base": encoder_kernels.BASE, "large": encoder_kernels.LARGE}
_SHARES = {"base": 0.3, "large": 0.5}
"""Share of the remaining time for the engines of a model."""
_RATES_SHARE, _TORCH_SHARE, _SERVED_SHARE = 0.05, 0.15, 0.95
_CLIENTS, _LOAD_S, _SERVER_START_S = 32, 8.0, 120.0
_MIB = 1 << 20
_UTILIZATION = ("nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits")
_PACKAGES = ("onnxruntime-gpu", "tensorrt-rtx-cu13", "tensorrt", "cuda-bindings", "torch", "transformers")
PLAN = f"""\
make bench-gpu would run, within eight minutes:
  1. the GPU's bandwidth, and its FP16 matrix rate on the model's own shapes
  2. BERT-base and BERT-large, random weights of a fixed seed, FP16, {LENGTHS[0]} to {LENGTHS[-1]} tokens, batches of
     {SIZES[0]} to {SIZES[-1]}: p50, p99 and throughput of each engine that runs here, beside the launch-aware floor
  3. torch.compile(mode="reduce-overhead") and eager PyTorch on {", ".join(f"{a} x {b}" for a, b in COMPARED)}
     (texts x tokens)
  4. the server over HTTP and gRPC: p50 and p99 of one client, throughput of many, and its bottleneck
and write docs/benchmarks/gpu.md and docs/benchmarks/gpu-costs.json, a cost file for `bertserve simulate`."""


class GpuBenchmark(Benchmark):
    """Also writes docs/benchmarks/gpu-costs.json, a cost file for `bertserve simulate`, and the server's `/status`."""

    name = "gpu"
    purpose = "Measure BERT-base and BERT-large on this GPU: engines, PyTorch, the server. Takes up to eight minutes."
    seconds = BUDGET_S
    models = ""
    errors = (BenchError, ExportError)
    own = (
        Option("--engine", "auto", "Engine of the server (default: %(default)s)."),
        Option("--costs", Path("docs/benchmarks/gpu-costs.json"), "File for the batch costs (default: %(default)s)."),
    )

    @cached_property
    def _machine(self) -> Machine:
        machine = discovery.look()
        problem = machine.problem
        if not problem:
            try:
                problem = (
                    "" if self._torch.cuda.is_available() else "PyTorch is installed without CUDA, which is needed"
                )
            except ModuleNotFoundError:
                problem = f"PyTorch is not installed: {installing('export')}"
        if problem:
            raise BenchError(f"{PLAN}\n\nIt cannot: {problem}.")
        return machine

    @cached_property
    def _torch(self) -> Any:  # noqa: ANN401  a module
        import torch  # noqa: PLC0415  slow to import, and not needed to say that there is no GPU

        return torch

    @cached_property
    def _folder(self) -> Path:
        return Path(self.stack.enter_context(tempfile.TemporaryDirectory()))

    @cached_property
    def _end(self) -> float:
        return time.monotonic() + float(self.options.seconds)

    def _share(self, part: float) -> float:
        """Time at which a step must end that may take this share of the remaining time."""
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
        named = {name: installed_versions(name).get(name, "not installed") for name in _PACKAGES}
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
        """The cells of every engine, or the obstacle of an engine without cells."""
        until, model = self._share(_SHARES[size]), self._prepared(size)
        found: dict[str, Any] = {}
        for name, load in engines(self._machine, model, Device(cuda_driver.load(), 0)):
            self.say(f"{model.name} with {name}")
            if time.monotonic() > until:
                found[name] = "the time was up"
                continue
            try:
                found[name] = engine_cells(load(), model.checkpoint.encoder.vocab_size, until)
            except (BundleError, ExportError, cuda_driver.CudaError) as error:
                found[name] = str(error)
        return found

    def _compared(self, size: str) -> dict[str, list[Cell]]:
        cells = torch_cells(self._torch, self._prepared(size), self._share(_TORCH_SHARE))
        self._torch.cuda.empty_cache()
        return cells

    def _served(self) -> dict[str, Any]:
        """Samples of one client over each protocol and of many, and their bottleneck; or the obstacle."""
        self._prepared("base")
        until = self._share(_SERVED_SHARE)
        try:
            models = self._exported(until)
            # A refusal would end the measurement.
            limits = ("--default-timeout-ms", "30000", "--max-batch-tokens", str(MAX_TOKENS))
            server = BertServer(models, "fp16", available_cpus(), "--engine", self.options.engine, *limits)
            server.start_limit_s = min(_SERVER_START_S, until - time.monotonic())
            return self._asked_of(self.opened("the server", lambda: server))
        except (BenchError, ExportError, OSError) as error:
            return {"obstacle": str(error)}

    def _exported(self, until: float) -> Path:
        """BERT-base with its proof."""
        models, left = self._folder / "models", until - time.monotonic()
        words = [str(program()), "export", str(self._folder / "base" / "checkpoint"), "--out", str(models)]
        words += ["--name", "bench", "--precision", "fp16", "--max-length", str(LENGTHS[-1])]
        words += [word for limit in WAIVABLE for word in ("--allow", limit)]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=max(1.0, left), check=False)
        except subprocess.TimeoutExpired:
            raise ExportError(f"`bertserve export` did not end in the {left:.0f} s that were left for it") from None
        if done.returncode:
            raise ExportError((done.stderr.strip().splitlines() or ["it failed without a word"])[-1])
        return models

    def _asked_of(self, server: BertServer) -> dict[str, Any]:
        texts = {SERVED_TOKENS: [" ".join(["server"] * (SERVED_TOKENS - 2))]}
        places = {"HTTP": ("embed", server.http_port, "/embed"), "gRPC": (GRPC, server.grpc_port, "bench")}
        asked = {name: self.asked(name, server, place, MODELS["base"].hidden, texts) for name, place in places.items()}
        before = server.computed("bench")
        alone = measure_round([turn(SERVED_TOKENS, 1, _LOAD_S / 2) for turn in asked.values()], self.say)
        count, ns = (after - start for after, start in zip(server.computed("bench"), before, strict=True))
        with ThreadPoolExecutor(1) as pool:
            many = pool.submit(measure_round, [asked["HTTP"](SERVED_TOKENS, _CLIENTS, _LOAD_S)], self.say)
            time.sleep(_LOAD_S / 2)
            busy = subprocess.run(_UTILIZATION, capture_output=True, text=True, timeout=30, check=False).stdout.split()
            [sample] = many.result().values()
        return {
            "alone": {name.split()[0]: found for name, found in alone.items()},
            "compute_ms": ns / count / 1e6,
            "per_s": sample["per_s"],
            "bottleneck": bottleneck(float(busy[0]) / 100 if busy else 0.0, sample),
            "status": server.get("/status"),
        }

    def figures(self, store: Store) -> dict[str, Any]:
        served, engines_of = store.steps.get("served", {"obstacle": "not yet"}), store.named("engines ")
        missing = [
            f"BERT-{size} with {name}: {cells}"
            for size, found in engines_of.items()
            for name, cells in found.items()
            if isinstance(cells, str)
        ]
        if "obstacle" in served:
            missing.append(f"the server end to end: {served['obstacle']}")
        tables = [
            (size, name, [_row(size, Cell(*cell), *store.steps[f"rates {size}"]) for cell in cells])
            for size, found in engines_of.items()
            for name, cells in found.items()
            if not isinstance(cells, str)
        ]
        beside = {}
        for size, theirs in store.named("torch ").items():
            columns = {"our best engine": _best(engines_of.get(size, {}))[1]}
            columns |= {f"PyTorch, {name}": [Cell(*cell) for cell in cells] for name, cells in theirs.items()}
            by_shape = {name: {cell[:2]: cell.p50_us / 1e3 for cell in cells} for name, cells in columns.items()}
            beside[size] = by_shape
        cells = {cell[:2]: cell.p50_us / 1e3 for cell in _best(engines_of.get("base", {}))[1]}
        alone_ms = cells.get((1, SERVED_TOKENS), 0.0)
        figures = {"served": served, "missing": missing, "tables": tables, "beside": beside, "alone_ms": alone_ms}
        return {**figures, "compared": COMPARED, "clients": _CLIENTS}

    def show(self, store: Store) -> str:
        costs: Path = self.options.costs
        if found := store.steps.get("engines base"):
            costs.write_text(json.dumps(_costs(store.facts["gpu"], *_best(found)), indent=1) + "\n", encoding="utf-8")
        if status := store.steps.get("served", {}).get("status"):
            costs.with_name("gpu-status.json").write_text(json.dumps(status, indent=1) + "\n", encoding="utf-8")
        return super().show(store)


def bottleneck(gpu_share: float, sample: dict[str, Any]) -> str:
    """The bottleneck of the throughput: whatever is closest to fully busy."""
    cores = {name: sample[f"{name}_cpu_us"] * sample["per_s"] / 1e6 for name in ("server", "engine")}
    shares = {
        "the GPU": gpu_share,
        "the server process's event loop": cores["server"],
        "the engine process's one thread": cores["engine"],
    }
    name = max(shares, key=shares.__getitem__)
    said = ", ".join(f"{each} {100 * share:.0f}%" for each, share in shares.items())
    return f"{name} ({said} busy)"


def _best(found: dict[str, Any]) -> tuple[str, list[Cell]]:
    """The engine with the shortest time for one text of 128 tokens, and its cells."""
    measured = {name: [Cell(*cell) for cell in cells] for name, cells in found.items() if not isinstance(cells, str)}

    def alone_us(name: str) -> float:
        return next((cell.p50_us for cell in measured[name] if cell[:2] == (1, SERVED_TOKENS)), 1e12)

    best = min(measured, key=alone_us, default="none")
    return best, measured.get(best, [])


def _row(size: str, cell: Cell, bandwidth: float, rate: float) -> dict[str, Any]:
    """A cell, the floor of its kernels, and the share of the matrix rate that it reaches."""
    kernels = encoder_kernels.kernels(MODELS[size], cell.texts, cell.tokens)
    floor_us = encoder_kernels.floor_us(kernels, rate, bandwidth)
    of_rate = sum(one.operations for one in kernels) / (cell.p50_us * 1e-6) / rate
    return {"cell": cell, "over": cell.p50_us / floor_us, "floor_ms": floor_us / 1e3, "of_rate": of_rate}


def _costs(gpu: str, engine: str, cells: list[Cell]) -> dict[str, Any]:
    """A cost table for `bertserve simulate`."""
    points = [
        {"tokens": c.tokens, "texts": c.texts, "ms": c.p50_us / 1e3, "p99_ms": c.p99_us / 1e3, "source": "measured"}
        for c in cells
    ]
    source = {"measured": {"url": "docs/benchmarks/gpu.md", "what": f"{engine}, engine only, `make bench-gpu`"}}
    return {"title": f"BERT-base FP16 on one {gpu}", "sources": source, "points": points}
