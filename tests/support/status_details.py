"""google.rpc.Status and RetryInfo as their definitions have them, for tests of what a client reads."""

from __future__ import annotations

import base64
from typing import Any, cast

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration

_TYPES = {"int32": 5, "string": 9, "message": 11}


def _file() -> descriptor_pb2.FileDescriptorProto:
    """google/rpc/status.proto and error_details.proto, as far as they are used."""
    file = descriptor_pb2.FileDescriptorProto(name="rpc_for_tests.proto", package="google.rpc", syntax="proto3")
    file.dependency.extend([AnyMessage.DESCRIPTOR.file.name, Duration.DESCRIPTOR.file.name])
    status = file.message_type.add(name="Status")
    status.field.add(name="code", number=1, type=_TYPES["int32"], label=1)
    status.field.add(name="message", number=2, type=_TYPES["string"], label=1)
    status.field.add(name="details", number=3, type=_TYPES["message"], label=3, type_name=".google.protobuf.Any")
    retry = file.message_type.add(name="RetryInfo")
    retry.field.add(
        name="retry_delay", number=1, type=_TYPES["message"], label=1, type_name=".google.protobuf.Duration"
    )
    return file


_POOL = descriptor_pool.Default()
_POOL.Add(_file())  # type: ignore[no-untyped-call]
_Status, _RetryInfo = (
    message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"google.rpc.{name}"))  # type: ignore[no-untyped-call]
    for name in ("Status", "RetryInfo")
)


def read(trailer: str | bytes) -> tuple[int, str, float]:
    """The code, the message and the delay in seconds of `grpc-status-details-bin`, decoded or still in base64."""
    data = trailer if isinstance(trailer, bytes) else base64.b64decode(trailer + "=" * (-len(trailer) % 4))
    status = cast("Any", _Status.FromString(data))
    (detail,) = status.details
    retry = cast("Any", _RetryInfo())
    assert detail.Unpack(retry), detail.type_url
    return status.code, status.message, retry.retry_delay.ToTimedelta().total_seconds()
