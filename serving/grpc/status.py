"""gRPC status codes, and the header blocks that start and end replies (PROTOCOL-HTTP2.md)."""

from __future__ import annotations

from base64 import b64encode
from typing import TYPE_CHECKING
from urllib.parse import quote

from google.rpc.code_pb2 import Code
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from bertserve.serving.errors import MethodNotAllowed, NotReady, UnsupportedMediaType
from bertserve.serving.grpc.h2 import encode_fields, encode_status

if TYPE_CHECKING:
    from bertserve.serving.errors import BertserveError

STATUS: dict[str, int] = dict(Code.items())
"""gRPC's status codes by name."""

OK_TRAILERS = encode_fields([("grpc-status", "0")])

_CONTENT_TYPE = encode_fields([("content-type", "application/grpc")])
_PLAIN = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
_MESSAGE_CHARACTERS = 2000


def reply_headers(http_status: int = 200) -> bytes:
    return encode_status(http_status) + _CONTENT_TYPE


REPLY_HEADERS = reply_headers()


def error_trailers(error: BertserveError, request_id: str) -> bytes:
    code = STATUS[error.grpc_code]
    fields = [
        ("grpc-status", str(code)),
        ("grpc-message", quote(error.message[:_MESSAGE_CHARACTERS], safe=_PLAIN)),
        ("bertserve-reason", error.reason),
        ("x-request-id", request_id),
    ]
    if (after_ms := error.retry_after_ms) is not None:
        details = retry_details(code, error.message, after_ms)
        fields += [("retry-after-ms", str(after_ms)), ("grpc-status-details-bin", details)]
    if isinstance(error, NotReady) and not error.begun:
        fields.append(("bertserve-computed", "none"))
    if isinstance(error, UnsupportedMediaType):
        fields.append(("grpc-accept-encoding", "identity,deflate,gzip"))
    elif isinstance(error, MethodNotAllowed):
        fields.append(("allow", error.allowed))
    return encode_fields(fields)


def retry_details(code: int, message: str, retry_after_ms: int) -> str:
    """The value of `grpc-status-details-bin`, without padding. It tells clients when to retry."""
    status = Status(code=code, message=message)
    retry = RetryInfo()
    retry.retry_delay.FromMilliseconds(retry_after_ms)
    status.details.add().Pack(retry)
    return b64encode(status.SerializeToString()).rstrip(b"=").decode()
