"""A front's side: the core process in place of the dispatcher, and what the core tells of itself."""

from __future__ import annotations

import asyncio
import math
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec

from bertserve.serving.engine.process.wire import FrameReader, pack
from bertserve.serving.errors import BertserveError, NotReady, too_late
from bertserve.serving.fronts.wire import (
    AFTER,
    KINDS,
    AdmittedUntil,
    Asking,
    Called,
    Kind,
    Replied,
    Rows,
    pack_json,
    pack_run,
    unpack_error,
    unpack_rows,
)
from bertserve.serving.http.exchange import HttpReply
from bertserve.serving.records import DEFAULT_PRIORITY, ModelIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from google.protobuf.message import Message

    from bertserve.serving.errors import DeadlineExceeded
    from bertserve.serving.grpc.calls import Call
    from bertserve.serving.http.exchange import HttpRequest
    from bertserve.serving.records import EncodedText


class ModelMoved(Exception):
    """The version of a request's model has changed since the front has chosen it."""


class RemotePermit:
    """Stands for the `Permit` that the core holds for a request.

    Attributes:
        admitted: Whether the core holds it already. Otherwise the core admits the request together with its texts.
    """

    def __init__(
        self, core: CoreLink, model: ModelIndex | None, arrival: float, timeout_ms: float | None, priority: int
    ) -> None:
        self._core = core
        self.number = core.new_number()
        self.model = ModelIndex(-1) if model is None else model
        self.arrival = arrival
        self.timeout_ms = timeout_ms
        self.priority = priority
        self.deadline = math.inf
        self.shortened = ""
        self.admitted = False

    def reserve(self, tokens: int, now: float) -> None:
        """Does nothing: only the core caches answers."""

    def add_after(self, after_us: float, behind_us: float, deadline: float) -> None:
        """As `Permit.add_after`; the request has been admitted."""
        self.deadline = deadline
        self._core.send(Kind.AFTER, AFTER.pack(after_us, behind_us, deadline), self.number)

    def release(self) -> None:
        if self.admitted:
            self.leave()

    def leave(self, *, late: bool = False) -> None:
        self.admitted = False
        self._core.leave(self.number, late=late)


class Serialized(NamedTuple):
    """A message of gRPC that need not be parsed."""

    data: bytes

    def SerializeToString(self) -> bytes:  # noqa: N802  as of protobuf
        return self.data


