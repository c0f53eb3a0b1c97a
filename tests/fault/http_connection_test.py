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
from tests.support.server import FAKE

if TYPE_CHECKING:
    from collections.abc import Callable
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


_OPEN = b"GET /livez HTTP/1.1\r\nConnection: close\r\n"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\r\n", 400),
        (b"Host: a\r\nHost: b\r\n\r\n", 400),
        (b"Host: a\r\nHost: a\r\n\r\n", 400),
        (b"Host: a b\r\n\r\n", 400),
        (b"Host: someone@test\r\n\r\n", 400),
        (b"Host: \xff\r\n\r\n", 400),
        (b"Host: test:80:80\r\n\r\n", 400),
        (b"Host:\r\n\r\n", 200),
        (b"Host: a_b.example:8000\r\n\r\n", 200),
        (b"Host: [::1]:8000\r\n\r\n", 200),
    ],
)
def test_a_request_names_one_valid_host(fake_server: Server, sent: bytes, status: int) -> None:
    """RFC 9112, section 3.2: missing, double or invalid, it is 400."""
    assert [found for found, _, _ in exchange(fake_server, _OPEN + sent)] == [status]


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"GET /livez HTTP/1.0\r\n\r\n", 200),  # as probes of load balancers, which name no host
        (b"GET /livez\r\n\r\n", 400),
        (b"GET /livez HTTP/0.9\r\nHost: test\r\n\r\n", 400),
        (b"GET /livez HTTP/2.0\r\nHost: test\r\n\r\n", 505),
    ],
)
def test_versions_of_http(fake_server: Server, line: bytes, status: int) -> None:
    """HTTP/1.0 and 1.1 are read, on the port of probes as well."""
    for address in (fake_server.http, fake_server.metrics):
        with RawConnection(address) as connection:
            connection.send(line)
            assert connection.status() == status


@pytest.mark.parametrize(
    ("coding", "version", "status"),
    [
        ("Chunked", "1.1", 200),
        ("gzip, chunked", "1.1", 501),
        ("identity", "1.1", 400),
        ("gzip", "1.1", 400),
        ("chunked, gzip", "1.1", 400),
        ("chunked, chunked", "1.1", 400),
        ("chunked\r\nTransfer-Encoding: chunked", "1.1", 400),
        ("chunked", "1.0", 400),
    ],
)
def test_transfer_codings(fake_server: Server, coding: str, version: str, status: int) -> None:
    """RFC 9112, section 6.1: `chunked` is last and alone, what is not known is 501, and HTTP/1.0 has none."""
    head = f"POST /embed HTTP/{version}\r\nHost: test\r\nContent-Type: application/json\r\nConnection: close\r\n"
    body = b'14\r\n{"inputs": "a text"}\r\n0\r\n\r\n'
    found = exchange(fake_server, f"{head}Transfer-Encoding: {coding}\r\n\r\n".encode() + body)
    assert [reply[0] for reply in found] == [status]


def test_no_leave_is_given_to_http_1_0(fake_server: Server) -> None:
    """It does not know `100 Continue`, whatever its headers say."""
    data = request("old", headers="Expect: 100-continue\r\n").replace(b"HTTP/1.1", b"HTTP/1.0")
    assert [status for status, _, _ in exchange(fake_server, data)] == [200]


@pytest.mark.parametrize(
    "head", [b"Host: a\r\nHost: b\r\n\r\n", b"Host: test\r\nX: " + b"x" * 20_000], ids=["400", "431"]
)
def test_a_refusal_of_head_has_no_body(fake_server: Server, head: bytes) -> None:
    """The head says what `GET` would get."""
    with RawConnection(fake_server.http) as connection:
        connection.send(b"HEAD /livez HTTP/1.1\r\n" + head)
        reply = connection.read_to_end()
    assert re.fullmatch(rb"HTTP/1\.1 4\d\d .*content-length: [1-9].*\r\n\r\n", reply, re.DOTALL)


@pytest.mark.parametrize("sent", [b"\x00", b"GET /livez HTTP/1.1\r\n\r\n", b"GET /x" + b"x" * 20_000])
def test_a_refusal_has_a_date(fake_server: Server, sent: bytes) -> None:
    """RFC 9110, section 6.6.1: as any reply of a server with a clock."""
    with RawConnection(fake_server.http) as connection:
        connection.send(sent)
        assert b"\r\ndate: " in connection.read_to_end()


def test_a_head_that_begins_behind_a_request_has_its_own_time(serve: Callable[..., Server]) -> None:
    """It is not timed from the connection's beginning, nor from that of the request before."""
    first, second = request("first"), request("second", last=True)
    with RawConnection(serve(*FAKE, "--header-timeout-s", "4").http) as connection:
        time.sleep(3)
        connection.send(first + second[:30])
        time.sleep(2)
        connection.send(second[30:])
        assert [status for status, _, _ in replies(connection.read_to_end())] == [200, 200]


def test_a_head_that_begins_behind_a_request_and_does_not_end_is_told_so(impatient_server: Server) -> None:
    """408, as a slow head of its own; not an end without a word."""
    found = exchange(impatient_server, request("first") + request("second")[:30])
    assert [status for status, _, _ in found] == [200, 408]


def test_a_long_pipeline_is_answered_whole(serve: Callable[..., Server]) -> None:
    """While the server does not read, no time runs out for what it has not read: 1,500 requests, each in its turn."""
    count = 1500
    server = serve(*FAKE, "--fake-ms", "2", "--header-timeout-s", "0.5", "--body-timeout-s", "0.5")
    with RawConnection(server.http) as connection:
        connection.send(b"".join(request(f"text {number}", last=number == count - 1) for number in range(count)))
        found = replies(connection.read_to_end())
    assert [status for status, _, _ in found] == [200] * count
