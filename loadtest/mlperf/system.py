"""The server as LoadGen's system under test: LoadGen calls it for each query.

LoadGen cannot represent a failed query, and its native code must not see an exception. After a failure, no more
requests are sent, the remaining samples complete without data, and the run is void.
"""

from __future__ import annotations

import contextlib
import selectors
import threading
import time
from array import array
from typing import TYPE_CHECKING, Any, Self

from loadtest.errors import BenchError
from loadtest.generator.closed_loop import Lane, connect

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from loadtest.generator.wire import Reply
    from loadtest.mlperf.library import Conversation

_POLL_S = 0.1
_SILENCE_S = 30.0
"""After this many seconds without any reply while requests are in flight, the server counts as hung."""


class OneByOne:
    """One synchronous request per query: SingleStream, and MultiStream with several samples.

    Attributes:
        failure: Why the run is void; None if it is not.
    """

    def __init__(self, conversation: Conversation) -> None:
        """Connects.

        Raises:
            BenchError: The server refuses the connection.
        """
        self.failure: BenchError | None = None
        self._conversation = conversation
        self._connection = connect(*conversation.target.address())
        self._lane = Lane(self._connection, conversation.target.wire(), lambda _: None)

    def issue(self, samples: Sequence[Any]) -> None:
        """Requests all samples of a query and waits for the reply."""
        if self.failure is None:
            try:
                reply = self._lane.exchange(self._conversation.message([sample.index for sample in samples]))
                complete(samples, self._conversation.data(reply, len(samples)))
            except BenchError as error:
                self.failure = error
        if self.failure is not None:
            complete(samples, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()


class SideBySide:
    """Concurrent requests: Server, and Offline, whose single query becomes many batches.

    The caller waits only for a free connection; a separate thread reads the replies. The most recently used connection
    is used next. The server closes idle connections, and a new one replaces a closed one. If the server closes a
    connection while a request is on its way, the request is sent again, once and on a new connection (RFC 9112, section
    9.3.1). The time until then counts as latency.

    Attributes:
        failure: Why the run is void; None if it is not.
        closed: Connections that the server closed after they had answered.
    """

    def __init__(self, conversation: Conversation, connections: int, batch: int) -> None:
        """Connects.

        Args:
            conversation: Requests and replies of the server.
            connections: Maximum requests in flight. LoadGen measures latency from the scheduled time, so waiting for a
                connection counts.
            batch: Maximum samples per request.

        Raises:
            BenchError: The server refuses the connection.
        """
        self.failure: BenchError | None = None
        self.closed = 0
        self._conversation = conversation
        self._address = conversation.target.address()
        self._batch = batch
        self._selector = selectors.DefaultSelector()
        self._stack = contextlib.ExitStack()
        self._over = False
        # Both threads change the free connections and the requests in flight.
        self._lock = threading.Lock()
        self._under_way: dict[Lane, Sequence[Any]] = {}
        self._have_answered: set[Lane] = set()
        self._free = [self._open() for _ in range(connections)]
        self._usable = threading.Semaphore(connections)
        self._reader = threading.Thread(target=self._read)

    def issue(self, samples: Sequence[Any]) -> None:
        """Sends requests on free connections."""
        for start in range(0, len(samples), self._batch):
            self._send(samples[start : start + self._batch])

    def __enter__(self) -> Self:
        """Starts the reader thread."""
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops the reader thread and closes the connections."""
        self._over = True
        self._reader.join()
        self._selector.close()
        self._stack.close()

    def _open(self) -> Lane:
        connection = self._stack.enter_context(connect(*self._address))
        lane = Lane(connection, self._conversation.target.wire(), lambda _: None)
        self._selector.register(connection, selectors.EVENT_READ, lane)
        return lane

    def _send(self, samples: Sequence[Any]) -> None:
        if self.failure is not None:
            complete(samples, None)
            return
        self._usable.acquire()
        self._ask(samples, is_again=False)

    def _ask(self, samples: Sequence[Any], *, is_again: bool) -> None:
        """Sends a request on a free connection; a retry uses a new one."""
        message = self._conversation.message([sample.index for sample in samples])
        try:
            with self._lock:
                lane = self._free.pop() if self._free and not is_again else self._open()
                self._under_way[lane] = samples
        except BenchError as error:
            self._finish(samples, error)
            return
        try:
            lane.send((message,))
        except OSError as error:
            self._lose(lane, BenchError(f"cannot send: {error}"))

    def _read(self) -> None:
        heard = time.monotonic()
        while not self._over:
            ready = self._selector.select(_POLL_S)
            for key, _ in ready:
                try:
                    if replies := key.data.receive():
                        self._take(key.data, replies[0])
                except BenchError as error:
                    self._lose(key.data, error)
            if ready or not self._under_way:
                heard = time.monotonic()
            elif time.monotonic() > heard + _SILENCE_S:
                self._have_answered.clear()
                for lane in list(self._under_way):
                    self._lose(lane, BenchError(f"no reply within {_SILENCE_S:g} s"))

    def _take(self, lane: Lane, reply: Reply) -> None:
        """Completes the request in flight on a connection, and frees the connection."""
        with self._lock:
            samples = self._under_way.pop(lane)
            self._have_answered.add(lane)
            self._free.append(lane)
        self._finish(samples, reply)

    def _lose(self, lane: Lane, error: BenchError) -> None:
        """Closes a connection. Retries its request if the connection had answered before; otherwise fails it."""
        with self._lock:
            samples = self._under_way.pop(lane, None)
            may_have_been_idle = lane in self._have_answered
            if lane.connection.fileno() >= 0:
                self._selector.unregister(lane.connection)
                lane.connection.close()
                self.closed += may_have_been_idle
            self._have_answered.discard(lane)
            if lane in self._free:
                self._free.remove(lane)
        if samples is not None and may_have_been_idle:
            self._ask(samples, is_again=True)
        elif samples is not None:
            self._finish(samples, error)

    def _finish(self, samples: Sequence[Any], outcome: Reply | BenchError) -> None:
        data = None
        try:
            if isinstance(outcome, BenchError):
                raise outcome
            data = self._conversation.data(outcome, len(samples))
        except BenchError as error:
            self.failure = self.failure or error
        self._usable.release()
        complete(samples, data)


def complete(samples: Sequence[Any], data: Sequence[bytes] | None) -> None:
    """Reports the samples as complete to LoadGen, with their data or with none."""
    import mlperf_loadgen  # noqa: PLC0415  an extra's package

    # LoadGen copies the data that it logs before the call returns, so the buffers may be freed afterwards.
    buffers = [array("B", one) for one in data] if data is not None else [array("B")] * len(samples)
    mlperf_loadgen.QuerySamplesComplete(
        [
            mlperf_loadgen.QuerySampleResponse(sample.id, *buffer.buffer_info())
            for sample, buffer in zip(samples, buffers, strict=True)
        ]
    )
