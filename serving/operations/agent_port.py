"""HAProxy's agent check: a replica's state and weight by its predicted wait, for every connection.

HAProxy connects, reads a line and closes ("agent-check" in section 5.2 of its configuration manual): `up`, `down`,
`drain`,
`ready` (cancels `drain`), and a percentage of the weight that the server has in the configuration.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from serving.lifecycle import State
from serving.net.connection_limiter import MAX_PROBE_CONNECTIONS, ConnectionLimiter
from serving.net.listener import Listener
from serving.operations.load import text_s

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from serving.inference.dispatcher import Dispatcher
    from serving.lifecycle import Lifecycle

_WHOLE_S = 0.002
"""An idle replica that answers a text within this time has its whole weight. Only ratios of weights count, so all
replicas must
agree.
"""

_HALVING_S = 0.1
"""A wait of this length halves the weight. The proxy's own count of requests follows the load at once, but weights are
sent at
intervals. If they fell faster, all requests between two checks would go to the replica that was idle at the first.
"""

_PATIENCE_S = 5.0


class AgentPort:
    """The port of agent checks. It has neither keys nor TLS: HAProxy supports none."""

    def __init__(self, opened: socket.socket, lifecycle: Lifecycle, dispatcher: Dispatcher) -> None:
        self._lifecycle = lifecycle
        self._dispatcher = dispatcher
        self._connections: set[_Check] = set()
        limiter = ConnectionLimiter(MAX_PROBE_CONNECTIONS)
        limiter.follow(lambda: self._connections)
        self._listener = Listener(opened, lambda: _Check(self._connections, self.line), None, "", limiter=limiter)

    async def start(self) -> None:
        await self._listener.start()

    def close(self) -> None:
        self._listener.close()
        for connection in list(self._connections):
            connection.close_if_idle()

    def line(self) -> bytes:
        """The present answer."""
        if self._lifecycle.ready:
            return b"ready up %d%%\n" % weight_percent(self._dispatcher)
        return b"drain\n" if self._lifecycle.state is State.DRAINING else b"down\n"


def weight_percent(dispatcher: Dispatcher) -> int:
    """The weight from 1 to 100: inversely proportional to the cost of a text, and reduced by waiting requests."""
    slowness = max(text_s(dispatcher) / _WHOLE_S, 1.0)
    return max(1, round(100 / slowness / (1 + dispatcher.load().wait_s / _HALVING_S)))


class _Check(asyncio.Protocol):
    """A connection: answered once, and open until the client closes it.

    What it sends (`agent-send`) is read: unread data at close would discard the answer.
    """

    def __init__(self, all_of_them: set[_Check], line: Callable[[], bytes]) -> None:
        self._all = all_of_them
        self._line = line

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._all.add(self)
        loop = asyncio.get_running_loop()
        self._since = loop.time()
        self._timer = loop.call_later(_PATIENCE_S, self._transport.abort)
        self._transport.write(self._line())
        self._transport.write_eof()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  how it ended does not matter
        self._timer.cancel()
        self._all.discard(self)

    def idle_since(self) -> tuple[bool, float] | None:
        """As in `Closable`: after the answer there is nothing left to do."""
        return (True, self._since)

    def close_if_idle(self) -> None:
        self._transport.abort()
