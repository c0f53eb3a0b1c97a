"""Rows 1 to 9 of the failure modes: requests that are sent ahead, half-said, too large, too slow, odd, or none."""

from __future__ import annotations

import contextlib
import json
import re
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from tests.support.clients import (
    MODEL_INFER,
    Grpc,
    RawConnection,
    Refused,
    get,
    grpc_raw,
    http_call,
    metric,
    post_json,
)
from tests.support.engines import stopped_engine
from tests.support.expected import fake_answers
from tests.support.server import FAKE, elapsed
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.server import Server


_REPLY = re.compile(rb"HTTP/1\.1 (\d+) [^\r]*\r\n((?:[^\r]+\r\n)*)\r\n")


def request(text: str, *, path: str = "/embed", method: str = "POST", headers: str = "", last: bool = False) -> bytes:
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


def exchange(server: Server, *sent: bytes, then_end: bool = False) -> list[tuple[int, dict[str, str], bytes]]:
    """What the server answers to bytes that end with a request to close, or with the end of what the client sends."""
    with RawConnection(server.http) as connection:
        for part in sent:
            connection.send(part)
        if then_end:
            connection.end()
        return replies(connection.read_to_end())


def statuses(server: Server, *sent: bytes, then_end: bool = False) -> list[int]:
    return [status for status, _, _ in exchange(server, *sent, then_end=then_end)]


def read_until(connection: RawConnection, end: bytes) -> bytes:
    """What comes up to an end that is expected."""
    data = b""
    while not data.endswith(end):
        part = connection.socket.recv(1 << 16)
        assert part, data
        data += part
    return data


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


def test_leave_is_given_behind_a_reply_that_is_due(serve: Callable[..., Server]) -> None:
    """It comes after that reply, and the time for the body begins with it."""
    server = serve(*FAKE, "--body-timeout-s", "0.5")
    head, _, body = request("second", headers="Expect: 100-continue\r\n", last=True).partition(b"\r\n\r\n")
    with RawConnection(server.http) as connection:
        with stopped_engine(server):
            connection.send(request("first") + head + b"\r\n\r\n")
            time.sleep(0.7)  # longer than a body may take
        first = read_until(connection, b"HTTP/1.1 100 Continue\r\n\r\n")
        assert [status for status, _, _ in replies(first[: first.rindex(b"HTTP/1.1")])] == [200]
        connection.send(body)
        assert connection.status() == 200


_OFFERS = {
    "h2c": "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAA\r\n",
    "TLS": "Connection: Upgrade\r\nUpgrade: TLS/1.2\r\n",
    "websocket": "Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n",
    "several": "Upgrade: HTTP/3.0, x/1\r\nConnection: upgrade\r\nUpgrade: IRC/6.9\r\nConnection: x\r\n",
}


def _chunked(data: bytes) -> bytes:
    """A request with its body in chunks, and a trailer."""
    head, _, body = data.partition(b"\r\n\r\n")
    head = re.sub(rb"Content-Length: \d+", b"Transfer-Encoding: chunked", head)
    cut = len(body) // 2
    return head + b"\r\n\r\n%x\r\n%b\r\n%x;a=b\r\n%b\r\n0\r\nX-Trailer: y\r\n\r\n" % (
        *(cut, body[:cut], len(body) - cut, body[cut:]),
    )


@pytest.mark.parametrize("piece", [1 << 20, 1], ids=["at once", "single bytes"])
@pytest.mark.parametrize("offer", _OFFERS.values(), ids=_OFFERS)
def test_an_offer_of_another_protocol_is_declined_by_answering(
    fake_server: Server, models: Path, offer: str, piece: int
) -> None:
    """RFC 9110, 7.8: the request is HTTP/1.1, body and all, and so is what follows on the connection."""
    texts = ["sized", "x" * 3000, "chunked", "again", "plain"]
    sent = [request(text, headers=offer) for text in texts[:-1]] + [request(texts[-1], last=True)]
    sent[2] = _chunked(sent[2])
    sent.insert(1, f"GET /livez HTTP/1.1\r\nHost: test\r\n{offer}\r\n".encode())
    data = b"".join(sent)
    found = exchange(fake_server, *[data[at : at + piece] for at in range(0, len(data), piece)])
    assert [status for status, _, _ in found] == [200] * 6
    assert [headers.get("connection") for _, headers, _ in found] == [None] * 5 + ["close"]
    vectors = [json.loads(body)[0] for _, _, body in (found[0], *found[2:])]
    np.testing.assert_allclose(vectors, fake_answers(models, texts), atol=1e-5)


