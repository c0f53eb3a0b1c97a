"""The gRPC port: the inference service and the standard health service on the server's own event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health

from serving.errors import StartupError
from serving.lifecycle import State
from serving.transport.grpc.inference import SERVICE, InferenceService

if TYPE_CHECKING:
    from collections.abc import Callable

    from serving.errors import BertserveError
    from serving.lifecycle import Lifecycle
    from serving.pipeline import Pipeline
    from serving.repository import Repository
    from serving.settings import Settings

_REPLY_LIMIT_BYTES = 2**31 - 1


class GrpcListener:
    """One gRPC port."""

    def __init__(
        self,
        pipeline: Pipeline,
        repository: Repository,
        lifecycle: Lifecycle,
        settings: Settings,
        record_error: Callable[[BertserveError], None],
    ) -> None:
        self._host, self._port = settings.host, settings.grpc_port
        self._lifecycle = lifecycle
        self._health = health.HealthServicer()
        self._server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),  # a port in use is an error, not a second server beside the first
                ("grpc.max_receive_message_length", settings.body_limit_bytes),
                ("grpc.max_send_message_length", _REPLY_LIMIT_BYTES),
                ("grpc.max_metadata_size", settings.header_limit_bytes),
                ("grpc.absolute_max_metadata_size", settings.header_limit_bytes),
            ],
        )
        service = InferenceService(pipeline, repository, lifecycle, settings)
        self._server.add_generic_rpc_handlers((service.handlers(record_error),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    async def start(self) -> tuple[str, int]:
        """Accepts calls; returns host and port.

        Raises:
            StartupError: The port cannot be had.
        """
        host = f"[{self._host}]" if ":" in self._host else self._host
        try:
            port = self._server.add_insecure_port(f"{host}:{self._port}")
        except RuntimeError:
            raise StartupError(f"cannot listen on {self._host}:{self._port} for gRPC: Address already in use") from None
        await self.follow(self._lifecycle.state)
        await self._server.start()
        return self._host, port

    async def follow(self, state: State) -> None:
        """Shows the server's state in the health service."""
        serving = state in {State.READY, State.DEGRADED}
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", SERVICE):
            await self._health.set(service, status)

    async def close(self, grace_s: float) -> None:
        """Refuses new calls with UNAVAILABLE, lets those under way finish for so long, then ends them."""
        await self._server.stop(grace_s)
