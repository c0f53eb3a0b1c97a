"""The statuses of gRPC for compression and framing, by gRPC's own documents, and beside grpcio's own server.

compression.md, statuscodes.md and PROTOCOL-HTTP2.md in `grpc/grpc:doc`. Where grpcio's server answers otherwise the row
says what, and why it is not followed.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from concurrent import futures
from typing import TYPE_CHECKING, NamedTuple

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import HealthServicer
from h2.errors import ErrorCodes

from bertserve.loadtest.generator.frames import DATA, END_HEADERS, END_STREAM, HEADERS, frame
from tests.support.http2 import RawHttp2, request_fields

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.server import Server

CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
SERVICE = "inference.GRPCInferenceService"
STREAM = f"/{SERVICE}/ModelStreamInfer"
OK, INVALID_ARGUMENT, DEADLINE_EXCEEDED, NOT_FOUND, RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL = 0, 3, 4, 5, 8, 12, 13
BODY_LIMIT = 4 << 20
RESET = -1
"""In place of a status: the stream is reset with PROTOCOL_ERROR, as a request that HTTP/2 calls malformed."""


def message(flag: int = 0, content: bytes = b"", size: int | None = None) -> bytes:
    """A message as gRPC frames it, right or wrong."""
    return struct.pack(">BI", flag, len(content) if size is None else size) + content


class Row(NamedTuple):
    """A call of the health service's `Check`, unless it says another.

    Attributes:
        status: Of gRPC.
        fields: What differs from a plain call's, `path` and `method` among it; None leaves a field out.
        data: All of its DATA.
        words: In the message of its status.
        http: Status of HTTP.
        grpcio: What grpcio's server does otherwise; None where its status is the same.
    """

    status: int
    fields: dict[str, str | None]
    data: bytes = message()
    words: str = ""
    http: int = 200
    grpcio: str | None = None


def asked(service: str) -> bytes:
    return health_pb2.HealthCheckRequest(service=service).SerializeToString()


PLAIN = b"\x0a\x00"
GZIP, DEFLATE = gzip.compress(PLAIN), zlib.compress(PLAIN)
AT_HEADERS = "reads the field before any message, and takes no other value: INTERNAL"
LENIENT = "takes it"
NO_FLAG = "looks at the lowest bit of the flag, and passes on what is not compressed: OK"
HALF = "has read no message when the call ends: UNIMPLEMENTED"

ROWS: dict[str, Row] = {
    "plain": Row(OK, {}),
    "a service": Row(OK, {}, message(0, asked(SERVICE))),
    "unknown service": Row(NOT_FOUND, {}, message(0, asked("nobody")), "unknown service"),
    # compression.md
    "gzip": Row(OK, {"grpc_encoding": "gzip"}, message(1, GZIP)),
    "deflate": Row(OK, {"grpc_encoding": "deflate"}, message(1, DEFLATE)),
    "gzip, not used": Row(OK, {"grpc_encoding": "gzip"}),
    "flag without encoding": Row(INTERNAL, {}, message(1, GZIP), "compressed flag"),
    "flag without encoding, empty": Row(INTERNAL, {}, message(1), "compressed flag", grpcio=NO_FLAG),
    "flag with identity": Row(INTERNAL, {"grpc_encoding": "identity"}, message(1), "compressed flag", grpcio=NO_FLAG),
    "unknown encoding": Row(
        UNIMPLEMENTED, {"grpc_encoding": "br"}, message(1, GZIP), "gzip or deflate", grpcio=AT_HEADERS
    ),
    "two encodings": Row(UNIMPLEMENTED, {"grpc_encoding": "gzip,deflate"}, message(1, GZIP), grpcio=AT_HEADERS),
    "encoding in capitals": Row(UNIMPLEMENTED, {"grpc_encoding": "GZIP"}, message(1, GZIP), grpcio=AT_HEADERS),
    "unknown encoding, not used": Row(OK, {"grpc_encoding": "br"}, grpcio=AT_HEADERS),
    "flag 2": Row(INTERNAL, {}, message(2), "must be 0 or 1", grpcio=NO_FLAG),
    "flag 2 with gzip": Row(INTERNAL, {"grpc_encoding": "gzip"}, message(2, GZIP), "must be 0 or 1", grpcio=NO_FLAG),
    "flag 255": Row(INTERNAL, {}, message(255), "must be 0 or 1", grpcio=NO_FLAG),
    "no gzip": Row(INTERNAL, {"grpc_encoding": "gzip"}, message(1, b"no gzip at all"), "does not match its"),
    "gzip cut off": Row(INTERNAL, {"grpc_encoding": "gzip"}, message(1, GZIP[:-6]), "is truncated"),
    "gzip and more": Row(INTERNAL, {"grpc_encoding": "gzip"}, message(1, GZIP + b"tail")),
    "gzip for deflate": Row(INTERNAL, {"grpc_encoding": "deflate"}, message(1, GZIP)),
    "deflate without zlib's frame": Row(INTERNAL, {"grpc_encoding": "deflate"}, message(1, DEFLATE[2:-4])),
    # statuscodes.md
    "too large": Row(RESOURCE_EXHAUSTED, {}, message(size=BODY_LIMIT + 1), "4194304", grpcio=HALF),
    "far too large": Row(RESOURCE_EXHAUSTED, {}, message(size=2**32 - 1), "4194304", grpcio=HALF),
    "too large once decompressed": Row(
        RESOURCE_EXHAUSTED, {"grpc_encoding": "gzip"}, message(1, gzip.compress(bytes(BODY_LIMIT + 1))), "4194304"
    ),
    "no message": Row(UNIMPLEMENTED, {}, b"", "without a message"),
    "no message for a stream of replies": Row(UNIMPLEMENTED, {"path": WATCH}, b"", "without a message"),
    "half a prefix": Row(UNIMPLEMENTED, {}, b"\0\0", "inside its message"),
    "half a message": Row(UNIMPLEMENTED, {}, message(0, PLAIN, 4), "inside its message"),
    "two messages": Row(UNIMPLEMENTED, {}, message() * 2, "more than one", grpcio="answers the first: OK"),
    "a message and a half": Row(UNIMPLEMENTED, {}, message() + b"\0", "more than one", grpcio="answers the first: OK"),
    "no protobuf": Row(
        INVALID_ARGUMENT, {}, message(0, b"\xff\xff"), "HealthCheckRequest", grpcio="blames itself: INTERNAL"
    ),
    "half a message of a stream": Row(INVALID_ARGUMENT, {"path": STREAM}, b"\0\0", "its message", grpcio="lacks it"),
    "no message of a stream": Row(OK, {"path": STREAM}, b"", grpcio="lacks it"),
    "no method": Row(UNIMPLEMENTED, {"path": "/grpc.health.v1.Health/No"}, words="unknown method"),
    "no service": Row(UNIMPLEMENTED, {"path": "/no.Service/Check"}),
    "service without method": Row(UNIMPLEMENTED, {"path": "/grpc.health.v1.Health"}),
    "path without a slash": Row(UNIMPLEMENTED, {"path": CHECK[1:]}),
    "path with two slashes": Row(UNIMPLEMENTED, {"path": f"/{CHECK}"}),
    "path with a slash behind": Row(UNIMPLEMENTED, {"path": f"{CHECK}/"}),
    "path with a query": Row(UNIMPLEMENTED, {"path": f"{CHECK}?a=b"}),
    "path percent-encoded": Row(UNIMPLEMENTED, {"path": "/grpc.health.v1.Health/%43heck"}),
    "path in small letters": Row(UNIMPLEMENTED, {"path": CHECK.lower()}),
    "path of a star": Row(UNIMPLEMENTED, {"path": "*"}),
    "path with other letters": Row(UNIMPLEMENTED, {"path": "/grpc.health.v1.Health/ü"}),
    "empty path": Row(RESET, {"path": ""}, grpcio="CANCELLED"),
    # PROTOCOL-HTTP2.md
    "JSON": Row(UNIMPLEMENTED, {"content_type": "application/json"}, words="content-type", http=415, grpcio=LENIENT),
    "no content type": Row(UNIMPLEMENTED, {"content_type": None}, http=415, grpcio=LENIENT),
    "empty content type": Row(UNIMPLEMENTED, {"content_type": ""}, http=415, grpcio=LENIENT),
    "gRPC-Web": Row(UNIMPLEMENTED, {"content_type": "application/grpc-web"}, http=415, grpcio=LENIENT),
    "gRPC as JSON": Row(
        UNIMPLEMENTED, {"content_type": "application/grpc+json"}, words="message format", grpcio=LENIENT
    ),
    "gRPC as protobuf": Row(OK, {"content_type": "application/grpc+proto"}),
    "content type with a parameter": Row(OK, {"content_type": "application/grpc+proto; charset=utf-8"}),
    "content type in capitals": Row(OK, {"content_type": "Application/gRPC"}),
    "GET": Row(UNIMPLEMENTED, {"method": "GET"}, http=405, grpcio="resets the stream"),
    "PUT": Row(UNIMPLEMENTED, {"method": "PUT"}, http=405, grpcio="resets the stream"),
    "OPTIONS": Row(UNIMPLEMENTED, {"method": "OPTIONS"}, http=405, grpcio="INTERNAL"),
    "post": Row(UNIMPLEMENTED, {"method": "post"}, http=405, grpcio="INTERNAL"),
    "no te": Row(OK, {"te": None}, grpcio="resets the stream; proxies take the field away"),
    "te of another value": Row(RESET, {"te": "gzip"}, grpcio="INTERNAL; RFC 9113, 8.2.2, calls it malformed"),
    "another scheme": Row(OK, {"scheme": "https"}),
    "host for authority": Row(OK, {"authority": None, "host": "a"}),
    "timeout": Row(OK, {"grpc_timeout": "10S"}),
    "timeout of 10,000 years": Row(OK, {"grpc_timeout": "99999999H"}),
    "timeout of nothing": Row(DEADLINE_EXCEEDED, {"grpc_timeout": "0n"}, grpcio="may reply first: OK"),
    **{
        f"timeout {value!r}": Row(INVALID_ARGUMENT, {"grpc_timeout": value}, words="8 digits", grpcio=otherwise)
        for value, otherwise in {
            **dict.fromkeys(("", "1", "S", "-1S", "1.5S", "5s", "5SS"), "blames itself: INTERNAL"),
            **dict.fromkeys(("123456789S", "5 S"), LENIENT),
        }.items()
    },
}


@pytest.fixture(scope="module")
def grpcio() -> Iterator[str]:
    """`host:port` of grpcio's own server with its own health service."""
    health = HealthServicer()
    for service in ("", SERVICE):
        health.set(service, health_pb2.HealthCheckResponse.SERVING)
    server = grpc.server(futures.ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


def ask(address: str, row: Row, connection: RawHttp2 | None = None, stream: int = 1) -> tuple[int, int, dict[str, str]]:
    """Statuses of gRPC and of HTTP, 0 for a stream that is reset, and the fields of a reply."""
    if connection is None:
        with RawHttp2(address) as opened:
            return ask(address, row, opened)
    fields = request_fields(**{"path": CHECK, **row.fields})  # type: ignore[arg-type]
    frames = [frame(HEADERS, END_HEADERS, stream, connection.block(fields))]
    parts = [row.data[at : at + 16_384] for at in range(0, len(row.data), 16_384)] or [b""]
    frames += [frame(DATA, END_STREAM if part is parts[-1] else 0, stream, part) for part in parts]
    connection.send(b"".join(frames))
    reply = connection.reply(stream)
    if reply.reset == ErrorCodes.PROTOCOL_ERROR and not reply.fields:
        return RESET, 0, {}
    return reply.status, int(reply.fields.get(":status", 0)), reply.fields


def test_statuses(fake_server: Server) -> None:
    """Every row on one connection, which outlives them all; an error says what is wrong."""
    wrong = {}
    with RawHttp2(fake_server.grpc) as connection:
        for number, (name, row) in enumerate(ROWS.items()):
            status, http, fields = ask(fake_server.grpc, row, connection, 2 * number + 1)
            expected = (row.status, 0 if row.status == RESET else row.http)
            said = row.status in {OK, RESET} or row.words in fields.get("grpc-message", "") != ""
            named = (
                ("grpc-accept-encoding" in fields) or row.status != UNIMPLEMENTED or "grpc_encoding" not in row.fields
            )
            if (status, http) != expected or not said or not named or (http == 405) != ("allow" in fields):
                wrong[name] = (status, http, fields)
    assert not wrong


def test_statuses_beside_grpcio(grpcio: str) -> None:
    """Grpcio's server has the same status in each row that does not say otherwise."""
    rows = {name: row for name, row in ROWS.items() if row.grpcio is None}
    assert len(rows) > 30
    statuses = {name: ask(grpcio, row)[0] for name, row in rows.items()}
    assert statuses == {name: row.status for name, row in rows.items()}


def test_an_encoding_that_is_not_read_is_not_among_those_named(fake_server: Server) -> None:
    """`grpc-accept-encoding` lists what is read (compression.md), and lists as much as grpcio's server."""
    _, _, fields = ask(fake_server.grpc, ROWS["unknown encoding"])
    assert set(fields["grpc-accept-encoding"].split(",")) == {"identity", "deflate", "gzip"}
