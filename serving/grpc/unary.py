"""Calls whose messages are all there before they are answered: one message, or those of a stream together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from serving.errors import (
    BertserveError,
    BodyTooLarge,
    BuffersFull,
    ClientGone,
    InvalidRequest,
    MalformedRequest,
    WrongMessageCount,
    setting_of,
)
from serving.grpc.boundary import answer
from serving.grpc.calls import PREFIX_BYTES, UNCOUNTED_BYTES, Call, read_prefix

if TYPE_CHECKING:
    import asyncio


class UnaryCall(Call, eq=False):
    """It is handed to its method once the message and the end of the client's half have arrived."""

    _body: bytearray | None = None
    _task: asyncio.Task[object] | None = None

    def received(self, data: bytes, *, ended: bool) -> None:
        """Collects the message; starts its method once all is there."""
        body: bytes | bytearray = data
        if self._body is not None:
            body = self._body
            body += data
        try:
            prefix = read_prefix(body, self.head.body_limit)
            excess = -1 if prefix is None else len(body) - prefix[1]
            if excess > 0:
                raise WrongMessageCount("more than one message; the method takes one")
            if ended and excess:
                raise WrongMessageCount(f"the call ends {'inside its message' if body else 'without a message'}")
            if (excess or self._held or len(body) > UNCOUNTED_BYTES) and not self._hold(len(body)):
                raise BuffersFull
        except BertserveError as error:
            self.refuse(error)
            return
        if prefix is not None and ended:
            # Without the copy that a slice of a bytearray would be.
            message = data[PREFIX_BYTES:] if self._body is None else bytes(memoryview(body)[PREFIX_BYTES:])
            self._body = None
            self._task = self.connection.loop.create_task(answer(self, [(message, prefix[0])]))
            return
        if self._body is None:
            self._body = bytearray(data)
        if prefix is not None:
            self.connection.h2.expect(self.stream, prefix[1])

    def lost(self) -> None:
        super().lost()
        task, self._task = self._task, None  # which keeps its CancelledError, whose frames hold this call
        if task is not None and not task.done():
            task.cancel()
            self.record(ClientGone("the client cancelled the call"))


class GatheredCall(UnaryCall, eq=False):
    """A call of several messages, which are handed to its method together; they are as large as one may be."""

    _buffer: bytearray = msgspec.field(default_factory=bytearray)
    _messages: list[tuple[bytes, int]] = msgspec.field(default_factory=list)
    _size: int = 0

    def received(self, data: bytes, *, ended: bool) -> None:
        self._buffer += data
        try:
            while (message := self._next_message(self._buffer)) is not None:
                self._messages.append(message)
                self._size += len(message[0])
                self._check()
            if ended and self._buffer:
                raise MalformedRequest("the call ends before its message does")
            if not self._hold(len(self._buffer) + self._size):
                raise BuffersFull
        except BertserveError as error:
            self._messages.clear()
            self.refuse(error)
            return
        if ended:
            messages, self._messages = self._messages, []
            self._task = self.connection.loop.create_task(answer(self, messages))

    def _check(self) -> None:
        limit, most = self.head.body_limit, self.connection.port.settings.max_openai_batch_size
        if self._size > limit:
            raise BodyTooLarge(f"the call's messages have more than {limit} bytes together{setting_of(limit)}")
        if len(self._messages) > most:
            raise InvalidRequest(f"more than {most} messages in one call{setting_of(most)}")
