"""Triton's perf_analyzer, unmodified: it measures the server in each of its modes and shows the server's own times."""

from __future__ import annotations

import os
import re
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.support.clients import metric
from tests.support.models import NAME, ROOT

if TYPE_CHECKING:
    from tests.support.server import Server

INSTALLED = ROOT / "build" / "perf-analyzer"
PROGRAM = INSTALLED / "bin" / "perf_analyzer"
DATA = ROOT / "loadtest" / "perf_analyzer"
_LIMIT_S = 120


def obstacle() -> str | None:
    """Why it cannot be run here; None where it can."""
    if not PROGRAM.exists():
        return "perf_analyzer is not installed (see make programs)"
    done = run("--version")
    return None if done.returncode == 0 else f"perf_analyzer does not run here: {done.stderr.strip()[:200]}"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(INSTALLED / "libraries")}
    return subprocess.run(
        [str(PROGRAM), *options], env=environment, capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )


pytestmark = pytest.mark.external(obstacle())

MODES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "http": ("http", "texts", ()),
    "http-tokens": ("http", "tokens", ()),
    "http-async": ("http", "tokens", ("-a", "--concurrency-range", "4")),
    "http-json": ("http", "tokens", ("--input-tensor-format", "json", "--output-tensor-format", "json")),
    "http-texts-json": ("http", "texts", ("--input-tensor-format", "json", "--output-tensor-format", "json")),
    "http-rate": ("http", "texts", ("--request-rate-range", "40")),
    "grpc": ("grpc", "texts", ()),
    "grpc-async": ("grpc", "tokens", ("-a", "--concurrency-range", "4")),
    "grpc-streaming": ("grpc", "tokens", ("-a", "--streaming", "--concurrency-range", "2")),
    "grpc-rate": ("grpc", "tokens", ("--request-rate-range", "40")),
    "generated-text": ("http", "", ()),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mode", MODES)
def test_perf_analyzer(fake_server: Server, mode: str) -> None:
    """It ends well, no request fails, and the requests that it shows as the server's are those of our metrics."""
    wire, data, options = MODES[mode]
    before, refused = (
        metric(fake_server, "bertserve_requests_total", reason=reason) for reason in ("ok", "invalid_request")
    )
    done = run(
        *("-m", NAME + (".tokens" if data == "tokens" else ""), "-i", wire, "-u", getattr(fake_server, wire)),
        *(("--input-data", str(DATA / f"{data}.json")) if data else ()),
        # One window of so many requests is enough: this is about answers, not about stable times.
        *("--measurement-mode", "count_windows", "--measurement-request-count", "30", "-s", "1000000", "-r", "3"),
        *options,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    client, _, server = done.stdout.partition("Server:")
    shown = _number(r"Successful request count: (\d+)", server)
    assert shown > 0
    assert _number(r"Inference count: (\d+)", server) == shown
    assert _number(r"Request count: (\d+)", client) > 0
    assert "compute infer" in server
    answered = metric(fake_server, "bertserve_requests_total", reason="ok") - before
    assert shown <= answered
    assert metric(fake_server, "bertserve_requests_total", reason="invalid_request") == refused


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found, text
    return int(found[1])
