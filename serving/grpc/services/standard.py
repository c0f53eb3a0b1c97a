"""The standard gRPC services: health checking and server reflection."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_health.v1 import health_pb2 as pb

from bertserve.serving.errors import NotReady, ServiceNotFound
from bertserve.serving.grpc.calls import Method
from bertserve.serving.grpc.services import reflection_pb2
from bertserve.serving.grpc.status import STATUS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from google.protobuf.descriptor import FileDescriptor

_REFLECTION = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
"""Two versions with the same messages. Only the first is described."""


class ReflectionService:
    """Server reflection, from the descriptors with which the server itself decodes messages."""

    def __init__(self, services: Iterable[str]) -> None:
        self._services = sorted({*services, *_REFLECTION})
        self._pool = descriptor_pool.Default()

    def methods(self) -> dict[str, Method]:
        method = Method(reflection_pb2.ServerReflectionRequest, duplex=self.info)
        return {f"/{service}/ServerReflectionInfo": method for service in _REFLECTION}

    async def info(
        self, request: reflection_pb2.ServerReflectionRequest, _: object, __: object
    ) -> reflection_pb2.ServerReflectionResponse:
        reply = reflection_pb2.ServerReflectionResponse(valid_host=request.host, original_request=request)
        asked = request.WhichOneof("message_request")
        with contextlib.suppress(KeyError):
            if asked == "list_services":
                reply.list_services_response.service.extend(
                    reflection_pb2.ServiceResponse(name=name) for name in self._services
                )
            elif asked == "file_by_filename":
                _describe(self._pool.FindFileByName(request.file_by_filename), reply)
            elif asked == "file_containing_symbol":
                _describe(self._file_of(request.file_containing_symbol), reply)
            elif asked == "all_extension_numbers_of_type":
                found = self._pool.FindMessageTypeByName(request.all_extension_numbers_of_type)
                reply.all_extension_numbers_response.base_type_name = found.full_name
        if reply.WhichOneof("message_response") is None:
            reply.error_response.error_code = STATUS["NOT_FOUND"]
            reply.error_response.error_message = "unknown file, symbol or extension"
        return reply

    def _file_of(self, symbol: str) -> FileDescriptor:
        """The file that defines a symbol. The pool finds services, but not their methods."""
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            service, _, method = symbol.rpartition(".")
            return self._pool.FindServiceByName(service).methods_by_name[method].containing_service.file


def _describe(file: FileDescriptor, reply: reflection_pb2.ServerReflectionResponse) -> None:
    """Adds a file and all its imports."""
    pending, known = [file], {file.name}
    while pending:
        current = pending.pop()
        description = descriptor_pb2.FileDescriptorProto()
        current.CopyToProto(description)
        reply.file_descriptor_response.file_descriptor_proto.append(description.SerializeToString())
        pending += [other for other in current.dependencies if other.name not in known]
        known |= {other.name for other in current.dependencies}


SERVICE = "grpc.health.v1.Health"


class HealthService:
    """The health of the server, and the streams that watch it."""

    def __init__(self, services: Iterable[str]) -> None:
        self._services = {"", *services}  # the empty name stands for the server
        self._status = pb.HealthCheckResponse.NOT_SERVING
        self._closed = False
        self._changed = asyncio.Event()

    def methods(self) -> dict[str, Method]:
        return {
            f"/{SERVICE}/Check": Method(pb.HealthCheckRequest, unary=self.check, open=True),
            f"/{SERVICE}/Watch": Method(pb.HealthCheckRequest, streaming=self.watch, open=True),
        }

    def set(self, *, serving: bool) -> None:
        """Sets the status, and notifies all watchers."""
        self._status = pb.HealthCheckResponse.SERVING if serving else pb.HealthCheckResponse.NOT_SERVING
        self._wake()

    def close(self) -> None:
        """Ends all watch streams. They have no end of their own that a drain could wait for."""
        self._closed = True
        self._wake()

    async def check(self, request: pb.HealthCheckRequest, _: object) -> pb.HealthCheckResponse:
        if request.service not in self._services:
            raise ServiceNotFound("unknown service")
        return pb.HealthCheckResponse(status=self._status)

    async def watch(self, request: pb.HealthCheckRequest, _: object) -> AsyncIterator[pb.HealthCheckResponse]:
        """The status now and at each change; SERVICE_UNKNOWN for a service that does not exist."""
        sent = None
        while True:
            changed = self._changed
            known = request.service in self._services
            status = self._status if known else pb.HealthCheckResponse.SERVICE_UNKNOWN
            if status != sent:
                sent = status
                yield pb.HealthCheckResponse(status=status)
            if self._closed:
                raise NotReady("the server is shutting down")
            await changed.wait()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
