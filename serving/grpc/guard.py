"""gRPC's boundary: requests arrive as bytes and are parsed here, and only listed errors leave."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from serving.errors import BertserveError, InternalError, MalformedRequest, UnsupportedMediaType
from serving.logs import fields
from serving.net.requests import COMPRESSIONS, inflated

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from serving.grpc.calls import Call, Method

log = logging.getLogger("bertserve.grpc")

_BARE = "internal error; the server's log has the details under this request id"


async def answer(method: Method, data: bytes, call: Call, encoding: bytes = b"") -> None:
    """Runs a method on a message and ends its call, well or with an error.

    Args:
        method: The method.
        data: The message.
        call: Its call.
        encoding: What the message is compressed with; empty for nothing.
    """
    request: Message | None = None
    try:
        if encoding:
            data = await inflate(data, encoding, call.body_limit)
        request = _parse(method.kind, data)
        if method.unary is not None:
            reply = await method.unary(request, call)
            call.finish(reply.SerializeToString())
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


async def answer_one(method: Method, data: bytes, call: Call, encoding: bytes) -> bytes | BertserveError:
    """Runs a method on one message of several; the reply, or the error with which the call ends."""
    try:
        if encoding:
            data = await inflate(data, encoding, call.body_limit)
        request = _parse(method.kind, data)
        return b"" if method.duplex is None else (await method.duplex(request, call)).SerializeToString()
    except BertserveError as error:
        return error
    except Exception:  # the gRPC boundary
        log.exception("a call failed", extra=fields(request_id=call.identity()))
        return InternalError(_BARE)


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
