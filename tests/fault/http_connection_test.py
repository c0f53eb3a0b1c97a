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

HEADER_LIMIT, HEADER_COUNT, BODY_LIMIT = 16_384, 100, 4 << 20
GENEROUS_S = 8.0
"""The impatient server waits 1 s for headers and 1.5 s for bodies; a busy machine may take a little longer."""

SMALL = b'{"inputs": "small"}'
JSON = b"Host: test\r\nContent-Type: application/json\r\n"
HEAD = b"POST /embed HTTP/1.1\r\n" + JSON
CLOSE = b"Connection: close\r\n"
SIZED = b"Content-Length: %d\r\n" % len(SMALL)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
EXPECT = "Expect: 100-continue\r\n"
_REPLY = re.compile(rb"HTTP/1\.1 (\d+) [^\r]*\r\n((?:[^\r]+\r\n)*)\r\n")


def request(text: str, headers: str = "", *, last: bool = False) -> bytes:
    body = json.dumps({"inputs": text}).encode()
    more = f"Content-Length: {len(body)}\r\n{headers}{'Connection: close' if last else 'X-More: yes'}\r\n\r\n"
    return HEAD + more.encode() + body


def old(headers: str = "") -> bytes:
    return request("old", headers).replace(b"HTTP/1.1", b"HTTP/1.0")


def chunked(data: bytes) -> bytes:
    """A request with its body in chunks, and a trailer."""
    head, _, body = data.partition(b"\r\n\r\n")
    head = re.sub(rb"Content-Length: \d+", b"Transfer-Encoding: chunked", head)
    cut = len(body) // 2
    parts = (cut, body[:cut], len(body) - cut, body[cut:])
    return head + b"\r\n\r\n%x\r\n%b\r\n%x;a=b\r\n%b\r\n0\r\nX-Trailer: y\r\n\r\n" % parts


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


def vectors_of(found: list[tuple[int, dict[str, str], bytes]]) -> list[object]:
    assert {status for status, _, _ in found} == {200}
    return [json.loads(body)[0] for _, _, body in found]


def get_of(target: bytes) -> bytes:
    return b"GET %b HTTP/1.1\r\nHost: test\r\n%b\r\n" % (target, CLOSE)


def livez(fields: bytes) -> bytes:
    return b"GET /livez HTTP/1.1\r\n%b%b\r\n" % (CLOSE, fields)


def post(fields: bytes, target: bytes = b"/embed", more: bytes = CLOSE) -> bytes:
    return b"POST %b HTTP/1.1\r\n%b" % (target, JSON) + fields + more + b"\r\n" + SMALL


def coded(coding: bytes, version: bytes = b"1.1") -> bytes:
    head = b"POST /embed HTTP/%b\r\n%b%b" % (version, JSON, CLOSE)
    return head + b"Transfer-Encoding: %b\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (coding, len(SMALL), SMALL)


def padded(size: int) -> bytes:
    """A good JSON body of exactly so many bytes."""
    return SMALL + b" " * (size - len(SMALL))


def in_chunks(body: bytes, size: int) -> bytes:
    """A request with its body in chunks of a size, in a connection that ends with it."""
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(
        [HEAD, CLOSE, CHUNKED, b"\r\n", *[b"%x\r\n%s\r\n" % (len(part), part) for part in parts], b"0\r\n\r\n"]
    )


def with_lines(count: int) -> bytes:
    return post(SIZED + b"".join(b"X-%d: y\r\n" % number for number in range(count - 4)))


