"""`ModelInfer` messages (Open Inference Protocol over gRPC), encoded by hand without generated code."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from bertserve.loadtest.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from bertserve.loadtest.generator.wire import Reply

METHOD = "/inference.GRPCInferenceService/ModelInfer"
_INT64_PARAMETER = b"\x10"  # key of `InferParameter`'s field 2, an int64
_BYTES_FIELD = 2  # wire type of protobuf's length-delimited fields


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:  # noqa: PLR2004  protobuf varints have 7 bits per byte
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def bytes_field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | _BYTES_FIELD) + _varint(len(data)) + data


def request_bytes(model: str, text: str) -> bytes:
    """A `ModelInferRequest` with one text in the input `text`, BYTES [1, 1]."""
    return infer_bytes(model, {"text": [text]})


def infer_bytes(model: str, tensors: Mapping[str, Sequence[str]], timeout_us: int = 0) -> bytes:
    """A `ModelInferRequest` with inputs BYTES [n, 1].

    Encoded by hand with the field numbers of the protocol's `grpc_service.proto`, so that no generated code is needed.

    Args:
        model: The model's name.
        tensors: The texts of each input.
        timeout_us: The deadline, in microseconds; 0 for none.
    """
    named = bytes_field(1, model.encode())
    if timeout_us:
        named += bytes_field(4, bytes_field(1, b"timeout") + bytes_field(2, _INT64_PARAMETER + _varint(timeout_us)))
    inputs = [
        bytes_field(
            5,
            bytes_field(1, name.encode()) + bytes_field(2, b"BYTES") + bytes_field(3, _varint(len(texts)) + _varint(1)),
        )
        for name, texts in tensors.items()
    ]
    return b"".join((named, *inputs, *(bytes_field(7, bytes_tensor(texts)) for texts in tensors.values())))


def bytes_tensor(texts: Sequence[str]) -> bytes:
    """The elements of a BYTES tensor, each with a length prefix."""
    encoded = [text.encode() for text in texts]
    return b"".join([part for data in encoded for part in (struct.pack("<I", len(data)), data)])


def string_message(**fields: str) -> bytes:
    """A message of string fields, named by field number: `string_message(f1="minilm")`."""
    return b"".join(bytes_field(int(name[1:]), value.encode()) for name, value in fields.items())


def fields_in(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message, in order: numbers for wire type 0, bytes for length-delimited fields.

    Raises:
        ValueError: The message is malformed.
    """
    at = 0
    while at < len(message):
        key, at = _read_varint(message, at)
        value, at = _read_varint(message, at)
        if key & 7 == _BYTES_FIELD:
            data = message[at : at + value]
            if len(data) != value:
                raise ValueError("a truncated field")
            yield key >> 3, data
            at += value
        elif key & 7:
            raise ValueError(f"unknown wire type {key & 7}")
        else:
            yield key >> 3, value


def varints_in(data: bytes) -> list[int]:
    """Packed varints.

    Raises:
        ValueError: The last varint is truncated.
    """
    found, at = [], 0
    while at < len(data):
        value, at = _read_varint(data, at)
        found.append(value)
    return found


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """A varint and the offset of its end."""
    value = shift = 0
    while at < len(data):
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if not data[at - 1] & 128:
            return value, at
    raise ValueError("a truncated number")


class ReplyCheck:
    """Checks that replies hold one embedding.

    `raw_output_contents`, the last field of a `ModelInferResponse`, holds the vector as little-endian FP32. The bytes
    before it are equal in every reply of a model, so all replies have the same size.
    """

    def __init__(self, hidden_size: int) -> None:
        """Expects vectors of `hidden_size` numbers."""
        self._format = struct.Struct(f"<{hidden_size}f")
        self._start = bytes_field(6, bytes(self._format.size))[: -self._format.size]
        self._tail = len(self._start) + self._format.size
        self._size = 0

    def check(self, reply: Reply) -> None:
        """Checks a reply.

        Raises:
            BenchError: The request failed, or the reply holds no embedding or differs in size from the first one.
        """
        if reply.fault:
            raise BenchError(f"the gRPC call failed: {reply.fault}: {reply.body.decode('utf-8', 'replace')}")
        self.check_message(reply.body)

    def check_message(self, reply: bytes) -> None:
        """Checks the message of a reply; see `check`."""
        self._size = self._size or len(reply)
        if len(reply) != self._size or not reply.startswith(self._start, -self._tail):
            raise BenchError(f"wrong gRPC reply ({len(reply)} bytes, but the first reply had {self._size})")

    def vector(self, reply: bytes) -> list[float]:
        """The embedding in a checked reply."""
        return list(self._format.unpack(reply[-self._format.size :]))
