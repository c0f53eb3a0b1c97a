"""The ports for probes: HAProxy's agent check, and the metrics port. Neither has keys or TLS.

HTTP/1.1 and gRPC's health service share the metrics port. The first bytes tell them apart.
"""

from __future__ import annotations

import asyncio
from itertools import chain
from typing import TYPE_CHECKING, cast

from serving.grpc.connection import GrpcConnection
from serving.grpc.dispatch import OPEN_BYTES, CallDispatch
from serving.grpc.h2 import PREFACE
from serving.http.listener import HttpListener
from serving.lifecycle import State
from serving.net.buffers import BufferBudget
from serving.net.connection_limiter import MAX_PROBE_CONNECTIONS, ConnectionLimiter
from serving.net.listener import Listener
from serving.net.orca import LoadReport
from serving.net.ports import keep_alive
from serving.unawaited import guarded

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable, Mapping

    from serving.grpc.calls import Method
    from serving.http.app import App
    from serving.inference.dispatcher import Dispatcher
    from serving.lifecycle import Lifecycle
    from serving.net.connection_limiter import Closable
    from serving.settings import Settings
    from serving.telemetry.recent import Recent

_TEXT_TOKENS = 64
"""Length of the text whose cost measures the speed of a replica."""


def text_s(dispatcher: Dispatcher) -> float:
    """Predicted seconds for a text on the idle device, of the slowest model; 0 before there is an engine."""
    return max((costs.alone_us(_TEXT_TOKENS) for costs in dispatcher.costs), default=0.0) / 1e6


def load_report(dispatcher: Dispatcher, recent: Recent) -> LoadReport:
    load, own_s = dispatcher.load(), text_s(dispatcher)
    wait_s = load.wait_s
    return LoadReport(
        application_utilization=wait_s / (wait_s + own_s) if wait_s else 0.0,
        rps_fractional=recent.requests_per_s,
        named_metrics={"predicted_wait_s": wait_s, "queued_texts": load.queued_texts, "requests": load.requests},
    )


_WHOLE_S = 0.002
"""An idle replica that answers a text within this time has its full weight. Only ratios of weights count, so all
replicas must use the same value."""

_HALVING_S = 0.1
"""Wait that halves the weight. The proxy's own count of requests follows the load at once, but weights arrive later. If
they fell sooner, all requests between two checks would go to the replica that was idle at the first."""

_PATIENCE_S = 5.0


class AgentPort:
    """The port of agent checks. It has neither keys nor TLS, because HAProxy uses neither for them."""

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
        """The line that HAProxy gets now."""
        if self._lifecycle.ready:
            return b"ready up %d%%\n" % weight_percent(self._dispatcher)
        return b"drain\n" if self._lifecycle.state is State.DRAINING else b"down\n"


def weight_percent(dispatcher: Dispatcher) -> int:
    """This replica's weight, 1 to 100: inversely proportional to the cost of a text, lower while others wait."""
    slowness = max(text_s(dispatcher) / _WHOLE_S, 1.0)
    return max(1, round(100 / slowness / (1 + dispatcher.load().wait_s / _HALVING_S)))


class _Check(asyncio.Protocol):
    """A connection of an agent check. It gets one line, and stays open until the client closes it.

    Data that the client sends (`agent-send`) is read: closing a socket with unread data would discard the line.
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

    @property
    def descriptor(self) -> int:
        return int(self._transport.get_extra_info("socket").fileno())

    def idle_since(self) -> tuple[bool, float] | None:
        """As in `Closable`. The check is complete once the line is written."""
        return (True, self._since)

    def close_if_idle(self) -> None:
        self._transport.abort()


_WORD = PREFACE[:4]
"""No HTTP/1.1 request begins like this: the method is reserved."""


class ProbeListener(HttpListener):
    """The metrics port. No endpoint here needs a large body, so none is read. It has its own buffer budget.

    Attributes:
        limiter: Its own connection limiter.
    """

    def __init__(self, app: App, methods: Mapping[str, Method], opened: socket.socket, settings: Settings) -> None:
        settings = settings.model_copy(update={"body_limit_bytes": min(OPEN_BYTES, settings.body_limit_bytes)})
        self.limiter = ConnectionLimiter(MAX_PROBE_CONNECTIONS)
        self._undecided: set[_Undecided] = set()
        budget = BufferBudget.of(settings)
        super().__init__(app, opened, settings, budget=budget, limiter=self.limiter)
        self._calls = CallDispatch(methods, settings, app.context.record_error, budget)
        self._ports = (self._port, self._calls)
        keep_alive(opened)

    def close(self) -> None:
        super().close()
        self._port.drain()
        for connection in list(self._calls.connections):
            guarded(connection.abort, connection.end)

    def _closable(self) -> Iterable[Closable]:
        return chain(self._undecided, super()._closable())

    def _open_connection(self) -> asyncio.Protocol:
        limit_s = self._calls.settings.header_timeout_s
        return _Undecided(self._undecided, super()._open_connection, lambda: GrpcConnection(self._calls), limit_s)


class _Undecided(asyncio.Protocol):
    """A connection whose protocol is not known yet."""

    def __init__(
        self,
        all_of_them: set[_Undecided],
        http: Callable[[], asyncio.Protocol],
        http2: Callable[[], asyncio.Protocol],
        limit_s: float,
    ) -> None:
        self._all = all_of_them
        self._http = http
        self._http2 = http2
        self._limit_s = limit_s
        self._first = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._all.add(self)
        loop = asyncio.get_running_loop()
        self._since = loop.time()
        self._timer = loop.call_later(self._limit_s, self._transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  how it ended does not matter
        self._timer.cancel()
        self._all.discard(self)

    @property
    def descriptor(self) -> int:
        return int(self._transport.get_extra_info("socket").fileno())

    def idle_since(self) -> tuple[bool, float] | None:
        """Never used, and idle since it was opened; None once it is closing."""
        return None if self._transport.is_closing() else (False, self._since)

    def close_if_idle(self) -> None:
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._first += data
        if len(self._first) < len(_WORD) and _WORD.startswith(self._first):
            return
        self._timer.cancel()
        self._all.discard(self)
        protocol = self._http2() if self._first.startswith(_WORD) else self._http()
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        protocol.data_received(self._first)
