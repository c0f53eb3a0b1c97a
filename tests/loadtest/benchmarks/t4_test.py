"""The page of a T4 behind this server, from invented measurements."""

from __future__ import annotations

from dataclasses import astuple, replace
from typing import Any

import pytest

from bertserve.loadtest.benchmarks import t4
from bertserve.loadtest.benchmarks.store import Store
from bertserve.loadtest.benchmarks.turns import Samples, round_name
from bertserve.loadtest.report.sample import Sample

FP16, INT8 = "t4-bert-base-fp16-trt8", "t4-bert-base-int8-trt8"
ADDED_MS = 0.4


def samples(tokens: int) -> dict[str, Any]:
    """A round: the server takes 0.4 ms beside the engine, 100 us of it CPU time and 1 us a token more."""
    found = {}
    for table, slept_ms in ((FP16, 2.0), (INT8, 1.4)):
        alone = Sample(400, 500, 450.0, slept_ms + ADDED_MS, slept_ms + 0.6, 50.0, 100.0 + tokens)
        engine = replace(alone, p50_ms=slept_ms, p99_ms=0.0)
        found |= {table: astuple(alone), f"{table}, engine": astuple(engine)}
    return found


def test_what_the_server_adds_is_told_apart() -> None:
    """CPU time by request and by token; what is left of the latency is the way to the engine."""
    rounds = {round_name(1, tokens): samples(tokens) for tokens in (8, 128)}
    found = t4.overhead(Samples.of(Store(None, {}, rounds)))  # type: ignore[arg-type]  no file is needed
    assert found["token"] == pytest.approx(1.0)
    assert found["receive"] + found["reply"] + found["batch"] == pytest.approx(100.0)
    assert sum(found.values()) + 127 * found["token"] == pytest.approx(1e3 * ADDED_MS)
