"""A call that takes several messages and answers each with one, in their order."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from serving.errors import BertserveError, BodyTooLarge, ClientGone, MalformedRequest, NotReady
from serving.grpc.calls import PREFIX, Call
from serving.grpc.guard import answer_one
from serving.security.keys import refusal

if TYPE_CHECKING:
    from serving.grpc.calls import Head, Metadata
    from serving.grpc.h2.connection import Http2Connection
    from serving.grpc.port import Port

_MOST_ANSWERS = 64
"""Messages of one conversation that are worked on at a time; further ones wait where flow control holds them."""


class Conversation(Call):
    """A call in which each message of the client's is answered by one, in their order."""

    __slots__ = ("_answers", "_buffer", "_draining", "_over")

    def __init__(self, port: Port, connection: Http2Connection, number: int, head: Head) -> None:
        super().__init__(port, connection, number, head)
        self._buffer = bytearray()
        self._answers: deque[asyncio.Task[bytes | BertserveError]] = deque()
        self._draining = self._over = False
        self.idle = True

    def received(self, data: bytes) -> None:
        """Starts the messages that are there."""
        self._buffer += data
        self._advance()

    def set_trailing_metadata(self, metadata: Metadata) -> None:
        """Nothing: what belongs to one message cannot go behind all of them."""

    def draining(self) -> None:
        """Ends once what has been started is answered."""
        self._draining = True
        self._advance()

    def keys_changed(self) -> None:
        """Ends where the key that it was opened with is none any more: it could go on for ever."""
        keys, given = self._port.keys, self.metadata(b"authorization")
        if keys is not None and not self._method.open and not keys.allow(given):
            self.refuse(refusal(given))

    def lost(self) -> None:
        """Ends what has been started: nobody waits for it."""
        if self._answers:
            self.record(ClientGone("the client cancelled the call"))
        self._stop()

    def refuse(self, error: BertserveError, identity: str = "") -> None:
        """Ends the call with an error."""
        self._stop()
        super().refuse(error, identity)

    def _stop(self) -> None:
        self._over = True
        for answer_task in self._answers:
            answer_task.cancel()
        self._answers.clear()
        self._buffer.clear()

    def _advance(self, _: object = None) -> None:
        """Sends the answers that are next, starts the messages that are whole, ends what has ended."""
        if self._over:
            return
        try:
            self._send_answers()
            while not self._draining and len(self._answers) < _MOST_ANSWERS and (message := self._next()):
                compressed, data = message
                encoding = self._encoding if compressed else b""
                work = answer_one(self._method, data, self, encoding, self._port.observer)
                self._answers.append(asyncio.get_running_loop().create_task(work))
                self._answers[-1].add_done_callback(self._advance)
        except BertserveError as error:
            self.refuse(error)
            return
        self.idle = not self._buffer or len(self._answers) >= _MOST_ANSWERS
        if self._answers or self.unsent is not None:
            return
        if self._draining:
            self.refuse(NotReady("the server ends"))
        elif self.ended and self._buffer:
            self.refuse(MalformedRequest("the call ends before its message does"))
        elif self.ended:
            self._over = True
            self.finish()

    def _next(self) -> tuple[int, bytes] | None:
        """The next message, if it is whole: whether it is compressed, and what it holds."""
        if len(self._buffer) < PREFIX.size:
            return None
        compressed, length = PREFIX.unpack_from(self._buffer)
        if length > self.body_limit:
            raise BodyTooLarge(f"the message has {length} bytes; at most {self.body_limit} are read")
        missing = PREFIX.size + length - len(self._buffer)
        if missing > 0:
            if missing > self.receivable and not self.ended:
                self._connection.want(self, missing - self.receivable)
            return None
        data = bytes(self._buffer[PREFIX.size : PREFIX.size + length])
        del self._buffer[: PREFIX.size + length]
        self.waited_s = 0.0
        self._connection.renew(self, len(self._buffer))
        return compressed, data

    def _send_answers(self) -> None:
        while self._answers and self._answers[0].done() and self.unsent is None:
            found = self._answers.popleft().result()
            if isinstance(found, BertserveError):
                raise found
            self._send(found, None)
            if self.unsent is not None:
                # The client takes no more for now: when it does, the next one follows.
                self.taken = asyncio.get_running_loop().create_future()
                self.taken.add_done_callback(self._advance)
