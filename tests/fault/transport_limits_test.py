"""Rows 1 to 9 of the failure modes: what the ports do with requests that are too large, too slow or no requests."""

from __future__ import annotations

import contextlib
import json
import re
import time
from typing import TYPE_CHECKING

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
from tests.support.server import elapsed

if TYPE_CHECKING:
    from tests.support.server import Server

HEADER_LIMIT = 16_384
HEADER_COUNT = 100
BODY_LIMIT = 4 << 20
SMALL = b'{"inputs": "small"}'
HEAD = b"POST /embed HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
LAST = HEAD + b"Connection: close\r\n"
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


def test_row_04_headers_at_the_limit(fake_server: Server) -> None:
    """15 KiB of complete headers are read; more than 16 KiB are refused with 431 and counted."""
    assert post_json(fake_server.http, "/embed", SMALL, {"X-Padding": "x" * 15_000}).status == 200
    before = metric(fake_server, "bertserve_requests_total", reason="headers_too_large")
    reply = post_json(fake_server.http, "/embed", SMALL, {"X-Padding": "x" * HEADER_LIMIT})
    assert (reply.status, reply.headers["connection"]) == (431, "close")
    assert metric(fake_server, "bertserve_requests_total", reason="headers_too_large") == before + 1


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
