"""gRPC's boundary: requests arrive as bytes and are parsed here, and only listed errors leave."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from serving.errors import BertserveError, InternalError, MalformedRequest

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from serving.transport.grpc.calls import Call, Method

log = logging.getLogger("bertserve.grpc")


async def answer(method: Method, data: bytes, call: Call) -> None:
    """Runs a method on a message and ends its call, well or with an error."""
    try:
        request = _parse(method.kind, data)
        if method.unary is not None:
            reply = await method.unary(request, call)
            call.finish(reply.SerializeToString())
        elif method.streaming is not None:
            async for message in method.streaming(request, call):
                await call.send(message.SerializeToString())
            call.finish()
    except BertserveError as error:
        call.refuse(error)
    except Exception:  # the gRPC boundary
        log.exception("a call failed")
        call.refuse(InternalError("internal error; the server's log has the details"))


def _parse(kind: type[Message], data: bytes) -> Message:
    request = kind()
    try:
        request.ParseFromString(data)
    except (DecodeError, UnicodeDecodeError):
        raise MalformedRequest(f"the message is not a {kind.__name__}") from None
    return request
