"""MLPerf's LoadGen against a real server with the fake engine. Each run has a process of its own, as LoadGen asks."""

from __future__ import annotations

import importlib.util
import socketserver
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from bertserve.loadtest.errors import BenchError
from bertserve.loadtest.mlperf import IMPOSSIBLE, INVALID, SCENARIOS, VALID, main, verdict_of
from tests.support.server import FAKE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.server import Server

needs_loadgen = pytest.mark.skipif(
    importlib.util.find_spec("mlperf_loadgen") is None, reason="mlcommons-loadgen is not installed"
)
SERVER = """\
MLPerf Results Summary
Scenario : Server
Scheduled samples per second : 101.50
Result is : INVALID
  Performance constraints satisfied : Yes
  Min duration satisfied : NO
  Early stopping satisfied: NO
"""
STREAM = """\
Scenario : SingleStream
Result is : VALID
 * Early stopping 90.0th percentile estimate: 2340000
 * Early stopping 99.0th percentile estimate: 9990000
"""


def loadgen(url: str, out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A run of half a second."""
    command = [
        sys.executable,
        "-m",
        "bertserve.loadtest.mlperf",
        "--target",
        url,
        "--seconds",
        "0.5",
        "--out",
        str(out),
        *words,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=out)


@needs_loadgen
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_scenario_runs(fake_server: Server, tmp_path: Path, scenario: str) -> None:
    """LoadGen's verdict is the exit code, and its settings and logs lie in a folder of the scenario."""
    done = loadgen(f"http://{fake_server.http}", tmp_path, "--scenario", scenario, "--rate", "300", "--p99-ms", "10000")
    assert done.returncode in {VALID, INVALID}, done.stderr
    name, word = SCENARIOS[scenario].name, "VALID" if done.returncode == VALID else "INVALID"
    assert done.stdout.startswith(f"{name}: {word}")
    assert "; not compliant: MLPerf requires at least 600 s" in done.stdout
    assert f"bert.{name}.min_duration = 500" in (tmp_path / scenario / "user.conf").read_text()
    assert (tmp_path / scenario / "mlperf_log_detail.txt").stat().st_size


@needs_loadgen
def test_a_response_cache_is_not_compliant(serve: Callable[..., Server], tmp_path: Path) -> None:
    """MLPerf forbids it, so the run names it."""
    server = serve(*FAKE, "--response-cache-mb", "8")
    done = loadgen(f"http://{server.http}", tmp_path, "--scenario", "offline")
    assert "; not compliant: MLPerf forbids the response cache" in done.stdout, done.stderr


class HangUp(socketserver.BaseRequestHandler):
    """Closes every connection at its first request."""

    def handle(self) -> None:
        self.request.recv(1)


@needs_loadgen
def test_a_failed_request_voids_the_run(tmp_path: Path) -> None:
    """LoadGen comes to its end, and no verdict is taken from it."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), HangUp) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        done = loadgen(f"http://127.0.0.1:{server.server_address[1]}", tmp_path, "--scenario", "single-stream")
        server.shutdown()
    assert done.returncode == IMPOSSIBLE
    assert done.stderr.startswith("mlperf: ")
    assert done.stderr.count("\n") == 1


def test_a_summary_is_read() -> None:
    """LoadGen's own verdict, the figure that the rules judge by, and what was lacking."""
    assert verdict_of(SERVER, SCENARIOS["server"]) == (
        False,
        "Server: INVALID (min duration not satisfied, early stopping not satisfied), 101.50 samples/s",
    )
    assert verdict_of(STREAM, SCENARIOS["single-stream"]) == (True, "SingleStream: VALID, p90 2.34 ms")
    assert verdict_of(STREAM + "\n1 ERROR encountered.\n", SCENARIOS["single-stream"])[0] is False
    with pytest.raises(BenchError, match="no verdict"):
        verdict_of(STREAM.replace("Result is", "Result"), SCENARIOS["single-stream"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--scenario", "server"], "--rate is missing"),
        (["--scenario", "offline", "--seconds", "0"], "--seconds must be above 0, not 0"),
        pytest.param(
            ["--scenario", "offline", "--target", "https://127.0.0.1:1"], "does not support TLS", marks=needs_loadgen
        ),
    ],
)
def test_a_wrong_command_line_is_one_line(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    """It says what is missing or wrong, before any load."""
    assert main(words) == IMPOSSIBLE
    assert said in capsys.readouterr().err
