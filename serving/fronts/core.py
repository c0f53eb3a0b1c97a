"""The core's side of one front: its requests, its calls, its connections and its counts."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec

from bertserve.serving.engine.process.wire import FrameReader, pack
from bertserve.serving.errors import BertserveError, InternalError, NotReady
from bertserve.serving.fronts.wire import (
    AFTER,
    KINDS,
    AdmittedUntil,
    Asking,
    Called,
    Kind,
    Replied,
    pack_error,
    pack_json,
    pack_rows,
    unpack_running,
)
from bertserve.serving.inference.answer_cache import strip_padding
from bertserve.serving.logs import fields
from bertserve.serving.records import DEFAULT_PRIORITY, ModelIndex
from bertserve.serving.unawaited import is_cancelled, start

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence

    from bertserve.serving.inference.answer_cache import AnswerCache
    from bertserve.serving.inference.device import Rows
    from bertserve.serving.inference.dispatcher import Dispatcher, PendingRequest
    from bertserve.serving.records import EncodedText, TensorSpec
    from bertserve.serving.scheduling.admission import Permit

    Call = Callable[[Called], Awaitable[Replied]]

log = logging.getLogger("bertserve.fronts")

_UNREAD_BYTES = 16 << 20
"""While a front has not taken more than this, it is not read: answers that it has not taken hold no tokens."""


class Core(Protocol):
    """What all links share.

    Attributes:
        outputs: The outputs of each model, whose index may be that of an earlier version.
        padded: Models with rows of variable length.
    """

    dispatcher: Dispatcher
    cache: AnswerCache | None
    outputs: dict[ModelIndex, Sequence[TensorSpec]]
    padded: set[ModelIndex]

    def is_present(self, model: ModelIndex) -> bool:
        """Whether the repository has a model, not only the previous generation of an engine."""


class _Answered:
    """What the dispatcher tells that a request of a front is answered; see `dispatcher.Answered`.

    Answers are written together in the next turn of the event loop, so that the next batch starts first.
    """

    __slots__ = ("_link", "error", "is_done", "number")

    def __init__(self, link: FrontLink, number: int) -> None:
        self._link = link
        self.number = number
        self.error: BertserveError | None = None
        self.is_done = False

    def done(self) -> bool:
        return self.is_done

    def set_result(self, result: None, /) -> None:  # noqa: ARG002  as of a future
        self.is_done = True
        self._link.answered(self)

    def set_exception(self, exception: BertserveError, /) -> None:
        self.error = exception
        self.set_result(None)


class FrontLink(asyncio.Protocol):
    """The socket of one front.

    Args:
        call: Answers a call. Raises `BertserveError`.
        on: Called with the payload of each frame that belongs to no request, by its kind.
        on_end: Called when the socket has closed.
    """

    def __init__(
        self, core: Core, call: Call, on: Mapping[Kind, Callable[[bytes], None]], on_end: Callable[[], None]
    ) -> None:
        self._core = core
        self._call_core = call
        self._on = on
        self._on_end = on_end
        self._frames = FrameReader(KINDS)
        self._admitted: dict[int, Permit] = {}
        self._running: dict[int, tuple[_Answered, PendingRequest]] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._ready: list[_Answered] = []
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_UNREAD_BYTES)

    def pause_writing(self) -> None:
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  how it ended does not matter
        """Cancels everything that the front waited for."""
        for number in {*self._admitted, *self._running, *self._tasks}:
            self._leave(number, late=False)
        self._on_end()

    def data_received(self, data: bytes) -> None:
        frames = self._frames.feed(data)
        # A single request chooses its batch as it starts. After anything else, other batches may be able to start.
        holds = len(frames) != 1 or frames[0][0] is not Kind.RUN
        if holds:
            self._core.dispatcher.hold()
        for kind, model, number, payload in frames:
            try:
                if kind is Kind.RUN:
                    self._run(ModelIndex(model), number, payload)
                else:
                    self._received(kind, number, payload)
            except Exception:  # the boundary of a request of a front
                log.exception("a request failed")
                self._write(pack_error(number, InternalError()))
        if holds:
            self._core.dispatcher.release()

    def _received(self, kind: Kind, number: int, payload: bytes) -> None:
        if kind is Kind.LEAVE:
            self._leave(number, late=bool(payload[0]))
        elif kind is Kind.ASK:
            self._ask(number, payload)
        elif kind is Kind.AFTER:
            if (permit := self._admitted.get(number)) is not None:
                permit.add_after(*AFTER.unpack(payload))
        elif kind is Kind.CALL:
            self._start(number, self._call(number, msgspec.json.decode(payload, type=Called)))
        else:
            self._on[kind](payload)

    def tell(self, kind: Kind, value: Any = None) -> None:  # noqa: ANN401  what msgspec writes
        self._write(pack_json(kind, value))

    def _write(self, frame: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(frame)

    # Requests.

    def _ask(self, number: int, payload: bytes) -> None:
        asking = msgspec.json.decode(payload, type=Asking)
        if asking.model is not None and self._has_moved(ModelIndex(asking.model), number):
            return
        admission, now = self._core.dispatcher.admission, time.perf_counter()
        try:
            if asking.model is None:
                permit = admission.reserve(asking.sizes[0], now)
            else:
                permit = admission.admit(
                    ModelIndex(asking.model),
                    asking.sizes,
                    longest=asking.longest,
                    arrival=asking.arrival,
                    timeout_ms=asking.timeout_ms,
                    priority=asking.priority,
                    now=now,
                )
        except BertserveError as error:
            self._write(pack_error(number, error))
            return
        self._admitted[number] = permit
        deadline = None if permit.deadline == math.inf else permit.deadline
        self._write(pack_json(Kind.ADMITTED, AdmittedUntil(deadline, permit.shortened), number=number))

    def _run(self, model: ModelIndex, number: int, payload: bytes) -> None:
        permit = self._admitted.pop(number, None)
        if self._has_moved(model, number):
            if permit is not None:
                permit.release()
            return
        running = unpack_running(payload)
        dispatcher, cache, texts = self._core.dispatcher, self._core.cache, running.texts
        tokens = sum([len(text.ids) for text in texts])
        if permit is None:
            if cache is not None and (found := cache.recall(model, texts)) is not None:
                self._write(self._packed(number, model, texts, found))
                return
            arrival, timeout_ms, priority = running.arrival, running.timeout_ms, running.priority
            permit = dispatcher.permit(model, tokens, len(texts), arrival, timeout_ms, priority)
        try:
            if cache is None:
                answered = _Answered(self, number)
                self._running[number] = answered, dispatcher.start(permit, texts, answered)
                return
            permit.reserve(tokens, time.perf_counter())  # it may wait for a row of another request
        except Exception as error:
            permit.release()
            if not isinstance(error, BertserveError):
                raise
            self._write(pack_error(number, error))
        else:
            task = self._start(number, self._cached(cache, number, permit, texts))
            task.add_done_callback(lambda _: permit.release())  # a task that is cancelled at once never starts

    def _has_moved(self, model: ModelIndex, number: int) -> bool:
        """Whether no engine has a model that the front has not left yet, or none is there; then tells the front."""
        if not self._core.dispatcher.costs:
            self._write(pack_error(number, NotReady("the engine is starting; try again", retry_after_s=1)))
            return True
        if self._core.is_present(model) or self._core.dispatcher.runs(model):
            return False
        self._write(pack(Kind.MOVED, b"", batch=number))
        return True

    def answered(self, answered: _Answered) -> None:
        if not self._ready:
            self._loop.call_soon(self._write_answers)
        self._ready.append(answered)

    def _write_answers(self) -> None:
        ready, self._ready = self._ready, []
        frames = []
        for each in ready:
            if (running := self._running.pop(each.number, None)) is not None:  # otherwise the front has left it
                frames.append(self._answer(*running))
                self._end(running[1])
        self._write(b"".join(frames))

    def _answer(self, answered: _Answered, request: PendingRequest) -> bytes:
        if answered.error is not None:
            return pack_error(answered.number, answered.error)
        try:
            return self._packed(answered.number, request.permit.model, request.texts, request)
        except Exception:  # the boundary of a request of a front
            log.exception("a request failed")
            return pack_error(answered.number, InternalError())

    def _packed(self, number: int, model: ModelIndex, texts: Sequence[EncodedText], rows: Rows) -> bytes:
        found = rows.rows
        if model in self._core.padded:
            outputs = self._core.outputs[model]
            found = [strip_padding(row, len(text.ids), outputs) for text, row in zip(texts, found, strict=True)]
        return pack_rows(number, found, rows.queue_us, rows.compute_us, rows.submitted, cached=rows.cached)

    async def _cached(self, cache: AnswerCache, number: int, permit: Permit, texts: Sequence[EncodedText]) -> None:
        try:
            rows = await cache.run(self._core.dispatcher, permit, texts, self._core.outputs[permit.model])
            frame = self._packed(number, permit.model, texts, rows)
        except BertserveError as error:
            frame = pack_error(number, error)
        except Exception:  # the boundary of a request of a front
            log.exception("a request failed")
            frame = pack_error(number, InternalError())
        self._write(frame)

    def _leave(self, number: int, *, late: bool) -> None:
        if (permit := self._admitted.pop(number, None)) is not None:
            if late:
                self._core.dispatcher.missed(permit)
            permit.release()
        elif late:  # it has its rows
            self._core.dispatcher.count_miss(DEFAULT_PRIORITY, "finish")
        if (running := self._running.pop(number, None)) is not None:
            answered, request = running
            answered.is_done = True  # otherwise its texts are retried if their engine fails
            self._end(request)
        if (task := self._tasks.pop(number, None)) is not None:
            task.cancel()

    def _end(self, request: PendingRequest) -> None:
        self._core.dispatcher.end(request)
        request.permit.release()

    # Calls.

    def _start(self, number: int, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._tasks[number] = start(work)
        task.add_done_callback(lambda _: self._tasks.pop(number, None))
        return task

    async def _call(self, number: int, called: Called) -> None:
        try:
            replied = await self._call_core(called)
        except BertserveError as error:
            self._write(pack_error(number, error.without_traceback()))
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            # Something that the call waited for was cancelled, such as a model load at shutdown.
            self._write(pack_error(number, NotReady("the server is shutting down", begun=True)))
        except Exception:  # the boundary of a call, as of HTTP
            log.exception("a request failed", extra=fields(request_id=called.request_id))
            self._write(pack_error(number, InternalError()))
        else:
            self._write(pack_json(Kind.REPLY, replied, number=number))
