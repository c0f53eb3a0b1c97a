"""Requests that are followed on their way, for the access log and for traces.

The server is built of these parts in place of the plain ones where one of the two is switched on. Where both are
off none of this runs: the choice is made once, when the server starts.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from serving.errors import BertserveError, ClientGone, MethodNotAllowed, RouteNotFound
from serving.grpc import guard
from serving.http import exchange
from serving.inference.dispatcher import Dispatcher, Ticket
from serving.inference.pipeline import Pipeline
from serving.records import DEFAULT_PRIORITY
from serving.telemetry.seen import CURRENT, Seen

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from serving.grpc.calls import Call, Method
    from serving.http.exchange import Handler, HttpReply, HttpRequest
    from serving.net.requests import RecordError
    from serving.records import A, EncodedText, InferRequest, ModelIndex, Outcome

_GONE = 499
_NO_ROUTE = (RouteNotFound.reason, MethodNotAllowed.reason)
_LEFT = ClientGone("the client cancelled the call")


class WatchedDispatcher(Dispatcher):
    """Notes when a request is queued and computed."""

    async def run(
        self, model: ModelIndex, texts: Sequence[EncodedText], deadline: float, priority: int = DEFAULT_PRIORITY
    ) -> Ticket:
        """As `Dispatcher.run`."""
        ticket = await super().run(model, texts, deadline, priority)
        if (seen := CURRENT.get()) is not None:
            seen.queued, seen.queue_us, seen.computed = ticket.submitted, ticket.queue_us, time.perf_counter()
        return ticket


class WatchedPipeline(Pipeline):
    """Notes what a request asks and what it gets."""

    async def infer(self, request: InferRequest[A]) -> Outcome[A]:
        """As `Pipeline.infer`."""
        seen = CURRENT.get()
        if seen is None:
            return await super().infer(request)
        seen.decoded = time.perf_counter()
        if seen.protocol == "grpc" and request.request_id:
            seen.request_id = request.request_id
        outcome = await super().infer(request)
        seen.answered(outcome)
        return outcome


class Watch:
    """The boundaries of the transports with somebody who looks on."""

    def __init__(self, sinks: Sequence[Callable[[Seen], None]]) -> None:
        """Names who is told of each request that has ended."""
        self._sinks = sinks

    def recorder(self, record_error: RecordError) -> RecordError:
        """`record_error`, which the request in question learns of too."""

        def record(error: BertserveError, identity: str) -> None:
            record_error(error, identity)
            if (seen := CURRENT.get()) is not None:
                seen.failed(error)
                seen.request_id = identity

        return record

    async def http(
        self,
        request: HttpRequest,
        find: Callable[[HttpRequest], Handler],
        record_error: RecordError,
        body_limit: int,
    ) -> HttpReply | None:
        """As `exchange.answer`."""
        headers = request.headers
        seen = Seen("http", request.method, "?", request.request_id, request.arrival, len(request.body))
        seen.traceparent, seen.tracestate = headers.get(b"traceparent"), headers.get(b"tracestate")
        CURRENT.set(seen)
        reply = await exchange.answer(request, find, record_error, body_limit)
        if seen.reason not in _NO_ROUTE:
            seen.route = _route(request)
        seen.status, seen.bytes_out = (_GONE, 0) if reply is None else (reply.status, len(reply.body))
        self._ended(seen)
        return reply

    async def grpc(self, method: Method, data: bytes, call: Call, encoding: bytes = b"") -> None:
        """As `guard.answer`."""
        seen = _of_call(call, data)
        try:
            await guard.answer(method, data, call, encoding)
        except asyncio.CancelledError:
            seen.failed(_LEFT)
            raise
        finally:
            self._ended(seen)

    async def grpc_one(self, method: Method, data: bytes, call: Call, encoding: bytes) -> bytes | BertserveError:
        """As `guard.answer_one`."""
        seen = _of_call(call, data)
        try:
            found = await guard.answer_one(method, data, call, encoding)
        except asyncio.CancelledError:
            seen.failed(_LEFT)
            raise
        else:
            if isinstance(found, BertserveError):
                seen.failed(found)
            else:
                seen.bytes_out = len(found)
            return found
        finally:
            self._ended(seen)

    def _ended(self, seen: Seen) -> None:
        seen.ended = time.perf_counter()
        # After the reply, not before it.
        loop = asyncio.get_running_loop()
        for sink in self._sinks:
            loop.call_soon(sink, seen)


def _route(request: HttpRequest) -> str:
    names = {value: f"{{{name}}}" for name, value in request.parameters.items()}
    return "/".join([names.get(part, part) for part in request.path.split("/")])


def _of_call(call: Call, data: bytes) -> Seen:
    route = (call.metadata(b":path") or b"?").decode("latin-1")  # a method's own: others are refused before
    seen = Seen("grpc", "POST", route, call.identity(), time.perf_counter(), len(data), status="OK")
    seen.traceparent, seen.tracestate = call.metadata(b"traceparent"), call.metadata(b"tracestate")
    CURRENT.set(seen)
    return seen
