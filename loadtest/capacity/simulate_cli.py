"""`bertserve simulate`: p50, p99 and throughput under a load, and the capacity for an objective.

Exit codes: 0 the objective holds (or none was given), 1 it is missed, 2 nothing could be simulated.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bertserve.loadtest.capacity import page
from bertserve.loadtest.capacity.figures import Figures, World, capacity
from bertserve.loadtest.capacity.lengths import mean, parse_mix
from bertserve.loadtest.capacity.overhead import BESIDE_A_GPU, ON_ITS_CORES, usual
from bertserve.loadtest.capacity.simulator import Overhead
from bertserve.loadtest.capacity.tables import PUBLISHED, BatchCosts, find_table
from bertserve.loadtest.capacity.traffic import poisson, replayed
from bertserve.loadtest.errors import BenchError, check_above_zero, check_installed
from bertserve.serving.options import OptionParser

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

_HOLDS, _BROKEN, _IMPOSSIBLE = 0, 1, 2
_SUFFIXES = (".html", ".svg", ".json")
_OVERHEADS = tuple(name for name in Overhead.__struct_fields__ if name.endswith("_us"))

_REQUESTS = 20_000
_MIN_S = 5.0
_CURVE = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1)


@dataclass(slots=True, frozen=True)
class SimulateOptions:
    """A validated command line.

    Attributes:
        arguments: The parsed arguments.
        table: The batch costs.
        world: Everything but the traffic.
        mix: Weights of the lengths; empty for a replayed schedule.
    """

    arguments: argparse.Namespace
    table: BatchCosts
    world: World
    mix: dict[int, float]

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> SimulateOptions:
        """Validates the arguments from argparse.

        Raises:
            BenchError: An argument is invalid or missing; the message is one line.
        """
        _check(arguments)
        table = find_table(arguments.cost, arguments.model)
        overhead = _overhead(arguments, table)
        bulk = parse_mix(arguments.bulk, "--bulk") if arguments.bulk else None
        world = World.of(table, overhead, arguments.max_batch_tokens, arguments.seed, bulk)
        mix = {} if arguments.replay else parse_mix(arguments.tokens, "--tokens")
        return cls(arguments, table, world, mix)

    def run(self, rate: float) -> Figures:
        """Simulates a rate."""
        seconds = self.arguments.duration or max(_MIN_S, _REQUESTS / rate)
        arrivals = poisson(rate, self.mix, seconds, self.arguments.timeout_ms / 1e3, self.arguments.seed)
        return self.world.run(arrivals, seconds)

    def replay(self) -> Figures:
        """Simulates a saved schedule.

        Raises:
            BenchError: The file contains no schedule.
        """
        arrivals = replayed(self.arguments.replay, self.arguments.timeout_ms / 1e3)
        seconds = self.arguments.duration or max(arrivals[-1].at, 1e-9)
        return self.world.run(arrivals, seconds)

    def facts(self) -> list[str]:
        """The basis of the figures, one line each."""
        overhead = self.world.device.overhead
        shared = f"on the {overhead.shared_cores} cores of the engine" if overhead.shared_cores else "on separate cores"
        core = (
            f"; {overhead.fronts} front processes, and a core with {overhead.core_us:g} per text and"
            f" {overhead.core_token_us:g} per token"
        )
        return [
            f"costs: {self.table.title}",
            *self.table.provenance(self.mix),
            (
                f"server, us: {overhead.receive_us:g} per request, {overhead.text_us:g} per text,"
                f" {overhead.token_us:g} per token,"
                f" {overhead.reply_us:g} per answer, {overhead.batch_us:g} per batch,"
                f" {overhead.wire_us:g} to the engine, {shared}{core if overhead.fronts > 1 else ''}"
            ),
        ]


def _overhead(arguments: argparse.Namespace, table: BatchCosts) -> Overhead:
    """The overhead from the options, with the default values where an option is missing."""
    chosen = {name: value for name in _OVERHEADS if (value := getattr(arguments, name)) is not None}
    return msgspec.structs.replace(usual(table.threads, arguments.front_processes), **chosen)


def _check(arguments: argparse.Namespace) -> None:
    if arguments.out is not None:
        if arguments.out.suffix not in _SUFFIXES:
            raise BenchError(f"--out {arguments.out}: must end in {' or '.join(_SUFFIXES)}")
        if arguments.out.suffix != ".json":
            check_installed("jinja2", "matplotlib")
    check_above_zero(arguments, "rate", "duration", "timeout_ms", "slo_p99_ms")
    if arguments.front_processes < 1:
        raise BenchError(f"--front-processes must be 1 or more, not {arguments.front_processes}")
    if arguments.find_capacity and arguments.slo_p99_ms is None:
        raise BenchError("--find-capacity needs --slo-p99-ms: capacity is the highest rate that meets it")
    if arguments.replay and (arguments.find_capacity or arguments.rate or arguments.tokens):
        raise BenchError("--replay sets times and lengths; it cannot be used with --rate, --tokens or --find-capacity")
    if not arguments.replay and not arguments.tokens:
        raise BenchError("--tokens is missing; set the text lengths, such as --tokens 128")
    if not arguments.replay and not arguments.rate and not arguments.find_capacity:
        raise BenchError("--rate is missing; set the requests per second, or use --find-capacity")


def parser() -> argparse.ArgumentParser:
    """Builds the argument parser."""
    made = OptionParser(
        prog="bertserve simulate",
        description="Simulate a server under load from measured batch costs.",
        allow_abbrev=False,
    )
    made.add_argument(
        "--cost",
        required=True,
        metavar="NAME|FILE",
        help=f"Batch costs to use: a name, or the JSON of a server's /status. Names: {', '.join(PUBLISHED)}.",
    )
    add = made.add_argument
    add("--model", help="Model to simulate, if /status has several.")
    add("--tokens", metavar="MIX", help="Text lengths, in tokens: 128, 8:70,32:30 or 10-250.")
    add("--rate", type=float, metavar="R", help="Arrival rate (Poisson), in requests per second.")
    add("--duration", type=float, metavar="S", help=f"Simulated time, in s (default: {_REQUESTS:,} requests).")
    add("--replay", type=Path, metavar="FILE", help="JSON list of [seconds, tokens] in place of random arrivals.")
    add("--slo-p99-ms", type=float, metavar="X", help="Objective: p99 of all requests, rejected ones too, in ms.")
    add(
        "--find-capacity",
        action="store_true",
        help="Search for the highest rate that meets the SLO. With --rate, print the number of devices for that rate.",
    )
    add("--timeout-ms", type=float, default=2000.0, help="Deadline of every request, in ms (default: 2000).")
    add("--max-batch-tokens", type=int, default=1024, help="Maximum padded tokens per batch (default: 1024).")
    add("--bulk", metavar="MIX", help="Text lengths of a saturating bulk job beside the load.")
    add("--front-processes", type=int, default=1, metavar="N", help="Front processes, as in serve (default: 1).")
    for name, what in (
        ("receive", "Server time per request"),
        ("text", "Server time per text"),
        ("token", "Server time per token"),
        ("reply", "Server time per answer"),
        ("batch", "Server time per batch"),
        ("wire", "Delay until the engine starts a batch"),
        ("core", "Time of the core per text, with several front processes"),
        ("core_token", "Time of the core per token, with several front processes"),
    ):
        both = (f"{getattr(each, f'{name}_us'):g}" for each in (ON_ITS_CORES, BESIDE_A_GPU))
        option, default = f"--{name.replace('_', '-')}-us", "; ".join(both)
        add(option, type=float, metavar="US", help=f"{what}, in us (default: {default} beside a GPU).")
    add("--out", type=Path, metavar="FILE", help="File for curves over offered load, as .html, .svg or .json.")
    add("--seed", type=int, default=1, help="Seed of arrivals, lengths and jitter (default: 1).")
    add("--json", action="store_true", help="Print the results as JSON.")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        return _HOLDS if _simulate(SimulateOptions.of(arguments)) else _BROKEN
    except BenchError as error:
        print(f"bertserve simulate: {error}", file=sys.stderr)
        return _IMPOSSIBLE


def _simulate(options: SimulateOptions) -> bool:
    arguments, slo_ms = options.arguments, options.arguments.slo_p99_ms
    found: float | None = None
    if arguments.find_capacity:
        found, runs = capacity(options.run, slo_ms, arguments.rate or _guess(options))
        main_run = options.run(found) if found else runs[-1]
    else:
        main_run = options.replay() if arguments.replay else options.run(arguments.rate)
    kept = slo_ms is None or (found is not None if arguments.find_capacity else main_run.slo_ms <= slo_ms)
    verdict = _verdict(slo_ms, found, kept=kept, searched=arguments.find_capacity)
    devices = math.ceil(arguments.rate / found) if found and arguments.rate else None
    if arguments.out:
        top = found or main_run.offered_per_s
        runs = [main_run] if arguments.replay else [options.run(share * top) for share in _CURVE]
        _write(arguments.out, options, verdict, runs)
    if arguments.json:
        print(
            json.dumps(
                {
                    "capacity_per_s": found,
                    "devices": devices,
                    "kept": kept,
                    **_plain(main_run),
                    "facts": options.facts(),
                }
            )
        )
    else:
        print(
            "\n".join(
                [*options.facts(), "", *_text(main_run), *filter(None, [verdict, _fleet(arguments.rate, devices)])]
            )
        )
    return kept


def _guess(options: SimulateOptions) -> float:
    """Half of the device's rate for single texts of the mean length."""
    tokens = mean(options.mix)
    single = min((p for p in options.table.points if p.batch == 1), key=lambda p: abs(p.tokens - tokens))
    return 0.5e6 / max(1.0, single.us * max(1.0, tokens / single.tokens))


