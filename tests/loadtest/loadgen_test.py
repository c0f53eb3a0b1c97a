"""Generators that are not only ours, against the real server with the fake engine."""

from __future__ import annotations

import importlib.util
import json
from typing import TYPE_CHECKING

import pytest

from loadtest import loadgen
from loadtest.errors import BenchError
from loadtest.generator.client import Clients
from tests.support.expected import cosines, fake_answers
from tests.support.models import HIDDEN_SIZE, NAME
from tests.support.server import free_port

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.server import Server

installed = pytest.mark.skipif(
    importlib.util.find_spec("mlperf_loadgen") is None, reason="mlcommons-loadgen is not installed"
)
TEXTS = ["What is a T4?", "Eine Grafikkarte."]
SUMMARY = """\
================================================
MLPerf Results Summary
================================================
SUT name : PySUT
Scenario : Server
Result is : INVALID
  Min duration satisfied : Yes
Completed samples per second    : 101.50
50.00 percentile latency (ns)   : 1230000
99.00 percentile latency (ns)   : 4560000
"""


@installed
@pytest.mark.parametrize("scenario", loadgen.SCENARIOS)
def test_loadgen_measures_the_server(
    fake_server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], scenario: str
) -> None:
    """MLPerf's generator runs both of its scenarios over HTTP; its figures stand beside ours."""
    options = ["--scenario", scenario, "--seconds", "0.5", "--rate", "200", "--out", str(tmp_path)]
    assert loadgen.main(["--target", f"http://{fake_server.http}", *options]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert [entry["generator"] for entry in figures] == ["MLPerf LoadGen", "ours"]
    for entry in figures:
        assert 0 < entry["p50_ms"] <= entry["p99_ms"]
        assert entry["per_s"] > 0
    assert f"{scenario}, MLPerf LoadGen: p50 " in capsys.readouterr().out


@installed
@pytest.mark.parametrize("scenario", loadgen.SCENARIOS)
def test_loadgen_without_a_server_is_one_line(capsys: pytest.CaptureFixture[str], scenario: str) -> None:
    """A server that is not there ends the run, not in the generator's native code."""
    assert loadgen.main(["--target", f"http://127.0.0.1:{free_port()}", "--scenario", scenario]) == 1
    assert capsys.readouterr().err.startswith("loadgen: cannot connect to 127.0.0.1:")


def test_loadgen_says_that_it_speaks_no_tls(capsys: pytest.CaptureFixture[str]) -> None:
    """A secured server is not asked in plain words."""
    with pytest.raises(SystemExit, match="2"):
        loadgen.main(["--target", "https://127.0.0.1:1"])
    assert "LoadGen asks without TLS" in capsys.readouterr().err


def test_a_summary_is_read() -> None:
    """Latencies in milliseconds, and LoadGen's own word on whether the run was long enough for it."""
    found = loadgen.summary("server", SUMMARY)
    assert found == loadgen.Figures("MLPerf LoadGen", "server", 1.23, 4.56, 101.5, "INVALID")
    with pytest.raises(BenchError, match="no line 'QPS w/o loadgen overhead'"):
        loadgen.summary("single-stream", SUMMARY)


@pytest.mark.parametrize(
    ("form", "endpoint"),
    [("embed", "/embed"), ("v2", f"/v2/models/{NAME}/infer"), ("openai", "/v1/embeddings"), ("grpc", NAME)],
)
def test_the_client_of_the_peers_speaks_as_they_do(fake_server: Server, models: Path, form: str, endpoint: str) -> None:
    """Every form that a peer is asked in reads the vectors, and measures."""
    port = int((fake_server.grpc if form == "grpc" else fake_server.http).rpartition(":")[2])
    clients = Clients()
    clients.open("way", form, port, endpoint, HIDDEN_SIZE, {"8": TEXTS})
    assert cosines(clients.vectors("way", 8, len(TEXTS)), fake_answers(models, TEXTS)).min() > 0.9999
    for connections in (1, 4):
        assert clients.measure("way", connections, 8, 0.0, 0.5)["requests"] > 0
