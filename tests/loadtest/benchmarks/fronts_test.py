"""The figures of front processes, without servers: what is judged, and whose CPU time is whose."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bertserve.loadtest.benchmarks import processes
from tests.support.waiting import wait_for


@pytest.mark.parametrize(("module", "is_it"), [("timeit", True), ("time", False)])
def test_a_process_is_known_by_its_module(module: str, is_it: bool) -> None:  # noqa: FBT001
    """By a word of its command line, not by a part of one."""
    command = [sys.executable, "-P", "-m", "timeit", "-s", "input()", "pass"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as one:
        wait_for(Path(f"/proc/{one.pid}/cmdline").read_bytes, "its command line, which the kernel sets last")
        assert processes.runs(one.pid, module) is is_it
    assert not processes.runs(one.pid, module)
