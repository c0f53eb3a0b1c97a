"""What HTTP/1.1 lets a client do on one connection: requests sent ahead, half-said, or in another dialect."""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.support.clients import RawConnection
from tests.support.expected import fake_answers

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.server import Server

_REPLY = re.compile(rb"HTTP/1\.1 (\d+) [^\r]*\r\n((?:[^\r]+\r\n)*)\r\n")


def request(text: str, *, path: str = "/embed", method: str = "POST", headers: str = "", last: bool = False) -> bytes:
    """A whole request for one text."""
    body = json.dumps({"inputs": text}).encode()
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n{headers}{'Connection: close' if last else 'X-More: yes'}\r\n\r\n"
    )
    return head.encode() + body


def replies(data: bytes) -> list[tuple[int, dict[str, str], bytes]]:
    """The replies that a connection carried: status, headers and body of each."""
    found = []
    while data:
        match = _REPLY.match(data)
        assert match is not None, data[:200]
        headers = dict(line.split(": ", 1) for line in match[2].decode().split("\r\n") if line)
        size = int(headers.get("content-length", 0))
        found.append((int(match[1]), headers, data[match.end() : match.end() + size]))
        data = data[match.end() + size :]
    return found


def exchange(server: Server, *sent: bytes) -> list[tuple[int, dict[str, str], bytes]]:
    """What the server answers to bytes that end with a request to close."""
    with RawConnection(server.http) as connection:
        for part in sent:
            connection.send(part)
        return replies(connection.read_to_end())


def test_requests_sent_ahead_are_answered_in_their_order(fake_server: Server, models: Path) -> None:
    """Forty at once: each answer is that of its request, one after another."""
    texts = [f"text number {number} " + "more " * (number % 7) for number in range(40)]
    data = b"".join(request(text, last=text is texts[-1]) for text in texts)
    found = exchange(fake_server, data)
    assert [status for status, _, _ in found] == [200] * len(texts)
    vectors = [json.loads(body)[0] for _, _, body in found]
    np.testing.assert_allclose(vectors, fake_answers(models, texts), atol=1e-5)


def test_a_refusal_comes_after_the_answers_that_are_due(fake_server: Server) -> None:
    """Garbage behind a good request does not cost that request its answer."""
    found = exchange(fake_server, request("good") + b"\x00garbage\r\n\r\n")
    assert [status for status, _, _ in found] == [200, 400]
    assert found[1][1]["connection"] == "close"


def test_a_request_in_single_bytes_is_read(fake_server: Server, models: Path) -> None:
    """However the network cuts it."""
    data = request("slowly but surely", last=True)
    found = exchange(fake_server, *[data[at : at + 1] for at in range(len(data))])
    assert [status for status, _, _ in found] == [200]
    np.testing.assert_allclose(json.loads(found[0][2]), fake_answers(models, ["slowly but surely"]), atol=1e-5)


def test_a_client_that_waits_for_leave_gets_it(fake_server: Server) -> None:
    """`Expect: 100-continue`, which curl sends with large bodies."""
    head, _, body = request("patient", headers="Expect: 100-continue\r\n", last=True).partition(b"\r\n\r\n")
    with RawConnection(fake_server.http) as connection:
        connection.send(head + b"\r\n\r\n")
        assert connection.socket.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.send(body)
        assert connection.status() == 200


def test_a_body_that_is_too_large_gets_no_leave(fake_server: Server) -> None:
    """The refusal comes before the body."""
    head = b"POST /embed HTTP/1.1\r\nHost: test\r\nContent-Length: 99999999\r\nExpect: 100-continue\r\n\r\n"
    with RawConnection(fake_server.http) as connection:
        connection.send(head)
        assert connection.status() == 413


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
def test_an_upgrade_is_declined_by_answering(fake_server: Server, protocol: str) -> None:
    """RFC 9110 lets a server ignore `Upgrade`; no other protocol is read on that connection."""
    head = f"GET /livez HTTP/1.1\r\nHost: test\r\nUpgrade: {protocol}\r\nConnection: Upgrade\r\n\r\n"
    found = exchange(fake_server, head.encode())
    assert [status for status, _, _ in found] == [200]
    assert found[0][1]["connection"] == "close"


def test_an_upgrade_with_a_body_is_refused(fake_server: Server) -> None:
    """The body cannot be told from the other protocol's first bytes."""
    found = exchange(fake_server, request("plain", headers="Upgrade: h2c\r\nConnection: Upgrade\r\n"))
    assert [status for status, _, _ in found] == [400]


def test_head_has_the_headers_and_no_body(fake_server: Server) -> None:
    """As `GET` would answer, without the content."""
    with RawConnection(fake_server.http) as connection:
        connection.send(b"HEAD /livez HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n")
        head, _, body = connection.read_to_end().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert b"content-length: " in head
    assert body == b""


def test_http_1_0_is_answered_and_closed(fake_server: Server) -> None:
    """Unless it asks to be kept."""
    data = request("old").replace(b"HTTP/1.1", b"HTTP/1.0")
    assert [status for status, _, _ in exchange(fake_server, data)] == [200]


@pytest.mark.parametrize("target", ["/embed?x=1", "http://test/embed", "/em%62ed", "/embed#part"])
def test_targets_that_name_the_path(fake_server: Server, target: str) -> None:
    """A query, a whole URL, an escape or a fragment lead to the same place."""
    found = exchange(fake_server, request("here", path=target, last=True))
    assert [status for status, _, _ in found] == [200]


@pytest.mark.parametrize("target", ["/embed%0a", "/embed%00", "/v2/models/minilm/infer%0A", "/embed/", "//embed"])
def test_targets_that_only_look_like_the_path(fake_server: Server, target: str) -> None:
    """A line's end, a NUL or a slash more is another path."""
    found = exchange(fake_server, request("there", path=target, last=True))
    assert [status for status, _, _ in found] == [404]


@pytest.mark.parametrize(("target", "status"), [("*", 404), ("http://test", 200), ("http://[/", 400)])
def test_targets_without_a_path(fake_server: Server, target: str, status: int) -> None:
    """`*` belongs to OPTIONS alone, a bare host means `/`, and half an address is no target."""
    found = exchange(fake_server, f"GET {target} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n".encode())
    assert [status for status, _, _ in found] == [status]


def test_a_connection_that_is_kept_is_used_again(fake_server: Server) -> None:
    """One connection, many requests, none of which waits for the idle limit."""
    with RawConnection(fake_server.http) as connection:
        started = time.monotonic()
        for _ in range(50):
            connection.send(request("again"))
            data = b""
            while not data.endswith(b"]]"):
                data += connection.socket.recv(1 << 16)
            assert data.startswith(b"HTTP/1.1 200")
        assert time.monotonic() - started < 10