GOOD = request("good")
OFFER = b"POST /embed HTTP/1.1\r\nHost: test\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"
LAST_OFFER = b"POST /livez HTTP/1.1\r\nHost: test\r\nConnection: close, Upgrade\r\nUpgrade: h2c\r\n"
ENDLESS = HEAD + b"X-Padding: " + b"x" * (HEADER_LIMIT + 1)
KEPT = "Connection: Keep-Alive\r\n"
TALKS: dict[str, tuple[bytes, list[int]]] = {
    # What a client sends on a connection, and the statuses of the replies until the server ends it.
    "01 TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", [400]),
    "01 zeros": (b"\x00" * 64, [400]),
    "01 prose": (b"hello, is anyone there?\r\n\r\n", [400]),
    "garbage behind a good request": (GOOD + b"\x00garbage\r\n\r\n", [200, 400]),
    # Row 4: 15 KiB of complete headers are read.
    "04 headers at the limit": (post(SIZED + b"X-Padding: %b\r\n" % (b"x" * 15_000)), [200]),
    "04 headers at the limit behind a request": (
        GOOD + post(SIZED + b"X-Padding: %b\r\n" % (b"x" * 15_000)),
        [200, 200],
    ),
    "04 headers that never end": (ENDLESS, [431]),
    "04 headers that never end behind a request": (GOOD + ENDLESS, [200, 431]),
    "04 the request line counts too": (b"GET /" + b"x" * (HEADER_LIMIT + 1) + b" HTTP/1.1\r\nHost: a\r\n\r\n", [431]),
    "04 as many lines as are read": (with_lines(HEADER_COUNT), [200]),
    "04 a line more": (with_lines(HEADER_COUNT + 1), [431]),
    # Row 5: a body is read up to exactly 4 MiB, however it is framed; else it is refused before it, and without leave.
    "05 a length beyond the limit": (HEAD + b"Content-Length: %d\r\n\r\n" % (BODY_LIMIT + 1), [413]),
    "05 no leave for it": (HEAD + b"Content-Length: %d\r\n%b\r\n" % (BODY_LIMIT + 1, EXPECT.encode()), [413]),
    "05 a length beyond the limit behind an offer": (OFFER + b"Content-Length: 5000000\r\n\r\n", [413]),
    "05 chunks below the limit": (in_chunks(padded(BODY_LIMIT - 1), 1 << 16), [200]),
    "05 chunks at the limit": (in_chunks(padded(BODY_LIMIT), 1 << 16), [200]),
    "05 chunks beyond the limit": (in_chunks(padded(BODY_LIMIT + 1), 1 << 16), [413]),
    "05 chunks beyond it behind an offer": (
        OFFER + CHUNKED + b"\r\n" + b"100000\r\n%b\r\n" % bytes(1 << 20) * 5,
        [413],
    ),
    "06 a few thousand small chunks": (in_chunks(padded(500_000), 100), [200]),
    # RFC 9110, 7.8: what follows a request to close is not read, whatever else was offered.
    "an offer with the last request": (LAST_OFFER + b"\r\n{}" + GOOD, [405]),
    "an offer with the last request and a body": (LAST_OFFER + b"Content-Length: 2\r\n\r\n{}" + GOOD, [405]),
    # A query, a whole URL, an escape or a fragment lead to the same place; a line's end, a NUL or a slash elsewhere.
    **{
        f"target {target.decode()}": (post(SIZED, target), [200])
        for target in (b"/embed?x=1", b"http://test/embed", b"/em%62ed", b"/embed#part")
    },
    **{
        f"target {target.decode()}": (post(SIZED, target), [404])
        for target in (b"/embed%0a", b"/embed%00", b"/v2/models/minilm/infer%0A", b"/embed/", b"//embed")
    },
    # `*` belongs to OPTIONS alone, a bare host means `/`, and half an address is no target.
    "target *": (get_of(b"*"), [404]),
    "target of a host": (get_of(b"http://test"), [200]),
    "target of half an address": (get_of(b"http://[/"), [400]),
    # RFC 9112, 3.2: a request names one valid host.
    **{
        f"host {fields.decode('latin-1')!r}": (livez(fields), [400])
        for fields in (
            *(b"", b"Host: a\r\nHost: b\r\n", b"Host: a\r\nHost: a\r\n", b"Host: a b\r\n", b"Host: someone@test\r\n"),
            *(b"Host: \xff\r\n", b"Host: test:80:80\r\n"),
        )
    },
    **{
        f"host {fields.decode()!r}": (livez(fields), [200])
        for fields in (b"Host:\r\n", b"Host: a_b.example:8000\r\n", b"Host: [::1]:8000\r\n")
    },
    # RFC 9110, 8.6, and RFC 9112, 6.3: a body has one length, or one framing.
    "two lengths": (post(SIZED + b"Content-Length: 16\r\n"), [400]),
    "a list of lengths": (post(b"Content-Length: 15, 16\r\n"), [400]),
    "a length and chunks": (post(SIZED + CHUNKED), [400]),
    "chunked, then identity": (post(CHUNKED + b"Transfer-Encoding: identity\r\n"), [400]),
    "gzip, then chunked": (post(b"Transfer-Encoding: gzip\r\n" + CHUNKED), [501]),
    # RFC 9110, 5.3: other values that are no lists come once, lists are joined.
    "a type twice": (post(SIZED + b"Content-Type: application/json\r\n"), [200]),
    "two types": (post(SIZED + b"Content-Type: text/plain\r\n"), [400]),
    "two keys": (post(SIZED + b"Authorization: Bearer a\r\nAuthorization: Bearer b\r\n"), [400]),
    "two timeouts": (post(SIZED + b"X-Request-Timeout-Ms: 5000\r\nX-Request-Timeout-Ms: 1\r\n"), [400]),
    "a timeout twice": (post(SIZED + b"X-Request-Timeout-Ms: 5000\r\nX-Request-Timeout-Ms: 5000\r\n"), [200]),
    "two encodings": (post(SIZED + b"Content-Encoding: identity\r\nContent-Encoding: br\r\n"), [415]),
    "two connections": (post(SIZED + b"Connection: x-none\r\nConnection: close\r\nExpect: y\r\n", more=b""), [200]),
    # RFC 9112, 6.1: `chunked` is last and alone, what is not known is 501, and HTTP/1.0 has none.
    "coding Chunked": (coded(b"Chunked"), [200]),
    "coding gzip, chunked": (coded(b"gzip, chunked"), [501]),
    **{
        f"coding {coding.decode()!r}": (coded(coding), [400])
        for coding in (b"identity", b"gzip", b"chunked, gzip", b"chunked, chunked", b"chunked\r\n" + CHUNKED[:-2])
    },
    "coding of HTTP/1.0": (coded(b"chunked", b"1.0"), [400]),
    # HTTP/1.0 is answered and closed, unless it asks to be kept; it does not know `100 Continue`.
    "HTTP/1.0": (old(), [200]),
    "HTTP/1.0 with a connection": (old("Connection: x\r\n"), [200]),
    "HTTP/1.0 that asks for both": (old("Connection: keep-alive, close\r\n"), [200]),
    "HTTP/1.0 that expects": (old(EXPECT), [200]),
    "HTTP/1.0 that is kept": (old(KEPT) * 2 + old(), [200, 200, 200]),
}
UNSURE: dict[str, tuple[bytes, set[int]]] = {
    # Refused with one of these.
    "04 trailers": (
        HEAD + CLOSE + CHUNKED + b"\r\n13\r\n%s\r\n0\r\nX-Trailer: %s\r\n\r\n" % (SMALL, b"x" * (1 << 20)),
        {413, 431},
    ),
    # Little more than the frames of its chunks: refused long before its end.
    "06 a million chunks": (in_chunks(padded(1_000_000), 1), {400, 413}),
    **{
        f"09 a length of {length}": (HEAD + f"Content-Length: {length}\r\n\r\n".encode() + SMALL, {400, 413})
        for length in ("-1", "1e3", "99999999999999999999999999")
    },
}


