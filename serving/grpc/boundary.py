"""The gRPC boundary: parses request messages, and lets only the project's own errors out.

The fields of a large message are counted before parsing: many small fields take up to forty times their size.
"""

from __future__ import annotations

import asyncio
import logging
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec
from google.protobuf.message import DecodeError

from bertserve.serving.errors import (
    BertserveError,
    ClientGone,
    DeadlineExceeded,
    InternalError,
    InvalidCompression,
    InvalidRequest,
    MalformedRequest,
    NotReady,
    UnsupportedMediaType,
)
from bertserve.serving.logs import fields
from bertserve.serving.net.requests import COMPRESSIONS, inflate
from bertserve.serving.unawaited import is_cancelled, run_guarded

if TYPE_CHECKING:
    from collections.abc import Mapping

    from google.protobuf.message import Message

    from bertserve.serving.grpc.calls import Call
    from bertserve.serving.inference.requests import RequestTrace

_VARINT, _FIXED64, _SIZED, _GROUP, _GROUP_END, _FIXED32 = range(6)
_LONGEST_VARINT_BITS = 70
_WIDTHS = {_FIXED64: 8, _GROUP: 0, _GROUP_END: 0, _FIXED32: 4}


def has_more_fields(data: bytes, kind: type[Message], most: int) -> bool:
    """Whether a message, with all nested ones, has more than `most` fields. Stops at bytes that are not protobuf."""
    left = most
    pending: list[tuple[int, int, Any]] = [(0, len(data), kind.DESCRIPTOR)]
    try:
        while pending:
            at, end, descriptor = pending.pop()
            messages = _messages(descriptor)
            while at < end:
                left -= 1
                if left < 0:
                    return True
                tag, at = _varint(data, at)
                encoding = tag & 7
                if encoding == _SIZED:
                    size, at = _varint(data, at)
                    if (inner := messages.get(tag >> 3)) is not None:
                        pending.append((at, min(at + size, end), inner))
                    at += size
                elif encoding == _VARINT:
                    _, at = _varint(data, at)
                else:
                    at += _WIDTHS[encoding]
    except (IndexError, KeyError):
        pass  # not protobuf: the parser stops here too
    return False


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The varint at an offset, and its end.

    Raises:
        IndexError: It is cut off, or has more than ten bytes.
    """
    value = data[at]
    at += 1
    if value < 0x80:  # noqa: PLR2004  as in nearly all fields
        return value, at
    value &= 0x7F
    shift = 7
    while (byte := data[at]) >= 0x80:  # noqa: PLR2004
        value |= (byte & 0x7F) << shift
        shift += 7
        at += 1
        if shift >= _LONGEST_VARINT_BITS:  # otherwise a number that fills the message would take minutes
            raise IndexError
    return value | byte << shift, at + 1


@cache
def _messages(descriptor: Any) -> Mapping[int, Any]:  # noqa: ANN401  protobuf has two implementations
    """The message-typed fields of a message type, by number."""
    return {field.number: field.message_type for field in descriptor.fields if field.message_type is not None}


_UNCHECKED_BYTES = 16_384
"""A message of up to this size is parsed within a millisecond, whatever it contains."""

_MAX_FIELDS = 4096
"""Maximum fields of a message besides its inputs. Numbers are packed, many into one field."""

log = logging.getLogger("bertserve.grpc")


class Answer(msgspec.Struct, frozen=True):
    """The outcome of one message of a stream: its reply, or the error that ends the call.

    Attributes:
        request_id: The id of the request if it is refused.
        trace: The message's trace, which ends when the reply is sent.
    """

    reply: bytes
    error: BertserveError | None
    request_id: str
    trace: RequestTrace


async def answer(call: Call, data: bytes, compressed: int, trace: RequestTrace) -> Answer | None:
    """Runs a call's method on a message with its compressed flag.

    A call with a single reply is completed here and returns None. Its task is kept and would keep a result alive.
    """
    method = call.head.method
    request: Message | None = None
    try:
        request = _parse(call, await _inflate(call, data) if compressed else data, trace)
        del data  # do not keep it twice while the request waits
        if method.duplex is not None:
            return Answer((await method.duplex(request, call, trace)).SerializeToString(), None, "", trace)
        if method.streaming is not None:
            await call.reply_all(method.streaming(request, call))
        elif method.unary is not None:
            call.finish((await method.unary(request, call)).SerializeToString())
    except BertserveError as error:
        failure = error.without_traceback()
    except asyncio.CancelledError:
        if is_cancelled():
            call.end_trace(trace, 0, ClientGone("the client canceled the call"))
            raise
        # The awaited work was cancelled, not this call.
        failure = NotReady("the server is shutting down", begun=True)
    except Exception:  # the gRPC boundary
        log.exception("a call failed", extra=fields(request_id=_request_id(call, request, trace)))
        failure = InternalError()
    else:
        return None
    request_id = _request_id(call, request, trace)
    if method.duplex is not None:
        return Answer(b"", failure, request_id, trace)
    run_guarded(call.abandon, call.refuse, failure, request_id)
    return None


async def _inflate(call: Call, data: bytes) -> bytes:
    """Decompresses a message.

    Raises:
        BuffersFull: There is no room for it.
        InvalidCompression: The call names no compression, or the message does not use it.
        UnsupportedMediaType: The compression is not supported.
    """
    encoding = call.metadata(b"grpc-encoding") or b"identity"
    if encoding == b"identity":
        raise InvalidCompression("the compressed flag of the message is set, but grpc-encoding names no compression")
    if encoding not in COMPRESSIONS:
        raise UnsupportedMediaType("unsupported grpc-encoding; use identity, gzip or deflate")
    wbits, limit = COMPRESSIONS[encoding], call.head.body_limit
    try:
        return await inflate(call.connection.port.large_body_lock, call.grow, data, wbits, limit)
    except MalformedRequest as error:
        raise InvalidCompression(error.without_traceback().message) from None


def _parse(call: Call, data: bytes, trace: RequestTrace) -> Message:
    """Parses a message. A message with an `id` sets the request id of its trace."""
    if call.deadline is not None and call.deadline <= call.connection.loop.time():
        raise DeadlineExceeded("the call's deadline had passed before its message was read")
    kind = call.head.method.kind
    if len(data) > _UNCHECKED_BYTES:
        _check_fields(call, data)
    request = kind()
    try:
        request.ParseFromString(data)
    except (DecodeError, UnicodeDecodeError):
        raise MalformedRequest(f"the message is not a valid {kind.__name__}") from None
    if trace.request_id and (message_id := getattr(request, "id", "")):
        trace.request_id = call.request_id(message_id)
    return request


def _check_fields(call: Call, data: bytes) -> None:
    most = _MAX_FIELDS + call.connection.port.settings.max_client_batch_size
    if has_more_fields(data, call.head.method.kind, most):
        raise InvalidRequest(f"the message has more than {most} fields; pack numbers, or send raw contents")


def _request_id(call: Call, request: Message | None, trace: RequestTrace) -> str:
    return trace.request_id or call.request_id(getattr(request, "id", ""))  # a generated id differs each time
