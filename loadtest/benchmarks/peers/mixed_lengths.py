"""Texts of mixed lengths at rates that do not wait: latency over offered rate beside a tuned Triton.

Texts of 6 to 250 words arrive at random (Poisson) and are asked for with the same requests of the Open Inference
Protocol: from our server, and from a `tritonserver` with the same artifact, an instance a core and its dynamic batcher.
Short blocks alternate, so that a host which changes its speed meets both alike.
"""

from __future__ import annotations

from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from charts.lines import Series, chart_file
from charts.plot import Axis
from loadtest.benchmarks.drive import SLO_MS, drive, even, mixed_texts
from loadtest.benchmarks.peers.servers import TRITON_BATCH
from loadtest.benchmarks.peers.triton import TritonModel, TritonServer
from loadtest.benchmarks.runner import Benchmark, Page, Part, Picture
from loadtest.benchmarks.server_process import HOST, BertServer
from loadtest.generator.child import Child
from loadtest.generator.messages import Target
from loadtest.report.machine import usable_cores
from loadtest.report.sample import Spread
from loadtest.report.tables import Table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from loadtest.benchmarks.drive import Workload
    from loadtest.benchmarks.store import Step, Store

OURS, TRITON = "bertserve", "Triton"
SHARES = (0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Of the texts a second that the faster of both answers to many clients in a closed loop."""

_FIGURES = ("p50_ms", "p99_ms", "short_p99_ms")
_CONNECTIONS = 4
_THROUGHPUT_S, _WARM_UP_S = 5.0, 1.0
_WORK = Path("build/work-mixed-lengths")


class MixedLengthsBenchmark(Benchmark):
    """The picture of the README."""

    name = "mixed-lengths"
    purpose = "texts of mixed lengths: latency over offered rate, beside a tuned Triton"
    rounds = 3
    seconds = 10.0

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> tuple[str, ...]:
        parser.add_argument("--triton", type=Path, default=Path("build/triton"), help="its environment (%(default)s)")
        parser.add_argument("--alone", action="store_true", help="our server without Triton")
        parser.set_defaults(precision="int8")
        return ()

    def steps(self) -> Iterator[Step]:
        subjects = (OURS,) if self.options.alone else (OURS, TRITON)
        for subject in subjects:
            yield f"throughput {subject}", partial(self._throughput, subject)
        for number in range(1, self.options.rounds + 1):
            for share in SHARES:
                for subject in subjects if number % 2 else subjects[::-1]:
                    yield f"block {number} {share:g} {subject}", partial(self._block, subject, share, number)

    @cached_property
    def _workload(self) -> Workload:
        return mixed_texts(self.bundle)

    @cached_property
    def _targets(self) -> dict[str, Target]:
        bundle, cores = self.bundle, usable_cores()
        self.say("starting the servers")
        ours = self.stack.enter_context(BertServer(self.options.models, self.options.precision, cores))
        targets = {OURS: Target("v2", HOST, ours.http_port, bundle.model)}
        if not self.options.alone:
            model = TritonModel(
                name=bundle.model,
                engine="onnxruntime",
                artifact=bundle.artifact,
                tokenizer=bundle.path / "tokenizer.json",
                hidden_size=bundle.hidden_size,
                instances=cores,
                threads=1,
                batch=TRITON_BATCH,
                max_tokens=bundle.max_length,
            )
            triton = self.stack.enter_context(TritonServer(self.options.triton, _WORK, [model]))
            targets[TRITON] = Target("v2", HOST, triton.http_port, bundle.model)
        return targets

    def _throughput(self, subject: str) -> dict[str, float]:
        target, texts = self._targets[subject], [kind.texts[0] for kind in self._workload.kinds]
        with Child("loadtest.generator.client") as client:
            way: dict[str, Any] = {"way": subject, "form": "v2", "port": target.port}
            endpoint, size = f"/v2/models/{target.model}/infer", self.bundle.hidden_size
            client.ask("open", endpoint=endpoint, hidden_size=size, texts={0: texts[::7]}, **way)
            times = {"warm_up_s": _WARM_UP_S, "seconds": _THROUGHPUT_S}
            sample = client.ask("measure", way=subject, connections=_CONNECTIONS, tokens=0, **times)
        return {"per_s": float(sample["per_s"])}

    def _block(self, subject: str, share: float, number: int) -> dict[str, float]:
        rate = share * max(found["per_s"] for found in self.store.named("throughput ").values())
        requests, generator = drive(
            self._targets[subject], self._workload, even(self.options.seconds), rate, 10 * number
        )
        figures = requests.figures(self.options.seconds, SLO_MS)
        return {"rate": rate, **figures, "generator_late_p99_ms": generator.lateness.percentile_ms(99)}

    def page(self, store: Store) -> Page:
        curves = curves_of(store)
        method = (
            "Texts of 6 to 250 words of real English in even steps, open loop, Poisson arrivals; both servers get the"
            " same requests (Open Inference Protocol over HTTP, binary tensors) and the same INT8 artifact on ONNX"
            f" Runtime. Triton has a single-threaded instance a core and its dynamic batcher (up to {TRITON_BATCH}"
            f" texts), the fastest of the configurations in peers.md. Alternating blocks of"
            f" {store.facts['seconds']:g} s; a latency counts from the intended time. The generator shares the cores."
        )
        title = "Texts of mixed lengths: latency over offered rate"
        facts = {"model": f"{store.facts['model']} version {store.facts['version']}"}
        parts: list[Part] = [Picture("", plot(curves), "p99 over the offered rate"), _table(curves)] if curves else []
        return Page(title, method, parts, facts=facts)


Curve = dict[float, list[dict[str, float]]]
"""The blocks by their share of the throughput."""


def curves_of(store: Store) -> dict[str, Curve]:
    """The blocks of each subject that have been measured."""
    curves: dict[str, Curve] = {}
    for name, block in store.named("block ").items():
        _, share, subject = name.split()
        curves.setdefault(subject, {}).setdefault(float(share), []).append(block)
    return curves


def _spread(blocks: list[dict[str, float]], figure: str) -> Spread | None:
    values = [block[figure] for block in blocks if figure in block]
    return Spread.of(values) if values else None


def _table(curves: dict[str, Curve]) -> Table:
    rows = []
    for share in sorted(next(iter(curves.values()))):
        for subject, curve in curves.items():
            if not (blocks := curve.get(share)):
                continue
            spreads = [_spread(blocks, figure) for figure in _FIGURES]
            rows.append(
                [
                    f"{blocks[0]['rate']:.0f}",
                    subject,
                    *(spread.text(1) if spread else "-" for spread in spreads),
                    f"{Spread.of([block['answered_per_s'] for block in blocks]).median:.1f}",
                ]
            )
    rounds = min(len(blocks) for curve in curves.values() for blocks in curve.values())
    note = (
        f"Medians of {rounds} blocks, least to greatest in brackets; `short`: the shortest third of the texts. At the"
        " last rates a queue grows as long as a block lasts."
    )
    head = ("offered/s", "server", "p50 ms", "p99 ms", "p99 of short ms", "answered/s")
    return Table("Latency over offered rate", note, head, rows, words=0)


def plot(curves: dict[str, Curve]) -> str:
    """p99 of all texts and of the shortest third, over the offered rate."""
    colours = {OURS: ("blue", "green"), TRITON: ("orange", "violet")}
    series = []
    for subject, curve in curves.items():
        for colour, name, figure in zip(colours[subject], ("all", "shortest third"), _FIGURES[1:], strict=True):
            points = [
                (blocks[0]["rate"], spread.median)
                for _, blocks in sorted(curve.items())
                if (spread := _spread(blocks, figure))
            ]
            series.append(Series(f"{subject}, {name}", colour, points, points))
    points = [point for entry in series for point in entry.points]
    across = Axis.of("offered requests a second", [x for x, _ in points])
    up = Axis.of("p99, ms", [y for _, y in points], is_log=True)
    return chart_file("p99 of texts of 6 to 250 words that arrive at random", across, up, series)
