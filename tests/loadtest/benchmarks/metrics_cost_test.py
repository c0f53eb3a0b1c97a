"""The measurement of what metrics cost: both servers are what they are said to be, and a page comes out."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from loadtest.benchmarks.metrics_cost import SilentServer, main
from loadtest.benchmarks.server_process import HOST, BertServer
from tests.support.clients import get, post_json

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(("kind", "counted"), [(BertServer, 1), (SilentServer, 0)])
def test_only_the_server_as_it_is_records(models: Path, kind: type[BertServer], counted: int) -> None:
    """Both answer."""
    with kind(models, "fp32", 1) as server:
        address = f"{HOST}:{server.http_port}"
        assert post_json(address, "/embed", b'{"inputs": "a text"}').status == 200
        scraped = get(address, "/metrics").body.decode()
        found = re.search(r"^bertserve_batch_size_count (\S+)$", scraped, re.MULTILINE)
    assert found
    assert float(found[1]) == counted


def test_a_quick_run_writes_its_page(models: Path, tmp_path: Path) -> None:
    """With the ratio, the turns and the command."""
    out = tmp_path / "cost.md"
    assert main(["--models", str(models), "--rounds", "2", "--seconds", "0.1", "--out", str(out)]) == 0
    text = out.read_text()
    assert re.search(r"takes -?\d+\.\d% of the throughput", text)
    assert "2 turns" in text
    assert "--rounds 2" in text
