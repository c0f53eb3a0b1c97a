"""The gRPC port: opens, closes and drains."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

from serving.lifecycle import State
from serving.transport.grpc.calls import Port
from serving.transport.grpc.health import SERVICE as HEALTH
from serving.transport.grpc.health import HealthService
from serving.transport.grpc.http2 import Http2Connection
from serving.transport.grpc.inference import SERVICE, InferenceService
from serving.transport.grpc.reflection import ReflectionService
from serving.transport.ports import BACKLOG

if TYPE_CHECKING:
    from collections.abc import Callable

    from serving.errors import BertserveError
    from serving.pipeline import Pipeline
    from serving.settings import Settings
    from serving.transport.oip.service import V2Service

_TICK_S = 1.0

_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 6))
"""Seconds, seconds, count: a peer that has vanished without a word is found out within two minutes."""


class GrpcListener:
    """One gRPC port and its connections."""

    def __init__(
        self,
        opened: socket.socket,
        v2_service: V2Service,
        pipeline: Pipeline,
        settings: Settings,
        record_error: Callable[[BertserveError], None],
    ) -> None:
        """Prepares; nothing is accepted before `start`. The listening socket is owned from here on."""
        self._health = HealthService([SERVICE])
        methods = InferenceService(v2_service, pipeline).methods()
        reflection = ReflectionService([SERVICE, HEALTH])
        self._port = Port({**methods, **self._health.methods(), **reflection.methods()}, settings, record_error)
        self._socket = opened
        self._server: asyncio.Server | None = None
        self._clock: asyncio.TimerHandle | None = None
        v2_service.lifecycle.subscribe(self._follow)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, port = self._socket.getsockname()[:2]
        return host, port

    async def start(self) -> None:
        """Accepts connections."""
        loop = asyncio.get_running_loop()
        # Connections inherit these from the socket that accepts them.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            self._socket.setsockopt(socket.IPPROTO_TCP, option, value)
        self._clock = loop.call_later(_TICK_S, self._tick)
        self._server = await loop.create_server(lambda: Http2Connection(self._port), sock=self._socket, backlog=BACKLOG)

    async def close(self, grace_s: float) -> None:
        """Accepts no more, lets the calls under way finish for so long, then ends their connections."""
        self._health.close()
        if self._server is not None:
            self._server.close()
        loop = asyncio.get_running_loop()
        limit = loop.time() + grace_s
        for connection in list(self._port.connections):
            connection.drain()
        while self._port.connections and loop.time() < limit:  # noqa: ASYNC110  once in a lifetime
            await asyncio.sleep(0.01)
        for connection in list(self._port.connections):
            connection.end()
        if self._clock is not None:
            self._clock.cancel()

    def _follow(self, state: State) -> None:
        """Shows the server's state in the health service."""
        self._health.set(serving=state in {State.READY, State.DEGRADED})

    def _tick(self) -> None:
        self._clock = asyncio.get_running_loop().call_later(_TICK_S, self._tick)
        for connection in list(self._port.connections):
            connection.tick(_TICK_S)
