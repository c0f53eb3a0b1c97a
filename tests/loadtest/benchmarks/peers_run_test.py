"""A round of the comparison with the real server in every server's place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bertserve.loadtest.benchmarks import turns
from bertserve.loadtest.benchmarks.peers import closed_loop
from bertserve.loadtest.benchmarks.peers.closed_loop import PeersBenchmark
from bertserve.loadtest.benchmarks.peers.who import MANY, ONE, ORT, RAW, Kit, find
from bertserve.loadtest.benchmarks.runner import parser
from bertserve.loadtest.errors import BenchError
from bertserve.loadtest.generator.workload import find_bundle
from tests.support.models import NAME

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SUBJECTS = (RAW, find(NAME, "bertserve", ORT, "HTTP"), find(NAME, "bertserve", ORT, "gRPC"))
TOKENS = 8


@pytest.fixture
def benchmark(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PeersBenchmark]:
    """Over our server alone, which is stopped whenever it is not asked."""
    monkeypatch.setattr(turns, "_SETTLE_S", 0.05)
    monkeypatch.setattr(closed_loop, "_FROZEN_FROM_PERCENT", -1.0)
    monkeypatch.setattr(closed_loop, "subjects", lambda _: SUBJECTS)
    words = ["peers", "--models", str(models), "--tokens", str(TOKENS), "--seconds", "1"]
    made = PeersBenchmark(parser([PeersBenchmark]).parse_args(words))
    made.kit = Kit(models, {"ort": find_bundle(models, "int8")}, tmp_path, 1)
    with made.stack:
        yield made


@pytest.mark.slow
def test_a_round_measures_everybody_and_wakes_who_is_asked(benchmark: PeersBenchmark) -> None:
    """Every subject has a sample at both numbers of connections, though its server sleeps between its turns."""
    samples = benchmark.measure(1, TOKENS)
    assert samples.keys() == {subject.key(count) for subject in SUBJECTS for count in (ONE, MANY)}
    assert all(sample["requests"] > 0 for sample in samples.values())
    steps = dict(benchmark.steps())
    assert all(0.95 < cosine <= 1.00001 for cosine in steps["check"]()["least_cosine"].values())


def test_a_server_with_another_file_is_no_peer(benchmark: PeersBenchmark, models: Path) -> None:
    """Who computes something else is not compared: here the raw engine has the fp32 file."""
    benchmark.kit = Kit(models, {"ort": find_bundle(models, "fp32")}, benchmark.kit.environments, 1)
    with pytest.raises(BenchError, match="another artifact than the raw engine's"):
        list(benchmark.turns(TOKENS))
