"""The measurement of what metrics cost: both servers are what they are said to be."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from loadtest.benchmarks.metrics_cost import SilentServer
from loadtest.benchmarks.server_process import HOST, BertServer
from tests.support.clients import get, post_json

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(("kind", "counted"), [pytest.param(BertServer, 1, marks=pytest.mark.long), (SilentServer, 0)])
def test_only_the_server_as_it_is_records(models: Path, kind: type[BertServer], counted: int) -> None:
    """Both answer."""
    with kind(models, "fp32", 1) as server:
        address = f"{HOST}:{server.http_port}"
        assert post_json(address, "/embed", b'{"inputs": "a text"}').status == 200
        scraped = get(address, "/metrics").body.decode()
        found = re.search(r"^bertserve_batch_size_count (\S+)$", scraped, re.MULTILINE)
    assert found
    assert float(found[1]) == counted
