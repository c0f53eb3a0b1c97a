"""Rows 1 to 9 of the failure modes: what the ports do with requests that are too large, too slow or no requests."""

from __future__ import annotations

import gzip
import json
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
    from collections.abc import Iterator

    from tests.support.server import Server

HEADER_LIMIT = 16_384
HEADER_COUNT = 100
BODY_LIMIT = 4 << 20
SMALL = b'{"inputs": "small"}'
HEAD = b"POST /embed HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
GENEROUS_S = 8.0
"""The impatient server waits 1 s for headers and 1.5 s for bodies; a busy machine may take a little longer."""


@pytest.mark.parametrize(
    "data",
    [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"\x00" * 64, b"hello, is anyone there?\r\n\r\n"],
    ids=["tls", "zeros", "prose"],
)
def test_row_01_garbage_is_answered_400_and_closed(fake_server: Server, data: bytes) -> None:
    """Bytes that are no HTTP request get 400 and the end of the connection."""
    with RawConnection(fake_server.http) as connection:
        connection.send(data)
        assert connection.status() == 400


def test_row_01_garbage_on_the_grpc_port_is_closed(fake_server: Server) -> None:
    """Bytes that are no HTTP/2 end the connection to the gRPC port."""
    with RawConnection(fake_server.grpc) as connection:
        connection.send(b"GET / HTTP/1.1\r\nHost: test\r\n\r\n" * 4)
        connection.read_to_end()


def test_row_02_unknown_path(fake_server: Server) -> None:
    """An unknown path is 404 with the server's own error body."""
    reply = get(fake_server.http, "/no/such/path")
    assert reply.status == 404
    assert reply.json()["error"]["reason"] == "not_found"
    assert reply.json()["error"]["request_id"] == reply.headers["x-request-id"]


@pytest.mark.parametrize("path", ["/embed", "/v1/embeddings", "/v2/models/minilm/infer"])
def test_row_02_unknown_method(fake_server: Server, path: str) -> None:
    """A known path with another method is 405, in the shape of its protocol."""
    reply = get(fake_server.http, path)
    assert reply.status == 405
    assert "error" in reply.json()


def test_row_02_unknown_method_names_the_allowed_one(fake_server: Server) -> None:
    """A 405 carries `Allow`, as RFC 9110 demands."""
    assert "POST" in get(fake_server.http, "/embed").headers.get("allow", "")


def test_row_02_unknown_grpc_method(fake_server: Server) -> None:
    """An unknown gRPC method is UNIMPLEMENTED."""
    with pytest.raises(Refused) as refused:
        grpc_raw(fake_server.grpc, "/inference.GRPCInferenceService/NoSuchCall", b"")
    assert refused.value.status == "UNIMPLEMENTED"


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


def test_row_04_headers_below_the_limit(fake_server: Server) -> None:
    """15 KiB of headers are read."""
    assert post_json(fake_server.http, "/embed", SMALL, {"X-Padding": "x" * 15_000}).status == 200


def test_row_04_headers_too_large(fake_server: Server) -> None:
    """More than 16 KiB of complete headers are refused with 431 and counted."""
    before = metric(fake_server, "bertserve_requests_total", reason="headers_too_large")
    reply = post_json(fake_server.http, "/embed", SMALL, {"X-Padding": "x" * HEADER_LIMIT})
    assert reply.status == 431
    assert reply.headers["connection"] == "close"
    assert metric(fake_server, "bertserve_requests_total", reason="headers_too_large") == before + 1


def test_row_04_headers_that_never_end(fake_server: Server) -> None:
    """A header that grows without end is cut off with 431, not collected."""
    with RawConnection(fake_server.http) as connection:
        connection.send(HEAD + b"X-Padding: " + b"x" * (HEADER_LIMIT + 1))
        assert connection.status() == 431


def test_row_04_request_line_too_large(fake_server: Server) -> None:
    """The request line counts as well."""
    with RawConnection(fake_server.http) as connection:
        connection.send(b"GET /" + b"x" * (HEADER_LIMIT + 1) + b" HTTP/1.1\r\nHost: test\r\n\r\n")
        assert connection.status() == 431


def test_row_04_second_request_of_a_connection(fake_server: Server) -> None:
    """The limit holds for every request of a keep-alive connection, not only for the first."""
    small = HEAD + b"Content-Length: %d\r\n\r\n" % len(SMALL) + SMALL
    with RawConnection(fake_server.http) as connection:
        connection.send(small)
        assert connection.socket.recv(65_536).startswith(b"HTTP/1.1 200")
        connection.send(HEAD + b"X-Padding: " + b"x" * (HEADER_LIMIT + 1))
        reply = connection.read_to_end()
    assert b"HTTP/1.1 431" in reply


