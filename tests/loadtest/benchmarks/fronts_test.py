"""The figures of front processes, without servers: what is judged, and whose CPU time is whose."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.benchmarks import processes
from loadtest.benchmarks.fronts import COUNTS, PROTOCOLS, SHARES, FrontsBenchmark
from loadtest.benchmarks.store import Store
from loadtest.report.sample import Sample
from tests.support.waiting import wait_for


def sample(count: int, p50_ms: float, core_us: float, fronts_us: float) -> dict[str, float]:
    """A sample of a server with so many fronts."""
    one = Sample(200, 250, 1000.0, p50_ms, 2 * p50_ms, 20.0, 100.0 if count == 1 else core_us, 30.0)
    return {name: getattr(one, name) for name in one.__slots__} | {"fronts_cpu_us": fronts_us if count > 1 else 0.0}


def judged(folder: Path, *, p50_ms: float, core_us: float, p99_ms: float, good_per_s: float) -> list[bool | None]:
    """Whether the targets are met where two fronts have these figures and one process 1 ms, 100 us, 100 ms, 50/s."""
    samples = {
        f"{protocol} N={count} {connections}": sample(count, p50_ms if count > 1 else 1.0, core_us, 80.0)
        for protocol in PROTOCOLS
        for count in COUNTS
        for connections in (1, 32, 128)
    }
    store = Store(folder / "fronts.json", {})
    store.steps = {f"round 1, {tokens} tokens": samples for tokens in (8, 128)} | {"capacity 1": {"per_s": 60.0}}
    for share in SHARES:
        store.steps[f"block 1 {share:g} 1"] = {"p99_ms": 100.0, "good_per_s": 50.0}
        store.steps[f"block 1 {share:g} 2"] = {"p99_ms": p99_ms, "good_per_s": good_per_s}
    return [aim.met for aim in FrontsBenchmark.figures(FrontsBenchmark.__new__(FrontsBenchmark), store)["aims"]]


def test_the_targets(tmp_path: Path) -> None:
    """Each is missed by what it is for, and open where nothing was measured."""
    good = {"p50_ms": 1.07, "core_us": 44.0, "p99_ms": 104.0, "good_per_s": 48.0}
    assert judged(tmp_path, **good) == [True] * 11
    assert judged(tmp_path, **good | {"p50_ms": 1.09}) == [*[True] * 6, False, *[True] * 4]
    assert judged(tmp_path, **good | {"core_us": 50.0}) == [False, True, False, *[True] * 8]
    assert judged(tmp_path, **good | {"core_us": 61.0}) == [False, False, False, True, False, False, *[True] * 5]
    assert judged(tmp_path, **good | {"core_us": 67.0}) == [*[False] * 6, *[True] * 5]
    assert judged(tmp_path, **good | {"p99_ms": 106.0, "good_per_s": 47.0}) == [True] * 7 + [False] * 4
    empty = FrontsBenchmark.figures(FrontsBenchmark.__new__(FrontsBenchmark), Store(tmp_path / "none.json", {}))
    assert [aim.met for aim in empty["aims"]] == [None] * 11


@pytest.mark.parametrize(("module", "is_it"), [("timeit", True), ("time", False)])
def test_a_process_is_known_by_its_module(module: str, is_it: bool) -> None:  # noqa: FBT001
    """By a word of its command line, not by a part of one."""
    command = [sys.executable, "-P", "-m", "timeit", "-s", "input()", "pass"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as one:
        wait_for(Path(f"/proc/{one.pid}/cmdline").read_bytes, "its command line, which the kernel sets last")
        assert processes.runs(one.pid, module) is is_it
    assert not processes.runs(one.pid, module)
