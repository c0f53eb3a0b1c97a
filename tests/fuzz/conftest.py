from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.clients import Grpc, get, metric, post_json
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.server import Server

CANARY = b'{"inputs": "the canary is in the text"}'


@pytest.fixture
def target(tasks_server: Server) -> Iterator[Server]:
    """The server of every task; afterwards it lives, holds nothing, answers as before and never met a bug."""
    process, engine = tasks_server.pid, tasks_server.engine_pid()
    before = post_json(tasks_server.http, "/embed", CANARY)
    yield tasks_server
    assert before.status == 200
    assert post_json(tasks_server.http, "/embed", CANARY).body == before.body
    with Grpc(tasks_server) as client:
        request = client.request(["the canary is in the text"])
        request.model_name = "embed"
        assert client.infer(request).outputs[0].shape == [1, 32]
    wait_for(lambda: metric(tasks_server, "bertserve_admitted_tokens") == 0, "no token under way")
    assert (tasks_server.pid, tasks_server.engine_pid()) == (process, engine)
    assert get(tasks_server.http, "/livez").status == 200
    assert "Traceback" not in tasks_server.log
