"""What the choices about ONNX Runtime on a CPU are worth here: `python -m loadtest.benchmarks.levers --models models`.

Each variant differs from the served options in one thing. All run in turns, block by block, over the server's own
artifact, so that a host which changes its speed meets all of them alike; figures are ratios to the served options
within a pass over the variants.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import onnx
import onnxruntime as ort

from loadtest.benchmarks.raw_engine import session_options, tensors_of
from loadtest.errors import BenchError
from loadtest.generator.workload import find_bundle, make_texts
from loadtest.report import machine
from loadtest.report.sample import Spread
from loadtest.report.tables import Table, as_markdown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from loadtest.benchmarks.raw_engine import Tensors
    from loadtest.generator.workload import Bundle

LENGTHS = (8, 32, 128)
_BLOCK_S = 0.1
_LEAST_RUNS = 4
_PAUSE_S = 0.0004
"""Between two runs, as between two requests of one client: what it makes of threads that wait is the question."""
_SPIN = "session.intra_op.spin_duration_us"
_NOTE = """\
One text at a time on {cores} threads, {pause:.1f} ms between two runs; median time divided by that of the served
options in the same pass, quartiles in brackets; {passes} passes."""


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

    yield Variant("as served", lambda _: None, served)
    yield Variant("threads do not spin", _not_spinning, served)
    yield Variant("threads spin for 0.1 ms", spinning(100), served)
    yield Variant("threads spin for 10 ms", spinning(10_000), served)
    yield Variant("threads back off while they spin", _backing_off, served)
    yield Variant("memory patterns", lambda options: setattr(options, "enable_mem_pattern", True), served)
    yield Variant("no memory arena", lambda options: setattr(options, "enable_cpu_mem_arena", False), served)
    yield Variant("GELU by tanh", lambda _: None, _with_fast_gelu(served))


def _not_spinning(options: ort.SessionOptions) -> None:
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")


def _backing_off(options: ort.SessionOptions) -> None:
    options.add_session_config_entry("session.intra_op.spin_backoff_max", "8")


def _with_fast_gelu(data: bytes) -> bytes:
    model = onnx.load_from_string(data)
    for node in model.graph.node:
        if node.op_type == "BiasGelu":
            node.op_type = "FastGelu"
    return model.SerializeToString()


def measure(bundle: Bundle, lengths: Sequence[int], passes: int) -> dict[str, dict[int, list[float]]]:
    """Each variant's median milliseconds by length, pass by pass."""
    cores = machine.usable_cores()
    feeds = {
        tokens: [tensors_of(bundle.inputs, [text.ids]) for text in make_texts(bundle.path, tokens, 50)]
        for tokens in lengths
    }
    sessions: dict[str, ort.InferenceSession] = {}
    for variant in variants(bundle.artifact):
        options = session_options("served", cores, cores)
        variant.change(options)
        sessions[variant.name] = ort.InferenceSession(variant.data, options, providers=["CPUExecutionProvider"])
    found: dict[str, dict[int, list[float]]] = {name: {tokens: [] for tokens in lengths} for name in sessions}
    for number in range(1, passes + 1):
        print(f"pass {number} of {passes}", file=sys.stderr, flush=True)
        for tokens in lengths:
            for name, session in sessions.items():
                found[name][tokens].append(_block(session, feeds[tokens]))
    return found


def _block(session: ort.InferenceSession, feeds: Sequence[Tensors]) -> float:
    times: list[float] = []
    started = time.perf_counter()
    while len(times) < _LEAST_RUNS or time.perf_counter() - started < _BLOCK_S:
        time.sleep(_PAUSE_S)
        begun = time.perf_counter()
        session.run(None, feeds[len(times) % len(feeds)])
        times.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(times)


def table(found: dict[str, dict[int, list[float]]], passes: int) -> Table:
    """A row for each variant, a column for each length."""
    served, *others = found
    lengths = list(found[served])
    rows = [[served, *(f"{Spread.of(found[served][tokens]).median:.2f} ms" for tokens in lengths)]]
    for name in others:
        cells = []
        for tokens in lengths:
            ratios = [one / other for one, other in zip(found[name][tokens], found[served][tokens], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
        rows.append([name, *cells])
    note = _NOTE.format(cores=machine.usable_cores(), pause=1e3 * _PAUSE_S, passes=passes)
    return Table(
        "ONNX Runtime's options", note, ("options", *(f"{tokens} tokens" for tokens in lengths)), rows, words=1
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.benchmarks.levers", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--models", type=Path, default=Path("models"), help="model repository (default: models)")
    parser.add_argument("--tokens", type=int, nargs="+", default=LENGTHS, help="lengths of the texts")
    parser.add_argument("--passes", type=int, default=20, help="passes over the variants (default: 20)")
    given = parser.parse_args(argv)
    if given.passes < 2 or min(given.tokens) < 1:  # noqa: PLR2004  quartiles need two
        parser.error("--passes must be at least 2, --tokens positive")
    try:
        found = measure(find_bundle(given.models, "int8"), given.tokens, given.passes)
    except BenchError as error:
        print(f"levers: {error}", file=sys.stderr)
        return 1
    print(as_markdown(table(found, given.passes)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
