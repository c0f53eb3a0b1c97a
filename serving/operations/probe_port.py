"""The metrics port: HTTP/1.1 and gRPC's health service on one port, without TLS, told apart by their first bytes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from serving.grpc.connection import GrpcConnection
from serving.grpc.dispatch import OPEN_BYTES, CallDispatch
from serving.grpc.h2 import PREFACE
from serving.http.listener import TICK_S, HttpListener
from serving.net.buffers import BufferBudget
from serving.net.ports import keep_alive

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping

    from serving.grpc.calls import Method
    from serving.http.app import App
    from serving.settings import Settings

_WORD = PREFACE[:4]
"""No HTTP/1.1 request begins so: the method is reserved."""


class ProbeListener(HttpListener):
    """The metrics port. Nothing here needs a large body, so none is read; its budget is spent by no other port."""

    def __init__(self, app: App, methods: Mapping[str, Method], opened: socket.socket, settings: Settings) -> None:
        settings = settings.model_copy(update={"body_limit_bytes": min(OPEN_BYTES, settings.body_limit_bytes)})
        budget = BufferBudget.of(settings)
        super().__init__(app, opened, settings, budget=budget)
        self._calls = CallDispatch(methods, settings, app.api.record_error, budget, app.api.keys)
        keep_alive(opened)

    def close(self) -> None:
        super().close()
        self._close_idle()
        for connection in list(self._calls.connections):
            connection.end()

    def _open(self) -> asyncio.Protocol:
        return _Undecided(super()._open, lambda: GrpcConnection(self._calls), self._calls.settings.header_timeout_s)

    def _tick(self) -> None:
        super()._tick()
        for connection in list(self._calls.connections):
            connection.tick(TICK_S)


class _Undecided(asyncio.Protocol):
    """A connection whose protocol is not known yet."""

    def __init__(
        self, http: Callable[[], asyncio.Protocol], http2: Callable[[], asyncio.Protocol], limit_s: float
    ) -> None:
        self._http = http
        self._http2 = http2
        self._limit_s = limit_s
        self._first = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._timer = asyncio.get_running_loop().call_later(self._limit_s, self._transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  how it ended does not matter
        self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._first += data
        if len(self._first) < len(_WORD) and _WORD.startswith(self._first):
            return
        self._timer.cancel()
        protocol = self._http2() if self._first.startswith(_WORD) else self._http()
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        protocol.data_received(self._first)
