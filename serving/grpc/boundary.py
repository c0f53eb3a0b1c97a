"""gRPC's boundary: requests arrive as bytes and are parsed here, and only listed errors leave."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from serving.errors import (
    BertserveError,
    ClientGone,
    DeadlineExceeded,
    InternalError,
    InvalidCompression,
    InvalidRequest,
    MalformedRequest,
    UnsupportedMediaType,
)
from serving.grpc.fields import has_more_fields
from serving.logs import fields
from serving.net.requests import COMPRESSIONS, inflate
from serving.records import RequestTrace

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from serving.grpc.calls import Call
    from serving.net.observer import RequestObserver

_UNCHECKED_BYTES = 16_384
"""A message of this size is parsed in a millisecond, whatever is in it."""

_MOST_FIELDS = 4096
"""Of a message beside its inputs; numbers are packed, many into one field."""

log = logging.getLogger("bertserve.grpc")


async def answer(call: Call, messages: list[tuple[bytes, int]]) -> bytes | BertserveError:
    """Runs a call's method on a message, or on all of a call together; each with whether it is compressed.

    A call of one reply is ended here, and the result is empty: its task, which is kept, would hold the reply. Of one
    message of several, the result is the reply, or the error with which the call ends.
    """
    method, observer = call.head.method, call.environment.observer
    trace = None if observer is None else _begin_trace(call, sum([len(data) for data, _ in messages]))
    request: Message | None = None
    failure: BertserveError | None = None
    reply, request_id = b"", ""
    try:
        requests = [
            _parse(call, await _inflate(call, data) if compressed else data, trace) for data, compressed in messages
        ]
        messages.clear()  # not kept twice while the request waits
        request = requests[0] if requests else None
        if method.gathered is not None:
            reply = (await method.gathered(requests, call)).SerializeToString()
            call.finish(reply)
        elif method.unary is not None:
            reply = (await method.unary(request, call)).SerializeToString()
            call.finish(reply)
        elif method.duplex is not None:
            reply = (await method.duplex(request, call, trace)).SerializeToString()
        elif method.streaming is not None:
            await call.reply_all(method.streaming(request, call))
    except BertserveError as error:
        failure = error.bare()
        request_id = _request_id(call, request)
    except asyncio.CancelledError:
        failure = ClientGone("the client cancelled the call")
        raise
    except Exception:  # the gRPC boundary
        request_id = _request_id(call, request)
        log.exception("a call failed", extra=fields(request_id=request_id))
        failure = InternalError()
    finally:
        if observer is not None and trace is not None:
            trace.bytes_out = len(reply)
            _end_trace(observer, trace, failure)
    if failure is not None and method.duplex is None:
        call.refuse(failure, request_id)
    return failure or (b"" if method.duplex is None else reply)


def _begin_trace(call: Call, size: int) -> RequestTrace:
    route = call.head.metadata[b":path"].decode("latin-1")  # a method's own: other paths are refused before
    trace = RequestTrace(
        *("grpc", "POST", route, call.request_id(), time.perf_counter(), size),
        traceparent=call.metadata(b"traceparent"),
        tracestate=call.metadata(b"tracestate"),
    )
    trace.status = "OK"
    if call.head.method.duplex is None:
        call.trace = trace
    return trace


def _end_trace(observer: RequestObserver, trace: RequestTrace, failure: BertserveError | None) -> None:
    if failure is not None:
        trace.failed(failure.reason, failure.http_status, failure.grpc_code)
    observer.end(trace)  # whose readers come after this turn of the loop, and so after the refusal


async def _inflate(call: Call, data: bytes) -> bytes:
    """A compressed message as it was.

    Raises:
        BuffersFull: There is no room for it.
        InvalidCompression: The call names no compression, or the message is not compressed so.
    """
    encoding = call.metadata(b"grpc-encoding") or b"identity"
    if encoding == b"identity":
        raise InvalidCompression("the compressed flag of the message is set, but grpc-encoding names no compression")
    if encoding not in COMPRESSIONS:
        raise UnsupportedMediaType("messages are read as they are, or compressed with gzip or deflate")
    wbits, limit = COMPRESSIONS[encoding], call.head.body_limit
    try:
        return await inflate(call.environment.inflating, call.grow, data, wbits, limit)
    except MalformedRequest as error:
        raise InvalidCompression(error.bare().message) from None


def _parse(call: Call, data: bytes, trace: RequestTrace | None) -> Message:
    """The message; its own id, if it has one, names it in its trace."""
    if call.deadline is not None and call.deadline <= call.connection.loop.time():
        raise DeadlineExceeded("the call's deadline had passed before its message was read")
    kind = call.head.method.kind
    if len(data) > _UNCHECKED_BYTES:
        _check_fields(call, data)
    request = kind()
    try:
        request.ParseFromString(data)
    except (DecodeError, UnicodeDecodeError):
        raise MalformedRequest(f"the message is not a {kind.__name__}") from None
    if trace is not None and (message_id := getattr(request, "id", "")):
        trace.request_id = call.request_id(message_id)
    return request


def _check_fields(call: Call, data: bytes) -> None:
    most = _MOST_FIELDS + call.environment.settings.max_v2_batch_size
    if has_more_fields(data, call.head.method.kind, most):
        raise InvalidRequest(f"the message has more than {most} fields; numbers are packed or sent as raw contents")


def _request_id(call: Call, request: Message | None) -> str:
    return call.request_id(getattr(request, "id", ""))
