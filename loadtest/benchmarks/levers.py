"""What the choices about ONNX Runtime on a CPU are worth here.

Each variant differs from the served options in one thing. All run in turns, block by block, over the server's own
artifact, so that a host which changes its speed meets all of them alike; figures are ratios to the served options
within a pass over the variants.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import onnx
import onnxruntime as ort

from loadtest.benchmarks.raw_engine import session_options, tensors_of
from loadtest.benchmarks.runner import Benchmark, Page
from loadtest.benchmarks.turns import Samples
from loadtest.generator.workload import make_texts
from loadtest.report.sample import Spread, Window, sample_of
from loadtest.report.tables import Table
from serving.host import available_cpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from loadtest.benchmarks.raw_engine import Tensors
    from loadtest.benchmarks.store import Store
    from loadtest.report.sample import Exchange, Sample

_TEXTS = 50
_LEAST_RUNS = 4
_PAUSE_S = 0.0004
"""Between two runs, as between two requests of one client: what it makes of threads that wait is the question."""
_SPIN = "session.intra_op.spin_duration_us"
SERVED = "as served"


@dataclass(slots=True, frozen=True)
class Variant:
    """One way to run the artifact.

    Attributes:
        name: What differs from the served options.
        change: Makes the difference.
        data: The model.
    """

    name: str
    change: Callable[[ort.SessionOptions], None]
    data: bytes


def variants(artifact: Path) -> Iterator[Variant]:
    """The served options first, then everything that was tried beside them."""
    served = artifact.read_bytes()

    def spinning(duration_us: int) -> Callable[[ort.SessionOptions], None]:
        return lambda options: options.add_session_config_entry(_SPIN, str(duration_us))

    yield Variant(SERVED, lambda _: None, served)
    yield Variant("threads do not spin", _not_spinning, served)
    yield Variant("threads spin for 0.1 ms", spinning(100), served)
    yield Variant("threads spin for 10 ms", spinning(10_000), served)
    yield Variant("threads back off while they spin", _backing_off, served)
    yield Variant("memory patterns", lambda options: setattr(options, "enable_mem_pattern", True), served)
    yield Variant("products without VNNI", _exact, served)
    yield Variant("no memory arena", lambda options: setattr(options, "enable_cpu_mem_arena", False), served)
    yield Variant("GELU by tanh", lambda _: None, _with_fast_gelu(served))


def _not_spinning(options: ort.SessionOptions) -> None:
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")


def _backing_off(options: ort.SessionOptions) -> None:
    options.add_session_config_entry("session.intra_op.spin_backoff_max", "8")


def _exact(options: ort.SessionOptions) -> None:
    """What the server sets where the processor has no VNNI; kernels of another instruction set run here."""
    options.add_session_config_entry("session.x64quantprecision", "1")


def _with_fast_gelu(data: bytes) -> bytes:
    model = onnx.load_from_string(data)
    for node in model.graph.node:
        if node.op_type == "BiasGelu":
            node.op_type = "FastGelu"
    return model.SerializeToString()


class LeversBenchmark(Benchmark):
    """Every variant in a pass, length by length."""

    name = "levers"
    purpose = "ONNX Runtime's options on a CPU beside those that the server chooses"
    rounds = 20
    seconds = 0.1
    tokens = (8, 32, 128)
    precision = "int8"

    @cached_property
    def _sessions(self) -> dict[str, ort.InferenceSession]:
        sessions, cores = {}, available_cpus()
        for variant in variants(self.bundle.artifact):
            options = session_options("served", cores, cores)
            variant.change(options)
            sessions[variant.name] = ort.InferenceSession(variant.data, options, providers=["CPUExecutionProvider"])
        return sessions

    @cached_property
    def _feeds(self) -> dict[int, list[Tensors]]:
        bundle = self.bundle
        return {
            tokens: [tensors_of(bundle.inputs, [text.ids]) for text in make_texts(bundle.path, tokens, _TEXTS)]
            for tokens in self.options.tokens
        }

    def measure(self, number: int, tokens: int) -> dict[str, Any]:  # noqa: ARG002  every pass is the same
        feeds = self._feeds[tokens]
        return {name: asdict(block(run.run, feeds, self.options.seconds)) for name, run in self._sessions.items()}

    def page(self, store: Store) -> Page:
        samples = Samples.of(store)
        lengths = list(samples.rounds)
        others = [name for name in samples.subjects(lengths[0]) if name != SERVED]
        rows = [[SERVED, *(f"{samples.spread(tokens, SERVED, 'p50_ms').median:.2f} ms" for tokens in lengths)]]
        for name in others:
            ratios = [samples.ratios(tokens, name, SERVED, "p50_ms") for tokens in lengths]
            spreads = [Spread.quartiles(values) if len(values) > 1 else Spread.of(values) for values in ratios]
            rows.append([name, *(spread.text(2) for spread in spreads)])
        note = (
            f"One text at a time on all cores, {1e3 * _PAUSE_S:.1f} ms between two runs; median time divided by that of"
            f" the served options in the same pass, quartiles in brackets; passes: {samples.counts()}."
        )
        head = ("options", *(f"{tokens} tokens" for tokens in lengths))
        table = Table("ONNX Runtime's options", note, head, rows, words=1)
        return Page("ONNX Runtime's options on a CPU", "", [table])


def block(run: Callable[..., object], feeds: Sequence[Tensors], seconds: float) -> Sample:
    """One variant for so long, with a pause before each run, and a few runs at least."""
    runs: list[Exchange] = []
    started, cpu_s = time.perf_counter(), time.process_time()
    while len(runs) < _LEAST_RUNS or time.perf_counter() - started < seconds:
        time.sleep(_PAUSE_S)
        begun = time.perf_counter()
        run(None, feeds[len(runs) % len(feeds)])
        runs.append((begun, time.perf_counter()))
    return sample_of(runs, Window(started, runs[-1][1]), time.process_time() - cpu_s)
