"""`grpc-status-details-bin`: a google.rpc.Status with a google.rpc.RetryInfo, by which clients know when to come back.

Both messages are a handful of fields (google/rpc/status.proto, error_details.proto, google/protobuf/duration.proto),
so they are written here field by field instead of with a library of all of Google's definitions.
"""

from __future__ import annotations

from base64 import b64encode

_RETRY_INFO = b"type.googleapis.com/google.rpc.RetryInfo"
_VARINT, _BYTES = 0, 2


def retry_details(code: int, message: str, retry_after_ms: int) -> str:
    """The value of the trailer, base64 without padding as gRPC wants it.

    Args:
        code: gRPC's status code.
        message: What the status says.
        retry_after_ms: When to come back.
    """
    seconds, rest_ms = divmod(retry_after_ms, 1000)
    delay = _number(1, seconds) + _number(2, rest_ms * 1_000_000)  # Duration: seconds, nanos
    detail = _field(1, _RETRY_INFO) + _field(2, _field(1, delay))  # Any: type_url, value = RetryInfo: retry_delay
    status = _number(1, code) + _field(2, message.encode()) + _field(3, detail)
    return b64encode(status).rstrip(b"=").decode()


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3 | _VARINT) + _varint(value)


def _field(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | _BYTES) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:  # noqa: PLR2004  seven bits a byte
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
