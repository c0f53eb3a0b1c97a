"""gRPC's server reflection: which services there are, and the files that describe their messages."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from google.protobuf import descriptor_pb2, descriptor_pool

from serving.grpc.calls import Method
from serving.grpc.services import reflection_pb2 as pb
from serving.grpc.status import STATUS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from google.protobuf.descriptor import FileDescriptor

SERVICES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
"""Two versions with the same messages; the first alone is described."""


class ReflectionService:
    """Answers from the descriptors of the messages that the server itself decodes with."""

    def __init__(self, services: Iterable[str]) -> None:
        self._services = sorted({*services, *SERVICES})
        self._pool = descriptor_pool.Default()

    def methods(self) -> dict[str, Method]:
        method = Method(pb.ServerReflectionRequest, duplex=self.info)
        return {f"/{service}/ServerReflectionInfo": method for service in SERVICES}

    async def info(self, request: pb.ServerReflectionRequest, _: object, __: object) -> pb.ServerReflectionResponse:
        reply = pb.ServerReflectionResponse(valid_host=request.host, original_request=request)
        asked = request.WhichOneof("message_request")
        with contextlib.suppress(KeyError):
            if asked == "list_services":
                reply.list_services_response.service.extend(pb.ServiceResponse(name=name) for name in self._services)
            elif asked == "file_by_filename":
                _describe(self._pool.FindFileByName(request.file_by_filename), reply)
            elif asked == "file_containing_symbol":
                _describe(self._file_of(request.file_containing_symbol), reply)
            elif asked == "all_extension_numbers_of_type":
                found = self._pool.FindMessageTypeByName(request.all_extension_numbers_of_type)
                reply.all_extension_numbers_response.base_type_name = found.full_name
        if reply.WhichOneof("message_response") is None:
            reply.error_response.error_code = STATUS["NOT_FOUND"]
            reply.error_response.error_message = "nothing of that name is described here"
        return reply

    def _file_of(self, symbol: str) -> FileDescriptor:
        """The file that a symbol is in; of a service's method the pool knows only the service."""
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            service, _, method = symbol.rpartition(".")
            return self._pool.FindServiceByName(service).methods_by_name[method].containing_service.file


def _describe(file: FileDescriptor, reply: pb.ServerReflectionResponse) -> None:
    """Adds a file and all that it imports."""
    pending, known = [file], {file.name}
    while pending:
        current = pending.pop()
        description = descriptor_pb2.FileDescriptorProto()
        current.CopyToProto(description)
        reply.file_descriptor_response.file_descriptor_proto.append(description.SerializeToString())
        pending += [other for other in current.dependencies if other.name not in known]
        known |= {other.name for other in current.dependencies}
