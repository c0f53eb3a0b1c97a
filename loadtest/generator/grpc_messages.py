"""The messages of `ModelInfer` (Open Inference Protocol over gRPC), written by hand: no generated code is needed."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from loadtest.errors import BenchError

if TYPE_CHECKING:
    from loadtest.generator.wire import Reply

METHOD = "/inference.GRPCInferenceService/ModelInfer"
_BYTES_FIELD = 2  # wire type of protobuf's length-delimited fields


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:  # noqa: PLR2004  seven bits a byte, as protobuf has it
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | _BYTES_FIELD) + _varint(len(data)) + data


def request_bytes(model: str, text: str, identity: str = "") -> bytes:
    """A `ModelInferRequest` of the Open Inference Protocol: one text in the input `text` BYTES [1, 1].

    Written by hand, field numbers as in the protocol's `grpc_service.proto`, so that no generated code is
    needed to know the server by.
    """
    data = text.encode()
    tensor = _field(1, b"text") + _field(2, b"BYTES") + _field(3, _varint(1) * 2)
    named = _field(1, model.encode()) + (_field(3, identity.encode()) if identity else b"")
    return named + _field(5, tensor) + _field(7, struct.pack("<I", len(data)) + data)


class ReplyCheck:
    """Looks whether replies hold one embedding.

    `raw_output_contents`, the last field of a `ModelInferResponse`, holds the vector as little-endian FP32;
    what stands before it is equal in every reply of a model, so all have one size.
    """

    def __init__(self, hidden_size: int) -> None:
        """Expects vectors of so many numbers."""
        self._format = struct.Struct(f"<{hidden_size}f")
        self._start = _field(6, bytes(self._format.size))[: -self._format.size]
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
