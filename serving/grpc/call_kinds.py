"""Kinds of calls: one message, or several messages with a reply each."""

from __future__ import annotations

import asyncio
from collections import deque
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from bertserve.serving.errors import (
    BertserveError,
    BuffersFull,
    ClientGone,
    MalformedRequest,
    NotReady,
    WrongMessageCount,
)
from bertserve.serving.grpc.boundary import Answer, answer
from bertserve.serving.grpc.calls import PREFIX_BYTES, UNCOUNTED_BYTES, Call, Metadata, read_prefix
from bertserve.serving.security.keys import refusal
from bertserve.serving.unawaited import run_guarded

if TYPE_CHECKING:
    from bertserve.serving.inference.requests import RequestTrace


class UnaryCall(Call, eq=False):
    """A call that starts its method once the message and the end of the client's side have arrived."""

    _body: bytearray | None = None
    _task: asyncio.Task[object] | None = None

    def received(self, data: bytes, *, ended: bool) -> None:
        """Collects the message, and starts the method when it is complete."""
        body: bytes | bytearray = data
        if self._body is not None:
            body = self._body
            body += data
        try:
            prefix = read_prefix(body, self.head.body_limit)
            excess = -1 if prefix is None else len(body) - prefix[1]
            if excess > 0:
                raise WrongMessageCount("the call has more than one message; the method takes one")
            if ended and excess:
                raise WrongMessageCount(f"the call ends {'inside its message' if body else 'without a message'}")
            if (excess or self._held or len(body) > UNCOUNTED_BYTES) and not self._hold(len(body)):
                raise BuffersFull
        except BertserveError as error:
            self.refuse(error)
            return
        if prefix is not None and ended:
            # Avoids the copy that slicing a bytearray makes.
            message = data[PREFIX_BYTES:] if self._body is None else bytes(memoryview(body)[PREFIX_BYTES:])
            self._body = None
            self.trace = self.begin_trace(len(message))
            self._task = self.connection.loop.create_task(answer(self, message, prefix[0], self.trace))
            return
        if self._body is None:
            self._body = bytearray(data)
        if prefix is not None:
            self.connection.h2.expect(self.stream, prefix[1])

    def lost(self) -> None:
        super().lost()
        task, self._task = self._task, None  # the task keeps a CancelledError, whose frames hold this call
        if task is not None and not task.done():
            task.cancel()
            self.record(ClientGone("the client canceled the call"))


_MAX_ANSWERS = 64
"""Maximum messages of one call in progress. Flow control holds back further ones."""


class _State(IntEnum):
    """The state of a bidirectional call, which only goes forward."""

    OPEN = 0
    ENDED = 1
    """The client has ended its side."""
    DRAINING = 2
    """The server is shutting down: no further message starts."""
    OVER = 3