@pytest.mark.parametrize("case", TALKS)
def test_rows_01_to_09_what_a_connection_gets(fake_server: Server, case: str) -> None:
    """Each request that is whole is answered, what breaks a rule or a limit is refused, and the last reply says so."""
    sent, statuses = TALKS[case]
    found = exchange(fake_server, sent)
    assert [status for status, _, _ in found] == statuses
    kept = ["keep-alive" if case == "HTTP/1.0 that is kept" else None] * (len(found) - 1)
    assert [headers.get("connection") for _, headers, _ in found] == [*kept, "close"]
    assert all(int(headers["content-length"]) == len(body) > 0 for _, headers, body in found)


@pytest.mark.parametrize("case", UNSURE)
def test_rows_04_to_09_what_is_refused(fake_server: Server, case: str) -> None:
    sent, statuses = UNSURE[case]
    ((status, _, _),) = exchange(fake_server, sent)
    assert status in statuses


def test_row_01_garbage_on_the_grpc_port_is_closed(fake_server: Server) -> None:
    with RawConnection(fake_server.grpc) as connection:
        connection.send(b"GET / HTTP/1.1\r\nHost: test\r\n\r\n" * 4)
        connection.read_to_end()


def test_row_04_second_request_of_a_connection(fake_server: Server) -> None:
    """The limit holds for every request of a keep-alive connection, not only for the first."""
    with RawConnection(fake_server.http) as connection:
        connection.send(GOOD)
        assert connection.socket.recv(65_536).startswith(b"HTTP/1.1 200")
        connection.send(ENDLESS)
        assert b"HTTP/1.1 431" in connection.read_to_end()


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