def test_an_offer_on_the_last_request_of_a_connection(fake_server: Server) -> None:
    """What follows a request to close is not read."""
    for body in (b"", b"Content-Length: 2\r\n"):
        head = b"POST /livez HTTP/1.1\r\nHost: test\r\nConnection: close, Upgrade\r\nUpgrade: h2c\r\n" + body
        found = exchange(fake_server, head + b"\r\n{}" + request("not read"))
        assert [(status, headers["connection"]) for status, headers, _ in found] == [(405, "close")]


def test_a_limit_holds_behind_an_offer(fake_server: Server) -> None:
    """For a body that says its length, for one that does not, and for its chunks."""
    offer = b"POST /embed HTTP/1.1\r\nHost: test\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"
    chunks = b"100000\r\n%b\r\n" % bytes(1 << 20) * 5
    for sent in (b"Content-Length: 5000000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n" + chunks):
        assert statuses(fake_server, offer + sent) == [413]


def test_a_client_that_has_said_all_is_answered(fake_server: Server, models: Path) -> None:
    """As `nc -N` and `socat` end (RFC 9112, 9.6): every request that is whole is answered, then the connection ends."""
    texts = [f"text number {number}" for number in range(12)]
    data = b"".join(map(request, texts))
    for sent in (texts[:1], texts):
        found = exchange(fake_server, b"".join(map(request, sent)), then_end=True)
        assert [status for status, _, _ in found] == [200] * len(sent)
        # The last reply says so, unless it is written before the end of sending is seen.
        assert found[-1][1].get("connection", "close") == "close"
        vectors = [json.loads(body)[0] for _, _, body in found]
        np.testing.assert_allclose(vectors, fake_answers(models, sent), atol=1e-5)
    for unfinished in (b"POST /emb", request("cut")[:-3], _chunked(request("cut"))[:-3]):
        found = exchange(fake_server, data, unfinished, then_end=True)
        assert [status for status, _, _ in found] == [200] * len(texts), "what has no end is not answered"
    assert statuses(fake_server, b"GET /\r\n\r\n", then_end=True) == [400]


def test_a_client_that_ends_in_the_middle_is_let_go(fake_server: Server) -> None:
    """Before a request, in its head and in its body: the connection ends without a word, and nothing is counted."""
    before = metric(fake_server, "bertserve_requests_total", reason="malformed_request")
    for sent in (b"", b"GET /livez HT", request("cut")[:-3], _chunked(request("cut"))[:-3]):
        assert exchange(fake_server, sent, then_end=True) == []
    assert metric(fake_server, "bertserve_requests_total", reason="malformed_request") == before


def test_a_client_that_has_left_is_told_from_one_that_has_said_all(serve: Callable[..., Server]) -> None:
    """Both send the same; one reads an interim reply and its answer, nothing computes for the other."""
    server = serve(*FAKE, "--threads", "1", "--max-batch-tokens", "16")
    with (
        RawConnection(server.http) as waiting,
        RawConnection(server.http) as leaving,
        RawConnection(server.http) as old,
    ):
        with stopped_engine(server):
            waiting.send(request("waiting"))
            waiting.end()
            wait_for(lambda: metric(server, "bertserve_admitted_tokens") > 0, "its text")
            leaving.send(request("leaving"))
            old.send(request("old").replace(b"HTTP/1.1", b"HTTP/1.0"))
            old.end()
            wait_for(lambda: metric(server, "bertserve_queue_texts") == 2, "those behind it")
            leaving.socket.close()
            wait_for(lambda: metric(server, "bertserve_requests_total", reason="client_gone") == 1, "its end")
            assert metric(server, "bertserve_queue_texts") == 1
        *interim, (status, _, _) = replies(waiting.read_to_end())
        assert status == 200
        assert {said[0] for said in interim} <= {100}
        assert [status for status, _, _ in replies(old.read_to_end())] == [200], "HTTP/1.0 knows no interim replies"


def test_head_has_the_headers_and_no_body(fake_server: Server) -> None:
    """As `GET` would answer, without the content."""
    with RawConnection(fake_server.http) as connection:
        connection.send(b"HEAD /livez HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n")
        head, _, body = connection.read_to_end().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert b"content-length: " in head
    assert body == b""