@pytest.mark.parametrize(("count", "status"), [(HEADER_COUNT, 200), (HEADER_COUNT + 1, 431)])
def test_row_04_header_count(fake_server: Server, count: int, status: int) -> None:
    """100 header lines are read, 101 refused."""
    padding = b"".join(b"X-%d: y\r\n" % number for number in range(count - 4))
    with RawConnection(fake_server.http) as connection:
        ending = b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(SMALL)
        connection.send(HEAD + padding + ending + SMALL)
        assert connection.status() == status


def test_row_04_trailers_too_large(fake_server: Server) -> None:
    """Header lines behind a chunked body are bounded like those before it."""
    with RawConnection(fake_server.http) as connection:
        connection.send(HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n")
        connection.send(b"%x\r\n%s\r\n0\r\nX-Trailer: " % (len(SMALL), SMALL))
        connection.send(b"x" * (1 << 20) + b"\r\n\r\n")
        assert connection.status() in {413, 431}


def test_row_04_grpc_metadata_too_large(fake_server: Server) -> None:
    """More than 16 KiB of metadata are RESOURCE_EXHAUSTED."""
    with pytest.raises(Refused) as refused:
        grpc_raw(fake_server.grpc, MODEL_INFER, b"", headers=[("padding", "x" * 20_000)])
    assert refused.value.status == "RESOURCE_EXHAUSTED"


def padded(size: int) -> bytes:
    """A good JSON body of exactly so many bytes."""
    return SMALL + b" " * (size - len(SMALL))


@pytest.mark.parametrize(("size", "status"), [(BODY_LIMIT - 1, 200), (BODY_LIMIT, 200), (BODY_LIMIT + 1, 413)])
def test_row_05_body_declared(fake_server: Server, size: int, status: int) -> None:
    """A declared body is read up to exactly 4 MiB."""
    assert post_json(fake_server.http, "/embed", padded(size)).status == status


def test_row_05_body_declared_is_refused_before_it_is_sent(fake_server: Server) -> None:
    """A Content-Length above the limit is answered from the headers alone."""
    with RawConnection(fake_server.http) as connection:
        connection.send(HEAD + b"Content-Length: %d\r\n\r\n" % (BODY_LIMIT + 1))
        assert connection.status() == 413


def chunked(body: bytes) -> Iterator[bytes]:
    """A body in chunks of 64 KiB."""
    for at in range(0, len(body), 65_536):
        chunk = body[at : at + 65_536]
        yield b"%x\r\n%s\r\n" % (len(chunk), chunk)
    yield b"0\r\n\r\n"


@pytest.mark.parametrize(("size", "status"), [(BODY_LIMIT - 1, 200), (BODY_LIMIT, 200), (BODY_LIMIT + 1, 413)])
def test_row_05_body_streamed(fake_server: Server, size: int, status: int) -> None:
    """A chunked body is read up to exactly 4 MiB."""
    with RawConnection(fake_server.http) as connection:
        connection.send(HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n")
        for part in chunked(padded(size)):
            connection.send(part)
        assert connection.status() == status


@pytest.mark.parametrize("path", ["/embed", "/v1/embeddings", "/v2/models/minilm/infer"])
def test_row_05_error_body_of_the_protocol(fake_server: Server, path: str) -> None:
    """A refusal made before the application runs still has the shape of the path's protocol and says why."""
    reply = post_json(fake_server.http, path, padded(BODY_LIMIT + 1))
    assert reply.status == 413
    assert str(BODY_LIMIT) in json.dumps(reply.json()["error"])
    assert "x-request-id" in reply.headers


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


def in_chunks(count: int, size: int) -> bytes:
    """A good chunked request of so many chunks of a size, in a connection that ends with it."""
    body = padded(count * size)
    chunks = [b"%x\r\n%s\r\n" % (size, body[at : at + size]) for at in range(0, len(body), size)]
    return b"".join([HEAD, b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n", *chunks, b"0\r\n\r\n"])


def test_row_06_small_chunks(fake_server: Server) -> None:
    """A body in a few thousand small chunks is read."""
    with RawConnection(fake_server.http) as connection:
        connection.send(in_chunks(5_000, 100))
        assert connection.status() == 200


def test_row_06_a_million_chunks(fake_server: Server) -> None:
    """A body that is little more than the frames of its chunks is refused long before its end."""
    with RawConnection(fake_server.http) as connection:
        connection.send(in_chunks(1_000_000, 1))
        assert connection.status() in {400, 413}


def test_row_07_compressed_body(fake_server: Server) -> None:
    """A small body is read; a bomb of 4 KB is refused once it exceeds the limit, and so is an unknown encoding."""
    bomb = gzip.compress(b" " * (BODY_LIMIT + 1))
    for body, encoding, status in ((gzip.compress(SMALL), "gzip", 200), (bomb, "gzip", 413), (SMALL, "br", 415)):
        assert post_json(fake_server.http, "/embed", body, {"Content-Encoding": encoding}).status == status


def test_row_08_slow_header(impatient_server: Server) -> None:
    """Half a header and then silence is 408."""
    started = time.monotonic()
    with RawConnection(impatient_server.http) as connection:
        connection.send(HEAD + b"X-Half: ")
        assert connection.status() == 408
    assert elapsed(started) < GENEROUS_S


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


def test_row_08_slow_header_of_a_second_request(impatient_server: Server) -> None:
    """The clock runs for every request of a connection."""
    with RawConnection(impatient_server.http) as connection:
        connection.send(HEAD + b"Content-Length: %d\r\n\r\n" % len(SMALL) + SMALL)
        assert connection.socket.recv(65_536).startswith(b"HTTP/1.1 200")
        connection.send(HEAD)
        assert b"HTTP/1.1 408" in connection.read_to_end()


def test_row_08_slow_body(impatient_server: Server) -> None:
    """Half a body and then silence is 408."""
    started = time.monotonic()
    with RawConnection(impatient_server.http) as connection:
        connection.send(HEAD + b"Content-Length: 100\r\n\r\n" + SMALL)
        assert connection.status() == 408
    assert elapsed(started) < GENEROUS_S


def test_row_08_slow_chunked_body(impatient_server: Server) -> None:
    """The same of a chunked body that does not end."""
    with RawConnection(impatient_server.http) as connection:
        connection.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (len(SMALL), SMALL))
        assert connection.status() == 408


def test_row_08_silent_connection(impatient_server: Server) -> None:
    """A connection on which nothing is ever said is closed."""
    with RawConnection(impatient_server.http, timeout_s=GENEROUS_S) as connection:
        assert connection.read_to_end() == b""


def test_row_08_empty_lines_only(impatient_server: Server) -> None:
    """A connection on which only empty lines come is closed: they are no progress."""
    with RawConnection(impatient_server.http, timeout_s=GENEROUS_S) as connection:
        connection.send(b"\r\n")
        connection.read_to_end()


def test_row_08_idle_connection(impatient_server: Server) -> None:
    """A connection that has had its answer is closed once it has been idle for `keep_alive_s`."""
    with RawConnection(impatient_server.http, timeout_s=GENEROUS_S) as connection:
        connection.send(HEAD + b"Content-Length: %d\r\n\r\n" % len(SMALL) + SMALL)
        assert connection.read_to_end().count(b"HTTP/1.1 200") == 1


def test_row_08_empty_line_after_an_answer(impatient_server: Server) -> None:
    """An empty line after an answer does not keep the connection open for ever."""
    with RawConnection(impatient_server.http, timeout_s=GENEROUS_S) as connection:
        connection.send(HEAD + b"Content-Length: %d\r\n\r\n" % len(SMALL) + SMALL)
        assert connection.socket.recv(65_536).startswith(b"HTTP/1.1 200")
        connection.send(b"\r\n")
        connection.read_to_end()


@pytest.mark.parametrize(
    "framing",
    [
        b"Content-Length: 19\r\nTransfer-Encoding: chunked\r\n",
        b"Content-Length: -1\r\n",
        b"Content-Length: 1e3\r\n",
        b"Content-Length: 19\r\nContent-Length: 20\r\n",
        b"Content-Length: 99999999999999999999999999\r\n",
    ],
    ids=["both", "negative", "exponent", "twice", "huge"],
)
def test_row_09_ambiguous_framing(fake_server: Server, framing: bytes) -> None:
    """A body whose length is contradictory or no number is 400 and the connection ends."""
    with RawConnection(fake_server.http) as connection:
        connection.send(HEAD + framing + b"\r\n" + SMALL)
        assert connection.status() in {400, 413}


def test_pipelined_requests_are_answered_in_order(fake_server: Server) -> None:
    """Requests that come in one piece are answered one by one, in their order."""
    bodies = [json.dumps({"inputs": " ".join(["word"] * count)}).encode() for count in (1, 2, 3, 4, 5)]
    with RawConnection(fake_server.http) as connection:
        requests = [HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body) for body in bodies]
        connection.send(b"".join(requests) + b"GET /livez HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n")
        replies = connection.read_to_end()
    tokens = [line.split(b": ")[1] for line in replies.split(b"\r\n") if line.startswith(b"x-compute-tokens")]
    assert tokens == [b"3", b"4", b"5", b"6", b"7"]