class BidirectionalCall(Call, eq=False):
    """A call of several messages that are processed concurrently and answered in order."""

    idle: bool = True
    # Bytes of messages in progress and of waiting answers: for each unfinished task, and in total.
    _sizes: dict[asyncio.Task[Any], int] = msgspec.field(default_factory=dict)
    _in_work: int = 0
    _buffer: bytearray = msgspec.field(default_factory=bytearray)
    _consumed: int = 0
    _answers: deque[asyncio.Task[Answer | None]] = msgspec.field(default_factory=deque)
    _state: _State = _State.OPEN

    def set_trailing_metadata(self, metadata: Metadata) -> None:
        """Does nothing: trailing metadata cannot belong to a single message."""

    def received(self, data: bytes, *, ended: bool) -> None:
        self._buffer += data
        if ended:
            self._state = max(self._state, _State.ENDED)
        self._advance()

    def sent(self) -> None:
        super().sent()
        self._advance()

    def grow(self, size: int) -> bool:
        task = asyncio.current_task()
        if task in self._sizes:
            self._sizes[task] += size
            self._in_work += size
        return self._hold(self._bytes_now())

    def drain(self) -> None:
        self._state = max(self._state, _State.DRAINING)
        self._advance()

    def keys_changed(self) -> None:
        """Ends the call if its key is no longer valid. Otherwise it could go on forever."""
        keys, authorization = self.connection.port.keys, self.metadata(b"authorization")
        if keys is not None and not self.head.method.open and not keys.allow(authorization):
            self.refuse(refusal(authorization))

    def lost(self) -> None:
        gone = ClientGone("the client canceled the call")
        if self._answers:
            self.record(gone)
        self._stop(gone)
        super().lost()

    def refuse(self, error: BertserveError, request_id: str = "", trace: RequestTrace | None = None) -> None:
        self._stop(error)
        super().refuse(error, request_id, trace)

    def _stop(self, error: BertserveError) -> None:
        self._state = _State.OVER
        for task in self._answers:
            if not task.cancel() and (made := _result(task)) is not None:
                self.end_trace(made.trace, 0, error)
        self._answers.clear()
        self._sizes.clear()
        self._in_work = 0
        self._buffer.clear()

    def _bytes_now(self) -> int:
        return super()._bytes_now() + len(self._buffer) + self._in_work

    def _take_result(self, task: asyncio.Task[Answer | None]) -> None:
        if self._state is _State.OVER:
            if (made := _result(task)) is not None:
                self.end_trace(made.trace, 0, ClientGone("the call has ended"))
            return
        if (made := _result(task)) is not None:
            self._in_work += len(made.reply) - self._sizes.pop(task)
            self._advance()

    def _advance(self) -> None:
        """Sends the next answers, starts complete messages, and ends the call if it is over."""
        if self._state is _State.OVER:
            return
        last = self._send_answers()
        if last is not None and last.error is not None:
            self.refuse(last.error, last.request_id, last.trace)
            return
        try:
            while self._may_start() and (message := self._next_message()):
                self._start(*message)
            if (self._bytes_now() > UNCOUNTED_BYTES or self._held) and not self._hold(self._bytes_now()):
                raise BuffersFull
        except BertserveError as error:
            self.refuse(error.without_traceback())
            return
        self.idle = not self._buffer or not self._may_start()
        if self._answers or self.stream.unsent is not None:
            return
        if self._state is _State.DRAINING:
            self.refuse(NotReady("the server is shutting down", begun=True))
        elif self._state is _State.ENDED and self._buffer:
            self.refuse(MalformedRequest("the call ended inside its message"))
        elif self._state is _State.ENDED:
            self._state = _State.OVER
            self.finish()

    def _next_message(self) -> tuple[bytes, int] | None:
        """Takes the next complete message off the buffer, with its compressed flag; None if there is none."""
        buffer = self._buffer
        prefix = read_prefix(buffer, self.head.body_limit)
        if prefix is None:
            return None
        compressed, end = prefix
        h2 = self.connection.h2
        if len(buffer) < end:
            h2.expect(self.stream, self._consumed + end)
            return None
        data = bytes(buffer[PREFIX_BYTES:end])
        del buffer[:end]
        self._consumed += end
        self._waited_s = 0.0
        h2.consume(self.stream, self._consumed)
        self.connection.flush()
        return data, compressed

    def _may_start(self) -> bool:
        return self._state < _State.DRAINING and len(self._answers) < _MAX_ANSWERS and self.stream.unsent is None

    def _send_answers(self) -> Answer | None:
        """Sends the next answers until the client takes no more; `sent` continues. Returns an answer with an error."""
        # A finished task that is still in `_sizes` counts with its message's size. `_take_result` will call this again.
        while self._answers and self._answers[0] not in self._sizes and self.stream.unsent is None:
            made = _result(self._answers.popleft())
            if made is None:
                continue
            self._in_work -= len(made.reply)
            if made.error is not None:
                return made
            try:
                self.reply(made.reply)
            except BertserveError as error:
                return msgspec.structs.replace(made, error=error.without_traceback())
            self.end_trace(made.trace, len(made.reply))
        return None

    def _start(self, data: bytes, compressed: int) -> None:
        task = self.connection.loop.create_task(answer(self, data, compressed, self.begin_trace(len(data))))
        task.add_done_callback(partial(run_guarded, self.abandon, self._take_result))
        self._answers.append(task)
        self._sizes[task] = len(data)
        self._in_work += len(data)


def _result(task: asyncio.Task[Answer | None]) -> Answer | None:
    """The result of a task; None if it was cancelled."""
    return None if task.cancelled() else task.result()