def test_http_1_0_is_answered_and_closed(fake_server: Server) -> None:
    """Unless it asks to be kept: then it is told so, as its client would take it for closed."""
    for headers in ("", "Connection: x\r\n", "Connection: keep-alive, close\r\n"):
        data = request("old", headers=headers).replace(b"HTTP/1.1", b"HTTP/1.0")
        found = exchange(fake_server, data)
        assert [(status, said["connection"]) for status, said, _ in found] == [(200, "close")]
    kept = request("old", headers="Connection: Keep-Alive\r\n").replace(b"HTTP/1.1", b"HTTP/1.0")
    found = exchange(fake_server, kept, kept, data)
    assert [said["connection"] for _, said, _ in found] == ["keep-alive", "keep-alive", "close"]
    assert all(int(said["content-length"]) == len(body) > 0 for _, said, body in found)


_BODY = b'{"inputs": "a"}'
_CLOSE = b"Connection: close\r\n"


def _get(target: bytes) -> bytes:
    return b"GET %b HTTP/1.1\r\nHost: test\r\n%b\r\n" % (target, _CLOSE)


def _livez(fields: bytes) -> bytes:
    return b"GET /livez HTTP/1.1\r\n%b%b\r\n" % (_CLOSE, fields)


def _post(fields: bytes, target: bytes = b"/embed", more: bytes = _CLOSE) -> bytes:
    head = b"POST %b HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n" % target
    return head + fields + more + b"\r\n" + _BODY


def _coded(coding: bytes, version: bytes = b"1.1") -> bytes:
    head = b"POST /embed HTTP/%b\r\nHost: test\r\nContent-Type: application/json\r\n%b" % (version, _CLOSE)
    return head + b"Transfer-Encoding: %b\r\n\r\nf\r\n%b\r\n0\r\n\r\n" % (coding, _BODY)