@pytest.mark.parametrize(
    ("call", "padding", "status"),
    [
        ("/inference.GRPCInferenceService/NoSuchCall", "", "UNIMPLEMENTED"),
        (MODEL_INFER, "x" * 20_000, "RESOURCE_EXHAUSTED"),
    ],
    ids=["row 2", "row 4"],
)
def test_grpc_refuses_unknown_calls_and_large_metadata(
    fake_server: Server, call: str, padding: str, status: str
) -> None:
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
    "a chunked body without an end": ([HEAD + CHUNKED + b"\r\n13\r\n%s\r\n" % SMALL], [b"408"]),
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
    started, reply = time.monotonic(), b""
    with RawConnection(impatient_server.http, timeout_s=0.1) as connection:
        connection.send(HEAD + b"X-Slow: ")
        while not reply and elapsed(started) < GENEROUS_S:
            connection.send(b"x")
            with contextlib.suppress(TimeoutError):
                reply = connection.socket.recv(65_536)
    assert reply.startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("piece", [1 << 20, 1], ids=["at once", "single bytes"])
def test_requests_sent_ahead_are_answered_in_their_order(fake_server: Server, models: Path, piece: int) -> None:
    """Forty, however their bytes come: each answer is that of its request, one after another."""
    texts = [f"text number {number} " + "more " * (number % 7) for number in range(40 if piece > 1 else 2)]
    data = b"".join(request(text, last=text is texts[-1]) for text in texts)
    found = exchange(fake_server, *[data[at : at + piece] for at in range(0, len(data), piece)])
    np.testing.assert_allclose(vectors_of(found), fake_answers(models, texts), atol=1e-5)


@pytest.mark.parametrize("headers", [EXPECT, "Expect: x=y\r\nExpect: 100-Continue\r\n"], ids=["once", "as a list"])
def test_a_client_that_waits_for_leave_gets_it(fake_server: Server, headers: str) -> None:
    """`Expect: 100-continue`, which curl sends with large bodies."""
    head, _, body = request("patient", headers, last=True).partition(b"\r\n\r\n")
    with RawConnection(fake_server.http) as connection:
        connection.send(head + b"\r\n\r\n")
        assert connection.socket.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.send(body)
        assert connection.status() == 200


def test_leave_is_given_behind_a_reply_that_is_due(serve: Callable[..., Server]) -> None:
    """It comes after that reply, and the time for the body begins with it."""
    server = serve(*FAKE)
    head, _, body = request("second", EXPECT, last=True).partition(b"\r\n\r\n")
    with RawConnection(server.http) as connection:
        with stopped_engine(server):
            connection.send(request("first") + head + b"\r\n\r\n")
            time.sleep(10.5)  # longer than a body may take
        first = b""
        while not first.endswith(b"HTTP/1.1 100 Continue\r\n\r\n"):
            part = connection.socket.recv(1 << 16)
            assert part, first
            first += part
        assert [status for status, _, _ in replies(first)] == [200, 100]
        connection.send(body)
        assert connection.status() == 200


OFFERS = {
    "h2c": "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAA\r\n",
    "TLS": "Connection: Upgrade\r\nUpgrade: TLS/1.2\r\n",
    "websocket": "Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n",
    "several": "Upgrade: HTTP/3.0, x/1\r\nConnection: upgrade\r\nUpgrade: IRC/6.9\r\nConnection: x\r\n",
}


@pytest.mark.parametrize("piece", [1 << 20, 1], ids=["at once", "single bytes"])
@pytest.mark.parametrize("offer", OFFERS.values(), ids=OFFERS)
def test_an_offer_of_another_protocol_is_declined_by_answering(
    fake_server: Server, models: Path, offer: str, piece: int
) -> None:
    """RFC 9110, 7.8: the request is HTTP/1.1, body and all, and so is what follows on the connection."""
    texts = ["sized", "x" * 3000, "chunked", "again", "plain"]
    sent = [request(text, offer) for text in texts[:-1]] + [request(texts[-1], last=True)]
    sent[2] = chunked(sent[2])
    sent.insert(1, f"GET /livez HTTP/1.1\r\nHost: test\r\n{offer}\r\n".encode())
    data = b"".join(sent)
    found = exchange(fake_server, *[data[at : at + piece] for at in range(0, len(data), piece)])
    assert [status for status, _, _ in found] == [200] * 6
    assert [headers.get("connection") for _, headers, _ in found] == [None] * 5 + ["close"]
    np.testing.assert_allclose(vectors_of([found[0], *found[2:]]), fake_answers(models, texts), atol=1e-5)


