"""`grpc.health.v1.Health`: the standard health service, of the server and of each service by name."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from grpc_health.v1 import health_pb2 as pb

from serving.errors import NotReady, ServiceNotFound
from serving.grpc.calls import Method

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

SERVICE = "grpc.health.v1.Health"


class HealthService:
    """What is served, and those who watch."""

    def __init__(self, services: Iterable[str]) -> None:
        self._services = {"", *services}  # the empty name is the server
        self._status = pb.HealthCheckResponse.NOT_SERVING
        self._closed = False
        self._changed = asyncio.Event()

    def methods(self) -> dict[str, Method]:
        return {
            f"/{SERVICE}/Check": Method(pb.HealthCheckRequest, unary=self.check, open=True),
            f"/{SERVICE}/Watch": Method(pb.HealthCheckRequest, streaming=self.watch, open=True),
        }

    def set(self, *, serving: bool) -> None:
        """Tells all who watch."""
        self._status = pb.HealthCheckResponse.SERVING if serving else pb.HealthCheckResponse.NOT_SERVING
        self._wake()

    def close(self) -> None:
        """Ends all watching: it has no end of its own that a drain could wait for."""
        self._closed = True
        self._wake()

    async def check(self, request: pb.HealthCheckRequest, _: object) -> pb.HealthCheckResponse:
        if request.service not in self._services:
            raise ServiceNotFound("no service of that name is offered here")
        return pb.HealthCheckResponse(status=self._status)

    async def watch(self, request: pb.HealthCheckRequest, _: object) -> AsyncIterator[pb.HealthCheckResponse]:
        """The status now and whenever it changes; a service that does not exist is SERVICE_UNKNOWN."""
        sent = None
        while True:
            changed = self._changed
            known = request.service in self._services
            status = self._status if known else pb.HealthCheckResponse.SERVICE_UNKNOWN
            if status != sent:
                sent = status
                yield pb.HealthCheckResponse(status=status)
            if self._closed:
                raise NotReady("the server ends")
            await changed.wait()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
