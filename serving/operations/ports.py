"""The metrics port, for probes. It has neither keys nor TLS.

HTTP/1.1 and gRPC's health service share it. The first bytes tell them apart.
"""

from __future__ import annotations

import asyncio
from itertools import chain
from typing import TYPE_CHECKING, cast

from bertserve.serving.grpc.connection import GrpcConnection
from bertserve.serving.grpc.dispatch import OPEN_BYTES, CallDispatch
from bertserve.serving.grpc.h2 import PREFACE
from bertserve.serving.http.listener import HttpListener
from bertserve.serving.net.buffers import BufferBudget
from bertserve.serving.net.connection_limiter import MAX_PROBE_CONNECTIONS, ConnectionLimiter
from bertserve.serving.net.ports import keep_alive
from bertserve.serving.unawaited import run_guarded

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable, Mapping

    from bertserve.serving.grpc.calls import Method
    from bertserve.serving.http.app import App
    from bertserve.serving.net.connection_limiter import Closable
    from bertserve.serving.settings import Settings

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
            run_guarded(connection.abort, connection.end)

    def _closable(self) -> Iterable[Closable]:
        return chain(self._undecided, super()._closable())

    def _open_connection(self) -> asyncio.Protocol:
        limit_s = self._calls.header_timeout_s
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