UNFINISHED = (b"POST /emb", request("cut")[:-3], chunked(request("cut"))[:-3])


@pytest.mark.parametrize(("count", "behind"), [(1, b""), (12, b""), *[(12, unfinished) for unfinished in UNFINISHED]])
def test_a_client_that_has_said_all_is_answered(fake_server: Server, models: Path, count: int, behind: bytes) -> None:
    """As `nc -N` and `socat` end (RFC 9112, 9.6): every request that is whole is answered, then the connection ends."""
    texts = [f"text number {number}" for number in range(count)]
    found = exchange(fake_server, b"".join(map(request, texts)), behind, then_end=True)
    # The last reply says so, unless it is written before the end of sending is seen.
    assert found[-1][1].get("connection", "close") == "close"
    np.testing.assert_allclose(vectors_of(found), fake_answers(models, texts), atol=1e-5)


def test_a_client_that_ends_in_the_middle_is_let_go(fake_server: Server) -> None:
    """Before a request, in its head and in its body: the connection ends without a word, and nothing is counted."""
    before = metric(fake_server, "bertserve_requests_total", reason="malformed_request")
    for sent in (b"", b"GET /livez HT", *UNFINISHED[1:]):
        assert exchange(fake_server, sent, then_end=True) == []
    assert metric(fake_server, "bertserve_requests_total", reason="malformed_request") == before
    assert [status for status, _, _ in exchange(fake_server, b"GET /\r\n\r\n", then_end=True)] == [400]


def test_a_client_that_has_left_is_told_from_one_that_has_said_all(serve: Callable[..., Server]) -> None:
    """Both send the same; one reads an interim reply and its answer, nothing computes for the other."""
    server = serve(*FAKE, "--threads", "1", "--max-batch-tokens", "16")
    with contextlib.ExitStack() as stack:
        waiting, leaving, ancient = (stack.enter_context(RawConnection(server.http)) for _ in range(3))
        with stopped_engine(server):
            waiting.send(request("waiting"))
            waiting.end()
            wait_for(lambda: metric(server, "bertserve_admitted_tokens") > 0, "its text")
            leaving.send(request("leaving"))
            ancient.send(old())
            ancient.end()
            wait_for(lambda: metric(server, "bertserve_queue_texts") == 2, "those behind it")
            leaving.socket.close()
            wait_for(lambda: metric(server, "bertserve_requests_total", reason="client_gone") == 1, "its end")
            assert metric(server, "bertserve_queue_texts") == 1
        *interim, (status, _, _) = replies(waiting.read_to_end())
        assert status == 200
        assert {said[0] for said in interim} <= {100}
        assert [status for status, _, _ in replies(ancient.read_to_end())] == [200], "HTTP/1.0 knows no interim replies"


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


def test_head_has_the_headers_and_no_body(fake_server: Server) -> None:
    """As `GET` would answer, without the content."""
    with RawConnection(fake_server.http) as connection:
        connection.send(b"HEAD /livez HTTP/1.1\r\nHost: test\r\n" + CLOSE + b"\r\n")
        assert re.fullmatch(rb"HTTP/1\.1 200 OK\r\n.*content-length: .*\r\n\r\n", connection.read_to_end(), re.DOTALL)


def test_a_head_that_begins_behind_a_request_has_its_own_time(serve: Callable[..., Server]) -> None:
    """It is not timed from the connection's beginning, nor from that of the request before."""
    second = request("second", last=True)
    with RawConnection(serve(*FAKE).http) as connection:
        time.sleep(4)
        connection.send(request("first") + second[:30])
        time.sleep(2)
        connection.send(second[30:])
        assert [status for status, _, _ in replies(connection.read_to_end())] == [200, 200]


def test_a_long_pipeline_is_answered_whole(serve: Callable[..., Server]) -> None:
    """While the server does not read, no time runs out for what it has not read: 700 requests, each in its turn."""
    count = 700
    server = serve(*FAKE, "--fake-ms", "10")
    found = exchange(server, b"".join(request(f"text {number}", last=number == count - 1) for number in range(count)))
    assert [status for status, _, _ in found] == [200] * count
