"""gRPC's boundary: requests arrive as bytes and are parsed here, and only listed errors leave."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from serving.errors import BertserveError, ClientGone, InternalError, MalformedRequest, UnsupportedMediaType
from serving.logs import fields
from serving.net.requests import COMPRESSIONS, inflated

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from serving.grpc.calls import Call, Method
    from serving.net.observer import RequestObserver
    from serving.records import RequestTrace

log = logging.getLogger("bertserve.grpc")

_BARE = "internal error; the server's log has the details under this request id"


async def answer(
    method: Method, data: bytes, call: Call, encoding: bytes = b"", observer: RequestObserver | None = None
) -> None:
    """Runs a method on a message and ends its call, well or with an error.

    Args:
        method: The method.
        data: The message.
        call: Its call.
        encoding: What the message is compressed with; empty for nothing.
        observer: Traces the request.
    """
    request: Message | None = None
    if observer is not None:
        call.trace = _trace_of(call, data, observer)
    try:
        if encoding:
            data = await inflate(data, encoding, call.body_limit)
        request = _parse(method.kind, data)
        _name(call.trace, call, request)
        if method.unary is not None:
            reply = (await method.unary(request, call)).SerializeToString()
            call.finish(reply)
            if call.trace is not None:
                call.trace.bytes_out = len(reply)
        elif method.streaming is not None:
            async for message in method.streaming(request, call):
                await call.send(message.SerializeToString())
            call.finish()
    except BertserveError as error:
        call.refuse(error, _identity(call, request))
    except Exception:  # the gRPC boundary
        identity = _identity(call, request)
        log.exception("a call failed", extra=fields(request_id=identity))
        call.refuse(InternalError(_BARE), identity)
    finally:
        if observer is not None and call.trace is not None:
            observer.end(call.trace)


async def answer_one(
    method: Method, data: bytes, call: Call, encoding: bytes, observer: RequestObserver | None = None
) -> bytes | BertserveError:
    """Runs a method on one message of several; the reply, or the error with which the call ends."""
    trace = None if observer is None else _trace_of(call, data, observer)
    error: BertserveError | None = None
    reply = b""
    try:
        if encoding:
            data = await inflate(data, encoding, call.body_limit)
        request = _parse(method.kind, data)
        _name(trace, call, request)
        if method.duplex is not None:
            reply = (await method.duplex(request, call, trace)).SerializeToString()
    except BertserveError as refusal:
        error = refusal
    except asyncio.CancelledError:
        error = ClientGone("the client cancelled the call")
        raise
    except Exception:  # the gRPC boundary
        log.exception("a call failed", extra=fields(request_id=call.identity()))
        error = InternalError(_BARE)
    finally:
        if observer is not None and trace is not None:
            trace.bytes_out = len(reply)
            if error is not None:
                trace.failed(error.reason, error.http_status, error.grpc_code)
            observer.end(trace)
    return reply if error is None else error


def _trace_of(call: Call, data: bytes, observer: RequestObserver) -> RequestTrace:
    route = (call.metadata(b":path") or b"?").decode("latin-1")  # a method's own: others are refused before
    trace = observer.begin(
        *("grpc", "POST", route, call.identity(), time.perf_counter(), len(data)),
        traceparent=call.metadata(b"traceparent"),
        tracestate=call.metadata(b"tracestate"),
    )
    trace.status = "OK"
    return trace


def _name(trace: RequestTrace | None, call: Call, request: Message) -> None:
    """Names a request in its trace as its message does, where the message says so."""
    if trace is not None and (given := getattr(request, "id", "")):
        trace.request_id = call.identity(given)


async def inflate(data: bytes, encoding: bytes, limit: int) -> bytes:
    """A compressed message as it was.

    Args:
        data: The message.
        encoding: As `grpc-encoding` names it.
        limit: Bytes that it may grow to.

    Raises:
        UnsupportedMediaType: Another encoding than gzip and deflate.
        MalformedRequest: It is not of this encoding.
        BodyTooLarge: It grows beyond the limit.
    """
    if encoding not in COMPRESSIONS:
        raise UnsupportedMediaType("messages are read as they are, or compressed with gzip or deflate")
    return await asyncio.to_thread(inflated, data, COMPRESSIONS[encoding], limit)


def _identity(call: Call, request: Message | None) -> str:
    """What a request is called, by its message if it has been read and has an id."""
    return call.identity(getattr(request, "id", ""))


def _parse(kind: type[Message], data: bytes) -> Message:
    request = kind()
    try:
        request.ParseFromString(data)
    except (DecodeError, UnicodeDecodeError):
        raise MalformedRequest(f"the message is not a {kind.__name__}") from None
    return request