class CoreLink(asyncio.Protocol):
    """The socket to the core process.

    Attributes:
        setup: The first frame.
    """

    def __init__(self, on_end: Callable[[], object]) -> None:
        """`on_end` is called when the core has ended."""
        self._on: Mapping[Kind, Callable[[bytes], None]] | None = None
        self._early: list[tuple[Kind, bytes]] = []
        self.setup: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._on_end = on_end
        self._frames = FrameReader(KINDS)
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    # The `Device` of the pipeline.

    def permit(
        self,
        model: ModelIndex,
        tokens: int,  # noqa: ARG002  the core counts them
        texts: int,  # noqa: ARG002
        arrival: float,
        timeout_ms: float | None,
        priority: int,
    ) -> RemotePermit:
        return RemotePermit(self, model, arrival, timeout_ms, priority)

    async def admit(
        self,
        model: ModelIndex | None,
        sizes: Sequence[int],
        *,
        longest: int | None = None,
        arrival: float = 0.0,
        timeout_ms: float | None = None,
        priority: int = DEFAULT_PRIORITY,
    ) -> RemotePermit:
        """As `Admission.admit`, which the core calls; without a model, as `reserve` with `sizes` as tokens."""
        permit = RemotePermit(self, model, arrival, timeout_ms, priority)
        asking = Asking(model, list(sizes), longest, arrival, timeout_ms, priority)
        answer = await self.answer(permit.number, pack_json(Kind.ASK, asking, number=permit.number))
        until = msgspec.json.decode(answer, type=AdmittedUntil)
        permit.admitted = True
        permit.deadline = math.inf if until.deadline is None else until.deadline
        permit.shortened = until.shortened
        return permit

    async def reserve(self, tokens: int) -> RemotePermit:
        return await self.admit(None, [tokens])

    async def run(self, permit: RemotePermit, texts: Sequence[EncodedText]) -> Rows:
        """As `Dispatcher.run`."""
        frame = pack_run(permit.number, permit.model, texts, permit.arrival, permit.timeout_ms, permit.priority)
        permit.admitted = False  # the core's request holds it from now on
        return cast("Rows", await self.answer(permit.number, frame))

    def missed(self, permit: RemotePermit, where: str = "queue") -> DeadlineExceeded:  # noqa: ARG002  the core knows
        permit.leave(late=True)
        return too_late(permit.shortened)

    # Calls that the core answers.

    async def call_http(self, method: str, route: str, request: HttpRequest) -> HttpReply:
        """The core's reply to a request of a route."""
        called = Called(
            route=route,
            method=method,
            path=request.path,
            headers={name.decode("latin-1"): value.decode("latin-1") for name, value in request.headers.items()},
            parameters=dict(request.parameters),
            body=request.body,
            request_id=request.request_id,
        )
        replied = await self._call(called)
        return HttpReply(replied.body, replied.status, replied.content_type, replied.head)

    async def call_grpc(self, path: str, request: Message, call: Call) -> Serialized:
        """The core's reply to a unary call of a method."""
        replied = await self._call(Called(path, body=request.SerializeToString()))
        call.set_trailing_metadata(replied.metadata)
        return Serialized(replied.body)

    async def _call(self, called: Called) -> Replied:
        number = self.new_number()
        return msgspec.json.decode(await self.answer(number, pack_json(Kind.CALL, called, number=number)), type=Replied)

    # Frames.

    def new_number(self) -> int:
        return next(self._numbers)

    async def answer(self, number: int, frame: bytes) -> Any:  # noqa: ANN401  by the kind of the frame
        """Sends a frame, and returns the answer to it; raises the error that answers it."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self._transport.write(frame)
        try:
            return await future
        except asyncio.CancelledError:
            self.leave(number)
            raise
        finally:
            del self._waiting[number]

    def leave(self, number: int, *, late: bool = False) -> None:
        self.send(Kind.LEAVE, bytes((late,)), number)

    def send(self, kind: Kind, payload: bytes, number: int = 0) -> None:
        self._transport.write(pack(kind, payload, batch=number))

    def tell(self, kind: Kind, value: Any = None) -> None:  # noqa: ANN401  what msgspec writes
        self._transport.write(pack_json(kind, value))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  how it ended does not matter
        self.fail_all(NotReady("the server has ended", begun=True))
        self._on_end()

    def fail_all(self, error: BertserveError) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)

    def data_received(self, data: bytes) -> None:
        for kind, _, number, payload in self._frames.feed(data):
            if kind is Kind.ROWS:
                self._answered(number, unpack_rows(payload))
            elif kind in {Kind.ADMITTED, Kind.REPLY}:
                self._answered(number, payload)
            elif kind is Kind.ERROR:
                self._failed(number, unpack_error(payload))
            elif kind is Kind.MOVED:
                self._failed(number, ModelMoved())
            elif kind is Kind.SETUP:
                self.setup.set_result(payload)
            elif self._on is None:
                self._early.append((kind, payload))
            else:
                self._on[kind](payload)

    def listen(self, on: Mapping[Kind, Callable[[bytes], None]]) -> None:
        """Calls `on` with the payload of each frame that answers no request, by its kind, from the first one on."""
        self._on = on
        for kind, payload in self._early:
            on[kind](payload)
        self._early.clear()

    def _answered(self, number: int, value: object) -> None:
        future = self._waiting.get(number)
        if future is not None and not future.done():
            future.set_result(value)

    def _failed(self, number: int, error: Exception) -> None:
        future = self._waiting.get(number)
        if future is not None and not future.done():
            future.set_exception(error)