_SIZED = b"Content-Length: 15\r\n"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        # A query, a whole URL, an escape or a fragment lead to the same place.
        *[(_post(_SIZED, path), 200) for path in (b"/embed?x=1", b"http://test/embed", b"/em%62ed", b"/embed#part")],
        # A line's end, a NUL or a slash more is another path.
        *[(_post(_SIZED, path), 404) for path in (b"/embed%0a", b"/embed%00", b"/v2/models/minilm/infer%0A")],
        *[(_post(_SIZED, path), 404) for path in (b"/embed/", b"//embed")],
        # `*` belongs to OPTIONS alone, a bare host means `/`, and half an address is no target.
        *[(_get(b"*"), 404), (_get(b"http://test"), 200), (_get(b"http://[/"), 400)],
        # RFC 9112, 3.2: a request names one valid host.
        (_livez(b""), 400),
        (_livez(b"Host: a\r\nHost: b\r\n"), 400),
        (_livez(b"Host: a\r\nHost: a\r\n"), 400),
        (_livez(b"Host: a b\r\n"), 400),
        (_livez(b"Host: someone@test\r\n"), 400),
        (_livez(b"Host: \xff\r\n"), 400),
        (_livez(b"Host: test:80:80\r\n"), 400),
        (_livez(b"Host:\r\n"), 200),
        (_livez(b"Host: a_b.example:8000\r\n"), 200),
        (_livez(b"Host: [::1]:8000\r\n"), 200),
        # RFC 9110, 8.6, and RFC 9112, 6.3: a body has one length, or one framing.
        (_post(_SIZED + b"Content-Length: 16\r\n"), 400),
        (_post(b"Content-Length: 15, 16\r\n"), 400),
        (_post(_SIZED + b"Transfer-Encoding: chunked\r\n"), 400),
        (_post(b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n"), 400),
        (_post(b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n"), 501),
        # RFC 9110, 5.3: other values that are no lists come once.
        (_post(_SIZED + b"Content-Type: application/json\r\n"), 200),
        (_post(_SIZED + b"Content-Type: text/plain\r\n"), 400),
        (_post(_SIZED + b"Authorization: Bearer a\r\nAuthorization: Bearer b\r\n"), 400),
        (_post(_SIZED + b"X-Request-Timeout-Ms: 5000\r\nX-Request-Timeout-Ms: 1\r\n"), 400),
        (_post(_SIZED + b"X-Request-Timeout-Ms: 5000\r\nX-Request-Timeout-Ms: 5000\r\n"), 200),
        # Lists are joined: both codings count, the second line of `Connection` as well.
        (_post(_SIZED + b"Content-Encoding: identity\r\nContent-Encoding: br\r\n"), 415),
        (_post(_SIZED + b"Connection: x-none\r\nConnection: close\r\nExpect: y\r\n", more=b""), 200),
        # RFC 9112, 6.1: `chunked` is last and alone, what is not known is 501, and HTTP/1.0 has none.
        *[(_coded(b"Chunked"), 200), (_coded(b"gzip, chunked"), 501), (_coded(b"identity"), 400)],
        *[(_coded(b"gzip"), 400), (_coded(b"chunked, gzip"), 400), (_coded(b"chunked, chunked"), 400)],
        *[(_coded(b"chunked\r\nTransfer-Encoding: chunked"), 400), (_coded(b"chunked", b"1.0"), 400)],
        # HTTP/1.0 does not know `100 Continue`, whatever its headers say.
        (request("old", headers="Expect: 100-continue\r\n").replace(b"HTTP/1.1", b"HTTP/1.0"), 200),
    ],
)
def test_targets_fields_and_codings(fake_server: Server, sent: bytes, status: int) -> None:
    assert statuses(fake_server, sent) == [status]


def test_an_expectation_on_the_second_line_counts(fake_server: Server) -> None:
    """`Expect` is a list."""
    head = b"POST /embed HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nContent-Length: 15\r\n"
    with RawConnection(fake_server.http) as connection:
        connection.send(head + b"Expect: x=y\r\nExpect: 100-Continue\r\nConnection: close\r\n\r\n")
        assert connection.socket.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.send(_BODY)
        assert connection.status() == 200


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


def test_a_head_that_begins_behind_a_request_has_its_own_time(serve: Callable[..., Server]) -> None:
    """It is not timed from the connection's beginning, nor from that of the request before."""
    first, second = request("first"), request("second", last=True)
    with RawConnection(serve(*FAKE, "--header-timeout-s", "4").http) as connection:
        time.sleep(3)
        connection.send(first + second[:30])
        time.sleep(2)
        connection.send(second[30:])
        assert [status for status, _, _ in replies(connection.read_to_end())] == [200, 200]


def test_a_long_pipeline_is_answered_whole(serve: Callable[..., Server]) -> None:
    """While the server does not read, no time runs out for what it has not read: 700 requests, each in its turn."""
    count = 700
    server = serve(*FAKE, "--fake-ms", "2", "--header-timeout-s", "0.5", "--body-timeout-s", "0.5")
    with RawConnection(server.http) as connection:
        connection.send(b"".join(request(f"text {number}", last=number == count - 1) for number in range(count)))
        found = replies(connection.read_to_end())
    assert [status for status, _, _ in found] == [200] * count


HEADER_LIMIT = 16_384
HEADER_COUNT = 100
BODY_LIMIT = 4 << 20
SMALL = b'{"inputs": "small"}'
HEAD = b"POST /embed HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
LAST = HEAD + b"Connection: close\r\n"
SIZE = b"Content-Length: %d\r\n\r\n" % len(SMALL)
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
GOOD = HEAD + b"Content-Length: %d\r\n\r\n" % len(SMALL) + SMALL
GENEROUS_S = 8.0
"""The impatient server waits 1 s for headers and 1.5 s for bodies; a busy machine may take a little longer."""


@pytest.mark.parametrize(
    "data",
    [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"\x00" * 64, b"hello, is anyone there?\r\n\r\n"],
    ids=["tls", "zeros", "prose"],
)
def test_row_01_garbage_is_answered_400_and_closed(fake_server: Server, data: bytes) -> None:
    with RawConnection(fake_server.http) as connection:
        connection.send(data)
        assert connection.status() == 400


def test_row_01_garbage_on_the_grpc_port_is_closed(fake_server: Server) -> None:
    with RawConnection(fake_server.grpc) as connection:
        connection.send(b"GET / HTTP/1.1\r\nHost: test\r\n\r\n" * 4)
        connection.read_to_end()


def test_row_02_unknown_path_and_method(fake_server: Server) -> None:
    """404 with the server's own error body; 405 carries `Allow`, as RFC 9110 demands."""
    reply = get(fake_server.http, "/no/such/path")
    assert reply.status == 404
    assert reply.json()["error"]["reason"] == "not_found"
    assert reply.json()["error"]["request_id"] == reply.headers["x-request-id"]
    assert "POST" in get(fake_server.http, "/embed").headers.get("allow", "")


@pytest.mark.parametrize("path", ["/embed", "/v1/embeddings"])
@pytest.mark.parametrize("kind", [None, "text/plain", "application/jsonp", "multipart/form-data"])
def test_row_03_wrong_content_type(fake_server: Server, path: str, kind: str | None) -> None:
    """A body that does not say it is JSON is 415 on the JSON routes."""
    reply = http_call(fake_server.http, "POST", path, SMALL, {} if kind is None else {"Content-Type": kind})
    assert reply.status == 415


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "APPLICATION/JSON", "application/vnd.api+json"])
def test_row_03_content_types_that_are_json(fake_server: Server, kind: str) -> None:
    """Parameters, capitals and `+json` make no difference."""
    assert http_call(fake_server.http, "POST", "/embed", SMALL, {"Content-Type": kind}).status == 200


