"""The gRPC port: opens, drains and closes."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from bertserve.serving.grpc.calls import Method
from bertserve.serving.grpc.connection import GrpcConnection
from bertserve.serving.grpc.services.inference import SERVICE, InferenceService
from bertserve.serving.grpc.services.standard import SERVICE as HEALTH
from bertserve.serving.grpc.services.standard import ReflectionService
from bertserve.serving.lifecycle import State
from bertserve.serving.net.listener import Listener
from bertserve.serving.net.ports import keep_alive
from bertserve.serving.unawaited import run_guarded

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping

    from google.protobuf.message import Message

    from bertserve.serving.errors import BertserveError
    from bertserve.serving.grpc.calls import Call
    from bertserve.serving.grpc.dispatch import CallDispatch
    from bertserve.serving.grpc.services.standard import HealthService
    from bertserve.serving.lifecycle import Lifecycle
    from bertserve.serving.net.connection_limiter import ConnectionLimiter, PeerDebts
    from bertserve.serving.oip.service import V2Service
    from bertserve.serving.security.tls import Tls


class Core(Protocol):
    """The core process, in a front."""

    async def call_grpc(self, path: str, request: Message, call: Call, /) -> Any:  # noqa: ANN401  serializes itself
        """The core's reply to a unary call of a method; raises the `BertserveError` of the method."""


def methods_of(v2_service: V2Service, health: HealthService, core: Core | None) -> dict[str, Method | BertserveError]:
    """The methods of the gRPC port by path; `core` is the core process in a front."""
    methods = InferenceService(v2_service).methods()
    if core is not None:
        methods |= {
            path: msgspec.structs.replace(method, unary=partial(core.call_grpc, path))
            for path, method in methods.items()
            if isinstance(method, Method) and method.of_core
        }
    return {**methods, **health.methods(), **ReflectionService([SERVICE, HEALTH]).methods()}


class GrpcListener(Listener):
    def __init__(
        self,
        opened: socket.socket | None,
        calls: CallDispatch,
        health: HealthService,
        lifecycle: Lifecycle,
        *,
        limiter: ConnectionLimiter,
        tls: Tls | None,
        place: Callable[[socket.socket, Callable[[], None]], bool],
    ) -> None:
        """As `Listener`; `health` follows the lifecycle."""
        self.health = health
        self._calls = calls
        super().__init__(
            *(opened, lambda: GrpcConnection(calls), tls, "h2"),
            ports=[calls],
            limiter=limiter,
            place=place,
        )
        if opened is not None:
            keep_alive(opened)
        lifecycle.subscribe(self._follow)

    async def finish(self, drain_s: float, grace_s: float) -> None:
        """Drains the port: accepts no connections, answers calls sent before clients know, then closes connections.

        Args:
            drain_s: How long clients may take to learn of the shutdown. Then further calls are refused.
            grace_s: How long open calls may take after that.
        """
        self.health.close()
        self._calls.ending = True  # for connections whose handshake is not complete
        self.close()
        limit = asyncio.get_running_loop().time() + drain_s
        self._calls.drain()
        try:
            await self.emptied(limit)
            for connection in list(self._calls.connections):
                run_guarded(connection.abort, connection.end_drain)
            await self.emptied(limit + grace_s)
        finally:
            for connection in list(self._calls.connections):
                run_guarded(connection.abort, connection.end)

    @property
    def methods(self) -> Mapping[str, Method | BertserveError]:
        return self._calls.methods

    @property
    def debts(self) -> PeerDebts:
        return self._calls.debts

    def _follow(self, state: State) -> None:
        self.health.set(serving=state in {State.READY, State.DEGRADED})
