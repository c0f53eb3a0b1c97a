"""gRPC's boundary: requests arrive as bytes and are parsed here, and only listed errors leave.

grpc's own handling answers UNKNOWN, with Python's type names and exception texts, to bytes that do not
parse and to a handler that raises. Parsing inside the guard makes the first INVALID_ARGUMENT and the second
a bare INTERNAL.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from serving.errors import BertserveError, ClientGone, InternalError, MalformedRequest

if TYPE_CHECKING:
    from grpc.aio import ServicerContext

log = logging.getLogger("bertserve.grpc")

Request = TypeVar("Request", bound=Message)
Context = "ServicerContext[bytes, bytes]"
Method = Callable[[Any, Any], Awaitable[Message]]


def guarded(
    method: Callable[[Request, Any], Awaitable[Message]],
    kind: type[Request],
    record_error: Callable[[BertserveError], None],
) -> grpc.RpcMethodHandler[bytes, bytes]:
    """A unary method behind the guard.

    Args:
        method: Takes the parsed request and the call's context; raises `BertserveError`.
        kind: The request's message type.
        record_error: Told of each error.
    """

    async def call(data: bytes, context: ServicerContext[bytes, bytes]) -> bytes:
        try:
            request = kind()
            try:
                request.ParseFromString(data)
            except (DecodeError, UnicodeDecodeError):
                raise MalformedRequest(f"the message is not a {kind.__name__}") from None
            reply = await method(request, context)
            return reply.SerializeToString()
        except BertserveError as error:
            failure = error
        except asyncio.CancelledError:
            record_error(ClientGone("the client cancelled the call"))
            raise
        except Exception:  # the gRPC boundary
            log.exception("a call failed")
            failure = InternalError("internal error; the server's log has the details")
        record_error(failure)
        await context.abort(grpc.StatusCode[failure.grpc_code], failure.message, _trailers(failure))
        raise AssertionError("abort raises")  # for the type checker

    return grpc.unary_unary_rpc_method_handler(call)


def _trailers(error: BertserveError) -> tuple[tuple[str, str], ...]:
    trailers = [("bertserve-reason", error.reason)]
    if error.retry_after_s is not None:
        trailers.append(("retry-after-ms", str(round(error.retry_after_s * 1e3))))
    return tuple(trailers)
