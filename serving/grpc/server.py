"""The gRPC port: opens, closes and drains."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from serving.grpc.connection import GrpcConnection
from serving.grpc.dispatch import CallDispatch
from serving.grpc.services.health import SERVICE as HEALTH
from serving.grpc.services.health import HealthService
from serving.grpc.services.inference import SERVICE, InferenceService
from serving.grpc.services.orca import OrcaService
from serving.grpc.services.reflection import ReflectionService
from serving.grpc.services.tei import SERVICES as TEI
from serving.grpc.services.tei import TeiServices
from serving.lifecycle import State
from serving.net.acceptor import Acceptor
from serving.net.ports import keep_alive
from serving.unawaited import guarded

if TYPE_CHECKING:
    import socket

    from serving.net.acceptor import Places
    from serving.net.buffers import BufferBudget
    from serving.net.observer import RequestObserver
    from serving.net.orca import LoadReports
    from serving.net.requests import RecordError
    from serving.oip.service import V2Service
    from serving.security.keys import ApiKeys
    from serving.security.tls import Tls
    from serving.settings import Settings
    from serving.tei.service import TeiService

_TICK_S = 1.0


class GrpcListener:
    """One gRPC port and its connections."""

    def __init__(
        self,
        opened: socket.socket,
        v2_service: V2Service,
        tei_service: TeiService,
        settings: Settings,
        record_error: RecordError,
        *,
        budget: BufferBudget,
        load_reports: LoadReports,
        keys: ApiKeys | None = None,
        tls: Tls | None = None,
        places: Places | None = None,
        observer: RequestObserver | None = None,
    ) -> None:
        """Prepares; nothing is accepted before `start`. The listening socket is owned from here on.

        `budget` is what its connections may hold, together with those of other ports.
        """
        self.health = HealthService([SERVICE, *TEI])
        methods = InferenceService(v2_service).methods() | TeiServices(tei_service).methods()
        self._orca = OrcaService(load_reports)
        reflection = ReflectionService([SERVICE, *TEI, HEALTH])
        methods |= {**self.health.methods(), **reflection.methods(), **self._orca.methods()}
        self._calls = CallDispatch(methods, settings, record_error, budget, keys, observer, load_reports)
        self._acceptor = Acceptor(opened, lambda: GrpcConnection(self._calls), tls, "h2", places=places)
        if places is not None:
            places.follow(lambda: self._calls.connections)
        keep_alive(opened)
        self._clock: asyncio.TimerHandle | None = None
        v2_service.lifecycle.subscribe(self._follow)

    @property
    def address(self) -> tuple[str, int]:
        return self._acceptor.address

    @property
    def connections(self) -> int:
        return len(self._calls.connections)

    async def start(self) -> None:
        self._clock = asyncio.get_running_loop().call_later(_TICK_S, self._tick)
        await self._acceptor.start()

    async def renew(self) -> None:
        await self._acceptor.renew()

    async def close(self, drain_s: float, grace_s: float) -> None:
        """Accepts no more, answers what clients send before they know, then ends their connections.

        Args:
            drain_s: How long clients may take to hear of the end; then further calls are refused.
            grace_s: How long, after that, the calls that are there may take.
        """
        self.health.close()
        self._orca.close()
        self._calls.ending = True  # for connections whose handshake has not ended
        self._acceptor.close()
        limit = asyncio.get_running_loop().time() + drain_s
        for connection in list(self._calls.connections):
            guarded(connection.abort, connection.drain)
        try:
            await self._emptied(limit)
            for connection in list(self._calls.connections):
                guarded(connection.abort, connection.refuse_more)
            await self._emptied(limit + grace_s)
        finally:
            for connection in list(self._calls.connections):
                guarded(connection.abort, connection.end)
            if self._clock is not None:
                self._clock.cancel()

    async def _emptied(self, limit: float) -> None:
        loop = asyncio.get_running_loop()
        while (self._calls.connections or self._acceptor.opening) and loop.time() < limit:  # noqa: ASYNC110  once in a lifetime
            await asyncio.sleep(0.01)

    def keys_changed(self) -> None:
        self._calls.keys_changed()

    def _follow(self, state: State) -> None:
        self.health.set(serving=state in {State.READY, State.DEGRADED})

    def _tick(self) -> None:
        self._clock = asyncio.get_running_loop().call_later(_TICK_S, self._tick)
        for connection in list(self._calls.connections):
            guarded(connection.abort, connection.tick, _TICK_S)
