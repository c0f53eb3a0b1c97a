"""What HTTP/1.1 lets a client do on one connection: requests sent ahead, half-said, or in another dialect."""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.support.clients import RawConnection, metric
from tests.support.engines import stopped_engine
from tests.support.expected import fake_answers
from tests.support.server import FAKE
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


def test_a_long_pipeline_is_answered_whole(serve: Callable[..., Server]) -> None:
    """While the server does not read, no time runs out for what it has not read: 700 requests, each in its turn."""
    count = 700
    server = serve(*FAKE, "--fake-ms", "2", "--header-timeout-s", "0.5", "--body-timeout-s", "0.5")
    with RawConnection(server.http) as connection:
        connection.send(b"".join(request(f"text {number}", last=number == count - 1) for number in range(count)))
        found = replies(connection.read_to_end())
    assert [status for status, _, _ in found] == [200] * count
