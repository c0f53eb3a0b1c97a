"""What the server carries by itself, its engine taking no time: `python -m loadtest.benchmarks.ceiling`.

The fake engine answers at once, in the engine process and over the real socket, so every stage but the computation
is there. What one server process can carry at most shows here, and what it costs where no computation hides it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from loadtest.benchmarks.peers.client import GRPC
from loadtest.benchmarks.server_process import BertServer
from loadtest.errors import BenchError
from loadtest.generator.child import Child
from loadtest.generator.workload import find_bundle, make_texts
from loadtest.report import machine
from loadtest.report.sample import Sample, Spread
from loadtest.report.tables import Table, as_markdown

if TYPE_CHECKING:
    from collections.abc import Sequence

_TEXTS = 200
_TOKENS = 8
_WARM_UP_S = 0.3
_CONNECTIONS = (1, 32)
_NOTE = """\
Texts of {tokens} tokens, {rounds} rounds of {seconds:g} s in turns; medians, least to greatest in brackets. The client
is one process on the same cores, so at 32 connections it and the server have a core each and the engine process shares
them."""


def measure(models: Path, rounds: int, seconds: float) -> dict[tuple[str, int], list[Sample]]:
    """Asks over every protocol in turns; samples by protocol and number of connections.

    Raises:
        BenchError: The server does not start, or a reply is wrong.
    """
    bundle = find_bundle(models)
    texts = {_TOKENS: [text.text for text in make_texts(bundle.path, _TOKENS, _TEXTS)]}
    found: dict[tuple[str, int], list[Sample]] = {}
    with contextlib.ExitStack() as stack:
        server = BertServer(models, "auto", machine.usable_cores(), "--engine", "fake", "--fake-ms", "0")
        stack.enter_context(server)
        client = stack.enter_context(Child("loadtest.benchmarks.peers.client"))
        ways = {
            "HTTP": ("embed", server.http_port, "/embed"),
            "HTTP v2": ("v2", server.http_port, f"/v2/models/{bundle.model}/infer"),
            "gRPC": (GRPC, server.grpc_port, bundle.model),
        }
        for way, (form, port, place) in ways.items():
            client.ask("open", way=way, form=form, port=port, place=place, hidden_size=bundle.hidden_size, texts=texts)
        for number in range(1, rounds + 1):
            print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
            for way in ways:
                for connections in _CONNECTIONS:
                    fields = client.ask(
                        "measure",
                        way=way,
                        tokens=_TOKENS,
                        connections=connections,
                        warm_up_s=_WARM_UP_S,
                        seconds=seconds,
                    )
                    found.setdefault((way, connections), []).append(Sample(**fields))
    return found


def table(found: dict[tuple[str, int], list[Sample]], seconds: float) -> Table:
    """A row for each protocol and number of connections."""
    rows = []
    for (way, connections), samples in found.items():
        per_s, p50, p99 = (
            Spread.of([getattr(sample, name) for sample in samples]) for name in ("per_s", "p50_ms", "p99_ms")
        )
        rows.append(
            [
                way,
                str(connections),
                f"{per_s.median:.0f} ({per_s.low:.0f} to {per_s.high:.0f})",
                f"{p50.median:.2f}",
                f"{p99.median:.2f}",
            ]
        )
    note = _NOTE.format(tokens=_TOKENS, rounds=len(next(iter(found.values()))), seconds=seconds)
    return Table("Without an engine", note, ("protocol", "connections", "texts/s", "p50 ms", "p99 ms"), rows, words=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints the table; with --out writes it, and the samples beside it."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.benchmarks.ceiling", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--models", type=Path, default=Path("models"), help="model repository (default: models)")
    parser.add_argument("--rounds", type=int, default=10, help="interleaved rounds (default: 10)")
    parser.add_argument("--seconds", type=float, default=0.5, help="length of a measurement (default: 0.5)")
    parser.add_argument("--out", type=Path, help="write a Markdown page here and the samples beside it")
    given = parser.parse_args(argv)
    if given.rounds < 1 or given.seconds <= 0:
        parser.error("--rounds and --seconds must be positive")
    try:
        found = measure(given.models, given.rounds, given.seconds)
    except BenchError as error:
        print(f"ceiling: {error}", file=sys.stderr)
        return 1
    page = as_markdown(table(found, given.seconds))
    print(page)
    if given.out is not None:
        facts = "\n".join(f"- {name}: {value}" for name, value in machine.facts().items())
        given.out.write_text(f"# What the server carries by itself\n\n{facts}\n\n{page}\n", encoding="utf-8")
        kept = [
            {"protocol": way, "connections": connections, **asdict(sample)}
            for (way, connections), samples in found.items()
            for sample in samples
        ]
        given.out.with_suffix(".json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
