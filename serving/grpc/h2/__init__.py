"""The server side of HTTP/2 (RFC 9113) and HPACK (RFC 7541): bytes in, events and bytes out. See README.md."""

from bertserve.serving.grpc.h2.connection import H2Connection, H2Phase
from bertserve.serving.grpc.h2.flow import (
    ConnectionFailed,
    DataReceived,
    DataSent,
    Event,
    RequestReceived,
    Stream,
    StreamReset,
)
from bertserve.serving.grpc.h2.frames import PREFACE, ErrorCode, Limits
from bertserve.serving.grpc.h2.headers import Headers, encode_fields, encode_status

__all__ = [
    "PREFACE",
    "ConnectionFailed",
    "DataReceived",
    "DataSent",
    "ErrorCode",
    "Event",
    "H2Connection",
    "H2Phase",
    "Headers",
    "Limits",
    "RequestReceived",
    "Stream",
    "StreamReset",
    "encode_fields",
    "encode_status",
]