def padded(size: int) -> bytes:
    """A good JSON body of exactly so many bytes."""
    return SMALL + b" " * (size - len(SMALL))


def in_chunks(body: bytes, size: int) -> bytes:
    """A request with its body in chunks of a size, in a connection that ends with it."""
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join([LAST, CHUNKED, *[b"%x\r\n%s\r\n" % (len(part), part) for part in parts], b"0\r\n\r\n"])


def with_lines(count: int) -> bytes:
    padding = b"".join(b"X-%d: y\r\n" % number for number in range(count - 4))
    return LAST + padding + b"Content-Length: %d\r\n\r\n" % len(SMALL) + SMALL


SIZED = {
    "04 headers that never end": (HEAD + b"X-Padding: " + b"x" * (HEADER_LIMIT + 1), {431}),
    "04 the request line counts too": (b"GET /" + b"x" * (HEADER_LIMIT + 1) + b" HTTP/1.1\r\nHost: a\r\n\r\n", {431}),
    "04 headers at the limit": (LAST + b"X-Padding: %b\r\n" % (b"x" * 15_000) + SIZE + SMALL, {200}),
    "04 as many lines as are read": (with_lines(HEADER_COUNT), {200}),
    "04 a line more": (with_lines(HEADER_COUNT + 1), {431}),
    "04 trailers": (LAST + CHUNKED + b"13\r\n%s\r\n0\r\nX-Trailer: %s\r\n\r\n" % (SMALL, b"x" * (1 << 20)), {413, 431}),
    "05 a length that is refused before the body": (HEAD + b"Content-Length: %d\r\n\r\n" % (BODY_LIMIT + 1), {413}),
    "05 chunks below the limit": (in_chunks(padded(BODY_LIMIT - 1), 1 << 16), {200}),
    "05 chunks at the limit": (in_chunks(padded(BODY_LIMIT), 1 << 16), {200}),
    "05 chunks beyond the limit": (in_chunks(padded(BODY_LIMIT + 1), 1 << 16), {413}),
    "06 a few thousand small chunks": (in_chunks(padded(500_000), 100), {200}),
    # Little more than the frames of its chunks: refused long before its end.
    "06 a million chunks": (in_chunks(padded(1_000_000), 1), {400, 413}),
    "09 a negative length": (HEAD + b"Content-Length: -1\r\n\r\n" + SMALL, {400, 413}),
    "09 a length with an exponent": (HEAD + b"Content-Length: 1e3\r\n\r\n" + SMALL, {400, 413}),
    "09 a huge length": (HEAD + b"Content-Length: 99999999999999999999999999\r\n\r\n" + SMALL, {400, 413}),
}


@pytest.mark.parametrize("case", SIZED)
def test_rows_04_to_09_sizes_and_lengths(fake_server: Server, case: str) -> None:
    """What is within the limits is read; what is beyond them, or has no length, is refused and the connection ends."""
    sent, statuses = SIZED[case]
    with RawConnection(fake_server.http) as connection:
        connection.send(sent)
        assert connection.status() in statuses


def test_row_04_second_request_of_a_connection(fake_server: Server) -> None:
    """The limit holds for every request of a keep-alive connection, not only for the first."""
    with RawConnection(fake_server.http) as connection:
        connection.send(GOOD)
        assert connection.socket.recv(65_536).startswith(b"HTTP/1.1 200")
        connection.send(HEAD + b"X-Padding: " + b"x" * (HEADER_LIMIT + 1))
        assert b"HTTP/1.1 431" in connection.read_to_end()


@pytest.mark.parametrize(("size", "status"), [(BODY_LIMIT - 1, 200), (BODY_LIMIT, 200), (BODY_LIMIT + 1, 413)])
def test_row_05_body_declared(fake_server: Server, size: int, status: int) -> None:
    """A declared body is read up to exactly 4 MiB."""
    assert post_json(fake_server.http, "/embed", padded(size)).status == status


