"""The messages of `ModelInfer` (Open Inference Protocol over gRPC), written by hand: no generated code is needed."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from loadtest.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from loadtest.generator.wire import Reply

METHOD = "/inference.GRPCInferenceService/ModelInfer"
_INT64_PARAMETER = b"\x10"  # of `InferParameter`: field 2, a number
_BYTES_FIELD = 2  # wire type of protobuf's length-delimited fields


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:  # noqa: PLR2004  seven bits a byte, as protobuf has it
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def bytes_field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | _BYTES_FIELD) + _varint(len(data)) + data


def request_bytes(model: str, text: str, identity: str = "") -> bytes:
    """A `ModelInferRequest` of the Open Inference Protocol: one text in the input `text` BYTES [1, 1]."""
    return infer_bytes(model, {"text": [text]}, identity)


def infer_bytes(model: str, tensors: Mapping[str, Sequence[str]], identity: str = "", timeout_us: int = 0) -> bytes:
    """A `ModelInferRequest` with inputs BYTES [n, 1].

    Written by hand, field numbers as in the protocol's `grpc_service.proto`, so that no generated code is
    needed to know the server by.

    Args:
        model: Its name.
        tensors: The texts in each input.
        identity: The request's id; empty: none.
        timeout_us: The deadline, in microseconds; 0: none.
    """
    named = bytes_field(1, model.encode()) + (bytes_field(3, identity.encode()) if identity else b"")
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
    """The elements of a BYTES tensor: each with its length in front."""
    encoded = [text.encode() for text in texts]
    return b"".join([part for data in encoded for part in (struct.pack("<I", len(data)), data)])


def string_message(**fields: str) -> bytes:
    """A message of texts alone, each called after its number: `string_message(f1="minilm")`."""
    return b"".join(bytes_field(int(name[1:]), value.encode()) for name, value in fields.items())


def fields_in(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message, in order: numbers for those of the wire type 0, bytes for those with a length.

    Raises:
        ValueError: It is no such message.
    """
    at = 0
    while at < len(message):
        key, at = _read_varint(message, at)
        value, at = _read_varint(message, at)
        if key & 7 == _BYTES_FIELD:
            data = message[at : at + value]
            if len(data) != value:
                raise ValueError("a field that is cut off")
            yield key >> 3, data
            at += value
        elif key & 7:
            raise ValueError(f"the wire type {key & 7}")
        else:
            yield key >> 3, value


def varints_in(data: bytes) -> list[int]:
    """Packed numbers.

    Raises:
        ValueError: The last is cut off.
    """
    found, at = [], 0
    while at < len(data):
        value, at = _read_varint(data, at)
        found.append(value)
    return found


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """A number, and where it ends."""
    value = shift = 0
    while at < len(data):
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if not data[at - 1] & 128:
            return value, at
    raise ValueError("a number that is cut off")


class ReplyCheck:
    """Looks whether replies hold one embedding.

    `raw_output_contents`, the last field of a `ModelInferResponse`, holds the vector as little-endian FP32;
    what stands before it is equal in every reply of a model, so all have one size.
    """

    def __init__(self, hidden_size: int) -> None:
        """Expects vectors of so many numbers."""
        self._format = struct.Struct(f"<{hidden_size}f")
        self._start = bytes_field(6, bytes(self._format.size))[: -self._format.size]
        self._tail = len(self._start) + self._format.size
        self._size = 0

    def check(self, reply: Reply) -> None:
        """Checks a reply.

        Raises:
            BenchError: It is a failure, holds no embedding, or has another size than the first one.
        """
        if reply.fault:
            raise BenchError(f"a call over gRPC failed: {reply.fault}: {reply.body.decode('utf-8', 'replace')}")
        self.check_message(reply.body)

    def check_message(self, reply: bytes) -> None:
        """Checks a reply's message; see `check`."""
        self._size = self._size or len(reply)
        if len(reply) != self._size or not reply.startswith(self._start, -self._tail):
            raise BenchError(f"a wrong reply over gRPC ({len(reply)} bytes, the first one had {self._size})")

    def vector(self, reply: bytes) -> list[float]:
        """The embedding in a reply that was checked."""
        return list(self._format.unpack(reply[-self._format.size :]))
