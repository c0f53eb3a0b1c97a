"""Reads google.rpc.Status and RetryInfo, for tests of what a client reads."""

from __future__ import annotations

import base64

from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status


def read(trailer: str | bytes) -> tuple[int, str, float]:
    """The code, the message and the delay in seconds of `grpc-status-details-bin`, decoded or still in base64."""
    data = trailer if isinstance(trailer, bytes) else base64.b64decode(trailer + "=" * (-len(trailer) % 4))
    status = Status.FromString(data)
    (detail,) = status.details
    retry = RetryInfo()
    assert detail.Unpack(retry), detail.type_url
    return status.code, status.message, retry.retry_delay.ToTimedelta().total_seconds()
