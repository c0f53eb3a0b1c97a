"""The server with a clock in it: it answers as the other, and tells every stage of a lone request."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from loadtest.benchmarks.lone_request.benchmark import StampedServer
from loadtest.benchmarks.server_process import HOST
from tests.support.clients import post_json

if TYPE_CHECKING:
    from pathlib import Path


def test_a_server_with_a_clock_writes_the_stages_of_its_requests(models: Path, tmp_path: Path) -> None:
    """From the first byte read to the reply sent, in order, once it ends."""
    out = tmp_path / "stages.json"
    with StampedServer(models, "fp32", out) as server:
        for _ in range(3):
            assert post_json(f"{HOST}:{server.http_port}", "/embed", b'{"inputs": "a text"}').status == 200
    stages = json.loads(out.read_bytes())
    names = list(stages)
    assert names[0] == "HTTP parsed, task made"
    assert names[-1] == "sent"
    assert names.index("frame sent to the engine") < names.index("vector scaled")
    assert all(us > 0 for us in stages.values())
