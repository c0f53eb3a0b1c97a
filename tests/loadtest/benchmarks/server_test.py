"""The server beside the raw engine, without either: what is compared with what, and what the page says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bertserve.loadtest.benchmarks.raw_engine import OPTIONS, ways
from bertserve.loadtest.benchmarks.server import CONNECTIONS, PROTOCOLS, Baseline
from bertserve.loadtest.benchmarks.turns import Samples
from bertserve.loadtest.report.sample import Sample, Spread

if TYPE_CHECKING:
    from bertserve.loadtest.benchmarks.turns import Round

USAGE = {"ready_s": 2.0, "server_mb": 100.0, "engine_mb": 200.0, "idle_percent": 0.1}


def sample(p50_ms: float = 1.0, per_s: float = 100.0, others_percent: float = 1.0) -> Sample:
    """A sample of which a test names what matters."""
    return Sample(200, 250, per_s, p50_ms, 2 * p50_ms, 50.0, 100.0, 400.0, others_percent)


def round_of() -> Round:
    """Every subject, raw engines at 1 ms and 100 texts a second, the server at 1.4 ms and 90."""
    raw = {f"raw {way} {options}": sample() for options in OPTIONS for way in ways(batch_invariant=False)}
    return raw | {f"{protocol} {count}": sample(1.4, 90.0) for protocol in PROTOCOLS for count in CONNECTIONS}


def samples(*lengths: int) -> Samples:
    """Two rounds of each length."""
    return Samples({tokens: [round_of(), round_of()] for tokens in lengths or (8, 128)})


def test_the_better_raw_engine_is_the_baseline() -> None:
    """The baseline is not handicapped: the fastest options count for latency, the busiest way for throughput."""
    wide = {"raw wide served": sample(1.2, 800), "raw wide default": sample(1.0, 900)}
    made = Samples({8: [{**wide, "raw narrow served": sample(0.1, 1000)}]})
    assert Baseline.of(made, 8) == ("raw wide default", "raw narrow served")


def test_subjects_are_compared_within_a_round() -> None:
    """A round in which the whole machine was slow changes neither difference nor share."""
    rounds = [
        {
            "raw wide served": sample(slow, 1000 / slow),
            "raw wide default": sample(2 * slow, 10),
            "HTTP 1": sample(slow + 0.25, 800 / slow),
        }
        for slow in (1.0, 10.0, 1.0)
    ]
    made = Samples({8: rounds})
    assert made.above(8, "HTTP 1", "raw wide served", "p50_ms") == Spread(0.25, 0.25, 0.25, 3)
    assert made.ratio(8, "HTTP 1", "raw wide served", "per_s").median == pytest.approx(0.8)


def test_disturbed_measurements_count_only_where_there_is_no_quiet_one() -> None:
    """While others use the machine neither side's figures say anything, unless they are all there is."""
    rounds = [
        {
            "raw wide served": sample(1.0 + raw, others_percent=raw),
            "raw wide default": sample(1000.0),
            "HTTP 1": sample(1.5 + own, others_percent=own),
            "HTTP 8": sample(2.0, others_percent=60.0),
        }
        for own, raw in ((0.0, 0.0), (50.0, 0.0), (0.0, 50.0))
    ]
    made = Samples({8: rounds})
    assert made.above(8, "HTTP 1", "raw wide served", "p50_ms") == Spread(0.5, 0.5, 0.5, 1)
    assert made.spread(8, "HTTP 1", "p50_ms") == Spread(1.5, 1.5, 1.5, 2)
    assert made.spread(8, "HTTP 8", "p50_ms") == Spread(2.0, 2.0, 2.0, 3)