@pytest.mark.parametrize("path", ["/embed", "/v1/embeddings", "/v2/models/minilm/infer"])
def test_row_05_error_body_of_the_protocol(fake_server: Server, path: str) -> None:
    """A refusal made before the application runs still has the shape of the path's protocol and says why."""
    reply = post_json(fake_server.http, path, padded(BODY_LIMIT + 1))
    assert reply.status == 413
    assert str(BODY_LIMIT) in json.dumps(reply.json()["error"])
    assert "x-request-id" in reply.headers


def test_grpc_refuses_unknown_calls_and_large_metadata(fake_server: Server) -> None:
    """Rows 2 and 4."""
    for call, padding, status in (
        ("/inference.GRPCInferenceService/NoSuchCall", "", "UNIMPLEMENTED"),
        (MODEL_INFER, "x" * 20_000, "RESOURCE_EXHAUSTED"),
    ):
        with pytest.raises(Refused) as refused:
            grpc_raw(fake_server.grpc, call, b"", headers=[("padding", padding)])
        assert refused.value.status == status


@pytest.mark.parametrize(("surplus", "fits"), [(-1, True), (0, True), (1, False)])
def test_row_05_grpc_message(fake_server: Server, surplus: int, fits: bool) -> None:  # noqa: FBT001
    """A message is read up to exactly 4 MiB; more is RESOURCE_EXHAUSTED."""
    with Grpc(fake_server) as client:
        request = client.request(["small"])
        request.parameters["padding"].string_param = "x" * BODY_LIMIT
        too_much = request.ByteSize() - BODY_LIMIT - surplus
        request.parameters["padding"].string_param = "x" * (BODY_LIMIT - too_much)
        data = request.SerializeToString()
    assert len(data) == BODY_LIMIT + surplus
    if fits:
        assert pb.ModelInferResponse.FromString(grpc_raw(fake_server.grpc, MODEL_INFER, data)).outputs
    else:
        with pytest.raises(Refused) as refused:
            grpc_raw(fake_server.grpc, MODEL_INFER, data)
        assert refused.value.status == "RESOURCE_EXHAUSTED"


SLOW = {
    # What is sent, after an answer on the same connection if `GOOD` comes first, and the statuses until the end.
    "half a header": ([HEAD + b"X-Half: "], [b"408"]),
    "half a header of a second request": ([GOOD, HEAD], [b"200", b"408"]),
    "half a header behind a request": ([GOOD + HEAD], [b"200", b"408"]),
    "half a body": ([HEAD + b"Content-Length: 100\r\n\r\n" + SMALL], [b"408"]),
    "a chunked body without an end": ([HEAD + CHUNKED + b"13\r\n%s\r\n" % SMALL], [b"408"]),
    "nothing": ([], []),
    "an empty line, which is no progress": ([b"\r\n"], [b"408"]),
    "nothing after an answer": ([GOOD], [b"200"]),
    "an empty line after an answer": ([GOOD, b"\r\n"], [b"200"]),
}


def test_row_08_who_is_slow_or_silent_is_cut_off(impatient_server: Server) -> None:
    """All at a time: 408 where a request has begun, and the end of the connection in any case."""
    with contextlib.ExitStack() as stack:
        opened = {name: stack.enter_context(RawConnection(impatient_server.http, GENEROUS_S)) for name in SLOW}
        received = dict.fromkeys(SLOW, b"")
        for name, connection in opened.items():
            for part in SLOW[name][0]:
                connection.send(part)
                if part is GOOD:
                    received[name] = connection.socket.recv(65_536)
        found = {
            name: re.findall(rb"HTTP/1\.1 (\d+)", received[name] + connection.read_to_end())
            for name, connection in opened.items()
        }
    assert found == {name: statuses for name, (_, statuses) in SLOW.items()}


def test_row_08_trickled_header(impatient_server: Server) -> None:
    """A client that sends a byte now and then gets no more time than one that stops."""
    started = time.monotonic()
    with RawConnection(impatient_server.http, timeout_s=0.1) as connection:
        connection.send(HEAD + b"X-Slow: ")
        reply = b""
        while not reply and elapsed(started) < GENEROUS_S:
            connection.send(b"x")
            try:
                reply = connection.socket.recv(65_536)
            except TimeoutError:
                continue
    assert reply.startswith(b"HTTP/1.1 408")
