"""What all connections hold together: bounded, refused beyond that, and given back."""

from __future__ import annotations

import contextlib
import gzip
import json
from typing import TYPE_CHECKING

import pytest

from tests.support.canary import sing
from tests.support.clients import RawConnection, metric, post_json
from tests.support.server import FAKE, Server
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MIB = 1 << 20
HEAD = b"POST /embed HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
LARGE = json.dumps({"inputs": "a text"}).encode().ljust(4 * MIB)


@pytest.fixture(scope="module")
def narrow_server(models: Path) -> Iterator[Server]:
    """A server that holds 16 MiB, four of the largest bodies."""
    with Server(models, *FAKE, "--buffer-limit-mb", "16", "--max-openai-batch-size", "2048") as server:
        yield server


@pytest.fixture
def connections(narrow_server: Server) -> Iterator[list[RawConnection]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(RawConnection(narrow_server.http)) for _ in range(5)]
    wait_for(lambda: held(narrow_server) == 0, "the end of all connections to give back what they held")


def held(server: Server) -> float:
    """Bytes of the budget that are in use."""
    return metric(server, "bertserve_buffer_bytes")


def test_bodies_on_their_way_are_bounded(narrow_server: Server, connections: list[RawConnection], models: Path) -> None:
    """The one for which there is no room gets 503 and a time to come back; short requests are served as ever."""
    refusals = metric(narrow_server, "bertserve_buffer_refusals_total")
    for connection in connections[:4]:
        connection.send(HEAD + b"Content-Length: %d\r\n\r\n" % len(LARGE) + LARGE[:-1])
    wait_for(lambda: held(narrow_server) == 16 * MIB, "four bodies to arrive")
    connections[4].send(HEAD + b"Content-Length: %d\r\n\r\n" % len(LARGE) + LARGE)
    reply = connections[4].read_to_end()
    assert reply.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1\r\n" in reply
    assert json.loads(reply.partition(b"\r\n\r\n")[2])["error_type"] == "Overloaded"
    assert metric(narrow_server, "bertserve_buffer_refusals_total") == refusals + 1
    sing(narrow_server, models)
    connections[0].send(LARGE[-1:])
    assert connections[0].socket.recv(100).startswith(b"HTTP/1.1 200 ")
    wait_for(lambda: held(narrow_server) == 12 * MIB, "the body that was answered to be given back")
    assert post_json(narrow_server.http, "/embed", LARGE).status == 200


def test_replies_that_nobody_reads_are_bounded(narrow_server: Server, connections: list[RawConnection]) -> None:
    """Once they have filled the budget, the next large reply is a 503."""
    body = json.dumps({"model": "minilm", "input": ["a text"] * 2048}).encode()
    sent = b"POST /v1/embeddings HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nContent-Length: "
    for connection in connections[:4]:
        connection.send(sent + b"%d\r\n\r\n" % len(body) + body)
        connection.socket.recv(1000)
    assert held(narrow_server) >= 16 * MIB
    connections[4].send(sent + b"%d\r\nConnection: close\r\n\r\n" % len(body) + body)
    assert connections[4].status() == 503


def test_inflated_bodies_are_bounded(narrow_server: Server) -> None:
    """Twenty small bodies that grow to 4 MiB each, at once, grow one at a time."""
    body = gzip.compress(LARGE)
    head = HEAD + b"Connection: close\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body)
    with contextlib.ExitStack() as stack:
        many = [stack.enter_context(RawConnection(narrow_server.http)) for _ in range(20)]
        for connection in many:
            connection.send(head + body)
        assert {connection.status() for connection in many} <= {200, 503}
    assert held(narrow_server) == 0


def test_a_pipeline_that_waits_is_bounded(serve: Callable[..., Server]) -> None:
    """What lies behind a request that waits counts, and is parsed a little at a time."""
    server = serve(*FAKE, "--fake-ms", "100", "--buffer-limit-mb", "16")
    request = HEAD + b"Content-Length: 20\r\n\r\n" + b'{"inputs": "a text"}'
    with RawConnection(server.http) as connection:
        connection.send(request * 1500)
        assert 0 < wait_for(lambda: held(server), "the pipeline to be counted") <= 16 * MIB
    wait_for(lambda: held(server) == 0, "the pipeline to be given back")