def _verdict(slo_ms: float | None, found: float | None, *, kept: bool, searched: bool) -> str:
    if slo_ms is None:
        return ""
    if searched:
        what = f"capacity: {found:.1f} requests/s" if found else "capacity: none, no rate meets the SLO"
        return f"{what} with p99 <= {slo_ms:g} ms (Poisson, rejected requests count as never answered)"
    return f"{'kept' if kept else 'BROKEN'}: p99 <= {slo_ms:g} ms (rejected requests count as never answered)"


def _fleet(rate: float | None, devices: int | None) -> str:
    return f"devices: {devices} for {rate:g} requests/s, if the load is spread evenly" if devices else ""


def _text(run: Figures) -> list[str]:
    p50, p99, short = (f"{value:.2f}" for value in (run.p50_ms, run.p99_ms, run.short_p99_ms))
    # `fates` are keys of the JSON output, which keep their names.
    fates = ", ".join(f"{count} {fate.replace('refused', 'rejected')}" for fate, count in sorted(run.fates.items()))
    return [
        "SIMULATED, not measured; client and network time not included",
        f"offered {run.offered_per_s:.1f}/s, answered {run.answered_per_s:.1f}/s ({fates})",
        f"latency of answered requests, ms: p50 {p50}, p99 {p99}, p99 of the shortest third of texts {short}",
        *_bulk_text(run),
    ]


def _bulk_text(run: Figures) -> list[str]:
    if run.bulk_per_s is None or run.bulk_device_share is None:
        return []
    return [f"bulk work: {run.bulk_per_s:.1f} texts/s in {100 * run.bulk_device_share:.1f}% of the device's time"]


def _plain(run: Figures) -> dict[str, object]:
    """Replaces infinity and NaN, which JSON lacks."""
    values = dataclasses.asdict(run)
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }


def _write(out: Path, options: SimulateOptions, verdict: str, runs: Sequence[Figures]) -> None:
    title, slo_ms = f"{options.table.title}, {options.arguments.tokens} tokens", options.arguments.slo_p99_ms
    if out.suffix == ".json":
        content = json.dumps({"facts": options.facts(), "runs": [_plain(run) for run in runs]}, indent=1) + "\n"
    elif out.suffix == ".svg":
        content = page.simulation_svg(f"Simulated: {title}", runs, slo_ms)
    else:
        content = page.simulation(title, verdict, options.facts(), runs, slo_ms)
    try:
        out.write_text(content, encoding="utf-8")
    except OSError as error:
        raise BenchError(f"--out {out}: {error.strerror}") from error
    print(f"written: {out}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
