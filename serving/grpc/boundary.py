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

    from serving.grpc.calls import Call
    from serving.net.observer import RequestObserver
    from serving.records import RequestTrace

log = logging.getLogger("bertserve.grpc")

_INTERNAL = "internal error; the server's log has the details under this request id"


async def answer(call: Call, data: bytes, compressed: int) -> None:
    """Runs a call's method on its message and ends the call, well or with an error."""
    method, observer = call.head.method, call.environment.observer
    request: Message | None = None
    if observer is not None:
        call.trace = _begin_trace(call, data, observer)
    try:
        if compressed:
            data = await _inflate(call, data)
        request = _parse(call, data, call.trace)
        if method.unary is not None:
            reply = (await method.unary(request, call)).SerializeToString()
            call.finish(reply)
            if call.trace is not None:
                call.trace.bytes_out = len(reply)
        elif method.streaming is not None:
            async for message in method.streaming(request, call):
                await call.reply_one(message.SerializeToString())
            call.finish()
    except BertserveError as error:
        call.refuse(error, _request_id(call, request))
    except Exception:  # the gRPC boundary
        request_id = _request_id(call, request)
        log.exception("a call failed", extra=fields(request_id=request_id))
        call.refuse(InternalError(_INTERNAL), request_id)
    finally:
        if observer is not None and call.trace is not None:
            observer.end(call.trace)


async def answer_one(call: Call, data: bytes, compressed: int) -> bytes | BertserveError:
    """Runs a call's method on one message of several; the reply, or the error with which the call ends."""
    method, observer = call.head.method, call.environment.observer
    trace = None if observer is None else _begin_trace(call, data, observer)
    error: BertserveError | None = None
    reply = b""
    try:
        if compressed:
            data = await _inflate(call, data)
        request = _parse(call, data, trace)
        if method.duplex is not None:
            reply = (await method.duplex(request, call, trace)).SerializeToString()
    except BertserveError as refusal:
        error = refusal
    except asyncio.CancelledError:
        error = ClientGone("the client cancelled the call")
        raise
    except Exception:  # the gRPC boundary
        log.exception("a call failed", extra=fields(request_id=call.request_id()))
        error = InternalError(_INTERNAL)
    finally:
        if observer is not None and trace is not None:
            trace.bytes_out = len(reply)
            if error is not None:
                trace.failed(error.reason, error.http_status, error.grpc_code)
            observer.end(trace)
    return reply if error is None else error


def _begin_trace(call: Call, data: bytes, observer: RequestObserver) -> RequestTrace:
    route = call.head.metadata[b":path"].decode("latin-1")  # a method's own: other paths are refused before
    trace = observer.begin(
        *("grpc", "POST", route, call.request_id(), time.perf_counter(), len(data)),
        traceparent=call.metadata(b"traceparent"),
        tracestate=call.metadata(b"tracestate"),
    )
    trace.status = "OK"
    return trace


async def _inflate(call: Call, data: bytes) -> bytes:
    """A compressed message as it was.

    Raises:
        UnsupportedMediaType: The call's encoding is neither gzip nor deflate.
        MalformedRequest: The message is not of this encoding.
        BodyTooLarge: It grows beyond the call's limit.
    """
    encoding = call.metadata(b"grpc-encoding") or b"identity"
    if encoding not in COMPRESSIONS:
        raise UnsupportedMediaType("messages are read as they are, or compressed with gzip or deflate")
    return await asyncio.to_thread(inflated, data, COMPRESSIONS[encoding], call.head.body_limit)


def _parse(call: Call, data: bytes, trace: RequestTrace | None) -> Message:
    """The message; its own id, if it has one, names it in its trace."""
    kind = call.head.method.kind
    request = kind()
    try:
        request.ParseFromString(data)
    except (DecodeError, UnicodeDecodeError):
        raise MalformedRequest(f"the message is not a {kind.__name__}") from None
    if trace is not None and (message_id := getattr(request, "id", "")):
        trace.request_id = call.request_id(message_id)
    return request


def _request_id(call: Call, request: Message | None) -> str:
    return call.request_id(getattr(request, "id", ""))
