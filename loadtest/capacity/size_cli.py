"""`bertserve size`: estimates how many GPUs or CPUs a load needs, and the cost.

Exit codes: 0 a candidate holds the objective, 1 none does, 2 nothing could be sized.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from export.checkpoint.tokenizer import BareExceptions
from export.pages.tables import show
from loadtest.capacity import page
from loadtest.capacity.candidates import HERE, chosen, price_here, read_candidates
from loadtest.capacity.command import add_shared, check_suffix, exit_code, parser_of, write
from loadtest.capacity.costs import costs_of
from loadtest.capacity.encoder import BYTES, KNOWN, encoder_of
from loadtest.capacity.lengths import read_lengths
from loadtest.capacity.plan import Objective, SizingLoad, plan
from loadtest.capacity.report import Sizing
from loadtest.capacity.sensitivity import sensitivities
from loadtest.errors import BenchError, check_above_zero
from loadtest.report.progress import Progress
from loadtest.report.slo import parse_slo
from serving.host import available_cpus, installing

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from loadtest.capacity.candidates import Candidate
    from loadtest.capacity.encoder import Encoder
    from loadtest.capacity.tables import BatchCosts

ON_CPUS = ("fp32", "int8")
"""Precisions that are measured on this machine."""

_MIN_TIMEOUT_MS = 2000.0
_ALL = 100.0


def parser() -> argparse.ArgumentParser:
    """Builds the argument parser."""
    made = parser_of("size", "Estimate how many GPUs or CPUs a workload needs, and the cost.")
    add = made.add_argument
    add("model", metavar="MODEL", help=f"Model: config.json or its folder, a bundle, or one of {', '.join(KNOWN)}.")
    add(
        "--lengths",
        required=True,
        metavar="MIX|FILE|URL",
        help="Text lengths, in tokens: 128, 8:70,32:30 or 10-250; a file with one text per line; a server's /metrics.",
    )
    add("--rate", type=float, required=True, metavar="R", help="Arrival rate (Poisson), in texts per second.")
    add(
        "--slo",
        required=True,
        metavar="pN=TIME",
        help="Latency objective over all requests, rejected ones too. p95=250ms: 95%% are answered within 250 ms.",
    )
    add(
        "--on",
        metavar="NAMES",
        help=f"Candidates, such as t4,{HERE}. `{HERE}` is this machine, measured (default: all).",
    )
    add("--candidates", type=Path, metavar="FILE", help="JSON table in place of loadtest/capacity/data/devices.json.")
    add(
        "--price",
        action="append",
        default=[],
        metavar="NAME=X",
        help="Price of a candidate, in USD per hour. Can be repeated.",
    )
    add(
        "--precision",
        action="append",
        choices=tuple(BYTES),
        help="Precision to consider. Can be repeated (default: all that a device supports).",
    )
    add(
        "--max-batch-tokens",
        type=int,
        default=1024,
        metavar="N",
        help="Maximum padded tokens per batch (default: 1024).",
    )
    add(
        "--timeout-ms",
        type=float,
        metavar="MS",
        help="Deadline of every request, in milliseconds, at least three times a single text's time (default: 2000, or "
        "the objective's time if that is more).",
    )
    add("--threads", type=int, metavar="N", help="CPU cores to measure with on this machine (default: all).")
    add(
        "--seconds",
        type=float,
        default=20.0,
        metavar="S",
        help="Duration of the measurement on this machine, for each precision (default: 20).",
    )
    add_shared(made, out="File for a page with the sensitivity analysis (.html) or its first plot (.svg).")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    return exit_code("size", lambda: _size(arguments))


def _size(arguments: argparse.Namespace) -> bool:
    check_suffix(arguments.out, (".html", ".svg"))
    encoder = encoder_of(arguments.model)
    load = load_of(arguments, encoder)
    table = chosen(read_candidates(arguments.candidates, arguments.price), arguments.on)
    measured, notes = _here(arguments, encoder)
    wanted = [
        *measured,
        *(
            (name, device, precision, costs_of(name, device, encoder, precision))
            for name, device in table.items()
            for precision in device.tera_per_s
            if not arguments.precision or precision in arguments.precision
        ),
    ]
    if not wanted:
        raise BenchError(notes[0] if notes else "--precision: no candidate supports it")
    plans = []
    with Progress() as progress:
        for done, (name, device, precision, costs) in enumerate(wanted, 1):
            progress.say(f"simulating {name} {precision}, {done} of {len(wanted)}", done / len(wanted))
            plans.append(plan(name, device, precision, costs, encoder, load))
    sizing = Sizing(encoder, load, plans, notes)
    if arguments.out:
        _write(arguments.out, sizing)
    show(*([json.dumps(sizing.plain(), indent=1)] if arguments.json else sizing.lines()))
    return sizing.holds


def _write(out: Path, sizing: Sizing) -> None:
    """Writes the page or the plot, with curves of the cheapest candidates that hold, one for each device.

    Raises:
        BenchError: The file cannot be written, or there is nothing to draw.
    """
    held = [plan for plan in sizing.plans if plan.replicas]
    held.sort(key=lambda plan: (plan.price_per_hour is None, plan.price_per_hour or 0.0))
    shown = list({plan.name: plan for plan in reversed(held)}.values())[::-1][: len(page.COLOURS)]
    if out.suffix == ".svg" and not shown:
        raise BenchError(f"--out {out}: no candidate meets the SLO, so there is nothing to draw")
    with Progress() as progress:
        curves = sensitivities(
            shown,
            sizing.encoder,
            sizing.load,
            lambda done, of: progress.say(f"curves for the page, {done} of {of}", done / of),
        )
    draw = page.sizing_svg if out.suffix == ".svg" else page.sizing
    write(out, draw(sizing, curves))


def _here(
    arguments: argparse.Namespace, encoder: Encoder
) -> tuple[list[tuple[str, Candidate, str, BatchCosts]], list[str]]:
    """This machine and the encoder's costs on it for each precision, and notes on missing ones.

    Raises:
        BenchError: Only this machine was requested, and it cannot be measured.
    """
    asked = None if arguments.on is None else [word.strip() for word in arguments.on.split(",")]
    if asked is not None and HERE not in asked:
        return [], []
    found: list[tuple[str, Candidate, str, BatchCosts]] = []
    notes = []
    threads = arguments.threads or available_cpus()
    precisions = [one for one in arguments.precision or ON_CPUS if one in ON_CPUS]
    if precisions:
        before = "" if encoder.bundle is not None else " and the export of a few layers"
        print(
            f"measuring this machine ({threads} threads) in {' and '.join(precisions)}: about "
            f"{arguments.seconds * len(precisions):.0f} s of runs{before}; to skip it, name other candidates with --on",
            file=sys.stderr,
        )
    for precision in precisions:
        try:
            # Imports the engines' libraries, and PyTorch if there is no bundle.
            from loadtest.capacity import measure  # noqa: PLC0415

            machine = measure.here(threads, price_here(arguments.price))
            with Progress() as progress:
                costs = measure.costs_here(encoder, precision, threads, arguments.seconds, progress.say)
            found.append((HERE, machine, precision, costs))
        except ModuleNotFoundError as error:
            extras = "cpu" if encoder.bundle is not None else "cpu,export"
            notes.append(f"this machine was not measured: the module {error.name} is missing: {installing(extras)}")
        except BenchError as error:
            notes.append(f"this machine was not measured in {precision}: {error}")
    notes = list(dict.fromkeys(notes))
    if asked == [HERE] and not found:
        raise BenchError(notes[0] if notes else f"--on {HERE}: a CPU supports {' and '.join(ON_CPUS)}")
    return found, notes


def load_of(arguments: argparse.Namespace, encoder: Encoder) -> SizingLoad:
    """The load of a command line.

    Raises:
        BenchError: An option is invalid.
    """
    check_above_zero(arguments, "rate", "timeout_ms", "max_batch_tokens", "threads", "seconds")
    objectives = parse_slo(arguments.slo)
    if len(objectives) != 1 or not objectives[0].is_latency or objectives[0].percent >= _ALL:
        raise BenchError(f"--slo {arguments.slo}: must be one percentile and its limit, such as p99=50ms")
    [objective] = objectives
    return SizingLoad(
        arguments.rate,
        read_lengths(arguments.lengths, encoder.positions, _tokenizer(encoder)),
        Objective(objective.percent, objective.limit),
        arguments.max_batch_tokens,
        arguments.timeout_ms or max(_MIN_TIMEOUT_MS, objective.limit),
        arguments.seed,
    )


def _tokenizer(encoder: Encoder) -> Tokenizer | None:
    """The tokenizer in the bundle or next to the configuration; None if there is none."""
    if encoder.tokenizer is None:
        return None
    with BareExceptions(f"{encoder.tokenizer} is not a tokenizer"):
        found: Tokenizer = Tokenizer.from_file(str(encoder.tokenizer))
    # A checkpoint may contain truncation and padding settings of its training.
    found.no_truncation()
    found.no_padding()
    return found


if __name__ == "__main__":
    sys.exit(main())
