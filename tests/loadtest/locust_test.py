"""Locust with our file: the real command against the real server, with the fake engine behind it."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.models import NAME, ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.server import Server

LIMIT_S = 120
LATENCY = re.compile(r"Aggregated: p50 (\d+\.\d\d) ms, p99 (\d+\.\d\d) ms, ([1-9]\d*) requests, 0 failed")
SCENARIO = """
purpose = "A short one."
users = 3
rate = 60
lengths = { 8 = 1, 32 = 1 }
[[phases]]
seconds = 1
from = 0.3
to = 1
"""


def locust(*options: str) -> subprocess.CompletedProcess[str]:
    """Runs the command that the page on load testing names."""
    return subprocess.run(
        [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def against(server: Server, *options: str) -> subprocess.CompletedProcess[str]:
    """The same against a server, over both of its protocols."""
    return locust(*("--host", f"http://{server.http}", "--grpc-target", server.grpc, "--model", NAME), *options)


def test_workers_keep_the_steps(fake_server: Server) -> None:
    """Two workers, users of both protocols: their latencies meet in one table with their hundredths."""
    options = ("--protocol", "both", "--processes", "2", "-u", "4", "-r", "4", "-t", "3s")
    ended = against(fake_server, *options, "--slo-p50-ms", "10000")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "SLO p50 at most 10000 ms: held" in ended.stdout
    found = LATENCY.search(ended.stdout)
    assert found
    assert 0 < float(found[1]) <= float(found[2])
    for name in ("POST /embed", "gRPC ModelInfer"):
        assert re.search(rf"^{name}: p50 .*, 0 failed$", ended.stdout, re.MULTILINE), ended.stdout
    assert any(not step.endswith(".00") for step in re.findall(r"p\d\d (\d+\.\d\d) ms", ended.stdout))


def test_a_scenario_decides_users_and_end_and_an_objective_the_exit_code(fake_server: Server, tmp_path: Path) -> None:
    """A file of one second: the run ends by itself once it is over. Nothing answers within 0.01 ms."""
    scenario = tmp_path / "short.toml"
    scenario.write_text(SCENARIO)
    ended = against(fake_server, "--scenario", str(scenario), "--slo-p50-ms", "0.01", "--slo-p99-ms", "10000")
    assert LATENCY.search(ended.stdout), ended.stdout + ended.stderr
    assert "SLO p50 at most 0.01 ms: MISSED with" in ended.stdout
    assert "SLO p99 at most 10000 ms: held" in ended.stdout
    assert ended.returncode == 1


def test_a_server_that_is_not_there_is_exit_code_1() -> None:
    """No answer is no held objective."""
    ended = locust("--host", "http://127.0.0.1:9", "-u", "1", "-t", "1s")
    assert "no request was answered" in ended.stdout
    assert ended.returncode == 1


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--slo-p50-ms", "soon"), "argument --slo-p50-ms: 'soon' is not a time in milliseconds above 0"),
        pytest.param(
            ("--scenario", "stedy"),
            "argument --scenario: unknown scenario 'stedy' (did you mean steady?)",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_bad_setting_is_one_clear_line(options: tuple[str, str], told: str) -> None:
    """What is wrong, instead of a traceback."""
    ended = locust(*options)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].endswith(told)
    assert "Traceback" not in ended.stderr
