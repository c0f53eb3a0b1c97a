"""gRPC's unary calls over HTTP/2 (RFC 9113), as lean as a load test needs a client to be.

gRPC's own library spends some 300 us of CPU on a call from Python; here the header block of a method is made
once, and a call is two frames around bytes made beforehand. Header blocks that come are cut into fields, and
the package `hpack` decodes each distinct field once: the server is told to keep no dynamic table, so a field's
bytes always mean the same.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import TYPE_CHECKING
from urllib.parse import unquote

from hpack import Decoder, HPACKError

from loadtest.errors import BenchError
from loadtest.generator.wire import Reply, Served

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_FRAME = struct.Struct(">HBBBI")
"""A frame's head: length as 16 + 8 bits, kind, flags, stream."""

_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
_ACK = _END_STREAM = 0x1
_END_HEADERS, _PADDED, _PRIORITISED = 0x4, 0x8, 0x20
_HEADER_TABLE_SIZE, _ENABLE_PUSH, _MAX_CONCURRENT_STREAMS, _INITIAL_WINDOW_SIZE = 1, 2, 3, 4
_LARGEST = 2**31 - 1
_DEFAULT_WINDOW = 65_535
_FRAME_BYTES = 16_384
_MANY_STREAMS = 1 << 20
_KEPT_FIELDS = 1 << 16

_INDEXED, _INDEXING, _SIZE_UPDATE, _NEVER_INDEXED = 0x80, 0x40, 0x20, 0x10
_KIND = 0xE0
"""The bits that tell representations of a field apart (RFC 7541, 6)."""

_HUFFMAN_AND_LENGTH = 7

_CODES = (
    *("OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS"),
    *("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED"),
    *("INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"),
)

Field = tuple[bytes, bytes]
Pair = tuple[str, str]


def prefixed(message: bytes) -> bytes:
    """A message as gRPC frames it: not compressed, its length, its bytes."""
    return struct.pack(">BI", 0, len(message)) + message


def header_block(fields: Sequence[Pair]) -> bytes:
    """Fields as literals that nobody indexes (RFC 7541, 6.2.2), without Huffman's code."""
    return b"".join(b"\0" + _literal(name.encode()) + _literal(value.encode()) for name, value in fields)


def _literal(value: bytes) -> bytes:
    left = len(value) - 127
    if left < 0:
        return bytes([len(value)]) + value
    length = bytearray([127])
    while left > 127:  # noqa: PLR2004  seven bits a byte
        length.append(left & 127 | 128)
        left >>= 7
    length.append(left)
    return bytes(length) + value


class FieldReader:
    """Reads header blocks of a peer that keeps no dynamic table."""

    def __init__(self) -> None:
        """Starts knowing no field."""
        self._known: dict[bytes, Field] = {}

    def fields(self, block: bytes) -> Iterator[Field]:
        """The fields of a block, in order and each as soon as it is wanted.

        Raises:
            BenchError: It cannot be decoded, or refers to a dynamic table.
        """
        at, known = 0, self._known
        try:
            while at < len(block):
                stop = _end_of_field(block, at)
                if block[at] & _KIND != _SIZE_UPDATE:
                    data = block[at:stop]
                    yield known.get(data) or self._decode(data)
                at = stop
        except IndexError:
            raise BenchError(f"a broken header block over gRPC: {block.hex()}") from None

    def _decode(self, data: bytes) -> Field:
        try:
            [found] = Decoder().decode(data, raw=True)
        except (HPACKError, ValueError) as error:
            raise BenchError(f"a header over gRPC that cannot be decoded ({error}): {data.hex()}") from error
        if len(self._known) >= _KEPT_FIELDS:
            self._known.clear()
        self._known[data] = field = (bytes(found[0]), bytes(found[1]))
        return field


def _end_of_field(block: bytes, at: int) -> int:
    """Where a field or a size update ends (RFC 7541, 6)."""
    first = block[at]
    if not first & ~_NEVER_INDEXED:  # the usual one, a literal with its name, without the steps of the others
        name = block[at + 1] & 127
        value = block[at + 2 + name] & 127
        if name < 127 and value < 127:  # noqa: PLR2004  lengths of one byte
            stop = at + 3 + name + value
            if stop > len(block):
                raise IndexError
            return stop
    if first & _INDEXED:
        return _end_of_integer(block, at, 7)
    if first & _KIND == _SIZE_UPDATE:
        return _end_of_integer(block, at, 5)
    bits = 6 if first & _INDEXING else 4
    stop = _end_of_integer(block, at, bits)
    if not first & ((1 << bits) - 1):  # no index: the name stands here, too
        stop = _end_of_string(block, stop)
    return _end_of_string(block, stop)


def _end_of_integer(block: bytes, at: int, bits: int) -> int:
    """Where an integer with a prefix of so many bits ends (RFC 7541, 5.1)."""
    full = (1 << bits) - 1
    if block[at] & full < full:
        return at + 1
    at += 1
    while block[at] & 128:
        at += 1
    return at + 1


def _end_of_string(block: bytes, at: int) -> int:
    """Where a string ends (RFC 7541, 5.2)."""
    size = block[at] & 127
    start = at + 1
    if size == 127:  # noqa: PLR2004  a length that goes on
        start = _end_of_integer(block, at, _HUFFMAN_AND_LENGTH)
        for shift, byte in enumerate(block[at + 1 : start]):
            size += (byte & 127) << 7 * shift
    if start + size > len(block):
        raise IndexError
    return start + size


class _Stream:
    """A call under way."""

    __slots__ = ("block", "body", "ended", "tag", "window")

    def __init__(self, tag: object, window: int) -> None:
        self.tag = tag
        self.window = window
        self.block = b""
        self.body = b""
        self.ended = 0


class GrpcWire:
    """One connection, which carries calls of one method side by side."""

    is_open = True

    def __init__(self, authority: str, path: str, metadata: Sequence[Pair] = (), scheme: str = "http") -> None:
        """Starts a new connection.

        Args:
            authority: `host:port` of the server.
            path: `/package.Service/Method`.
            metadata: Sent with every call.
            scheme: `https` in TLS.
        """
        pseudo = [(":method", "POST"), (":scheme", scheme), (":path", path), (":authority", authority)]
        self._head = header_block([*pseudo, ("te", "trailers"), ("content-type", "application/grpc"), *metadata])
        self._head_size = (len(self._head) >> 8, len(self._head) & 255)
        self._reader = FieldReader()
        self._streams: dict[int, _Stream] = {}
        self._next = 1
        self._most = _MANY_STREAMS
        self._window = self._stream_window = _DEFAULT_WINDOW
        self._held: deque[tuple[int, bytes]] = deque()
        self._owed = b""
        self._rest = b""
        self._taken = 0
        self._leaving = False

    def opening(self) -> bytes:
        """The preface, with windows that a reply never fills and without a dynamic table."""
        values = {_HEADER_TABLE_SIZE: 0, _ENABLE_PUSH: 0, _INITIAL_WINDOW_SIZE: _LARGEST}
        payload = b"".join(struct.pack(">HI", *pair) for pair in values.items())
        window = struct.pack(">I", _LARGEST - _DEFAULT_WINDOW)
        return _PREFACE + _frame(_SETTINGS, 0, 0, payload) + _frame(_WINDOW_UPDATE, 0, 0, window)

    def room(self) -> int:
        """The streams that the server still takes."""
        return 0 if self._leaving else max(0, self._most - len(self._streams))

    def request(self, message: bytes, tag: object) -> bytes:
        """The call's frames, as far as the server's windows let them out; the rest is owed later.

        Args:
            message: With gRPC's prefix, see `prefixed`.
            tag: Comes back with the reply.
        """
        number, size = self._next, len(message)
        self._next += 2
        self._streams[number] = stream = _Stream(tag, self._stream_window)
        head = _FRAME.pack(*self._head_size, _HEADERS, _END_HEADERS, number) + self._head
        if self._held or size > min(self._window, stream.window, _FRAME_BYTES):
            self._held.append((number, message))
            return head + self._let_out()
        self._window -= size
        return b"%b%b%b" % (head, _FRAME.pack(size >> 8, size & 255, _DATA, _END_STREAM, number), message)

    def feed(self, data: bytes) -> Sequence[Reply]:
        """Takes what came and returns the replies that are whole now.

        Raises:
            BenchError: The connection ended, or the server broke the protocol.
        """
        if not data:
            raise BenchError("the server closed a connection over gRPC")
        if self._rest:
            data = self._rest + data
        replies: list[Reply] = []
        at, end = 0, len(data)
        while end - at >= _FRAME.size:
            high, low, kind, flags, number = _FRAME.unpack_from(data, at)
            start = at + _FRAME.size
            stop = start + (high << 8 | low)
            if stop > end:
                break
            at = stop
            if kind <= _HEADERS or kind == _CONTINUATION:
                self._take(kind, flags, number, data[start:stop], replies)
            else:
                self._control(kind, flags, number, data[start:stop], replies)
        self._rest = data[at:]
        return replies

    def owed(self) -> bytes:
        """Acknowledgements, and what earlier windows held back."""
        owed, self._owed = self._owed, b""
        return owed

    def served(self, head: bytes) -> Served:
        """What the trailers `bertserve-*` say."""
        said = {name: value for name, value in self._reader.fields(head) if name.startswith(b"bertserve-")}
        names = (b"tokenize", b"queue", b"compute", b"total")
        return Served(
            int(said.get(b"bertserve-tokens", -1)),
            *(float(said.get(b"bertserve-%b-us" % name, -1.0)) for name in names),
        )

    def _take(self, kind: int, flags: int, number: int, payload: bytes, replies: list[Reply]) -> None:
        """Takes a piece of a reply."""
        if kind == _DATA:
            self._count(len(payload))
        if flags & _PADDED and kind != _CONTINUATION:
            payload = payload[1 : len(payload) - payload[0]]
        if flags & _PRIORITISED and kind == _HEADERS:
            payload = payload[5:]
        stream = self._streams.get(number)
        if stream is None:
            return
        if kind == _DATA:
            stream.body = stream.body + payload if stream.body else payload
            whole = bool(flags & _END_STREAM)
        else:
            # The last block is the trailers, which alone say how a call went.
            stream.block = payload if kind == _HEADERS else stream.block + payload
            stream.ended |= flags & _END_STREAM if kind == _HEADERS else 0
            whole = bool(stream.ended and flags & _END_HEADERS)
        if whole:
            del self._streams[number]
            replies.append(self._reply(stream))

    def _reply(self, stream: _Stream) -> Reply:
        for name, value in self._reader.fields(stream.block):
            if name != b"grpc-status":
                continue
            if value != b"0":
                return Reply(stream.tag, _code(value), stream.block, self._words(stream.block))
            body = stream.body
            if len(body) < 5 or body[0] or int.from_bytes(body[1:5], "big") != len(body) - 5:  # noqa: PLR2004
                return Reply(stream.tag, "not one plain message", stream.block, body)
            return Reply(stream.tag, "", stream.block, body[5:])
        status = dict(self._reader.fields(stream.block)).get(b":status", b"no status").decode("latin-1")
        return Reply(stream.tag, f"no reply of gRPC ({status})", stream.block, stream.body)

    def _words(self, block: bytes) -> bytes:
        """The sentence of a failure; gRPC writes it with percent signs."""
        words = dict(self._reader.fields(block)).get(b"grpc-message", b"")
        return unquote(words.decode("latin-1")).encode()

    def _count(self, size: int) -> None:
        """Gives the connection's window back before it can be empty."""
        self._taken += size
        if self._taken > _LARGEST // 2:
            self._owed += _frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", self._taken))
            self._taken = 0

    def _control(self, kind: int, flags: int, number: int, payload: bytes, replies: list[Reply]) -> None:
        """Takes a frame that is no part of a reply; kinds that nobody knows are passed over."""
        if kind == _PING and not flags & _ACK:
            self._owed += _frame(_PING, _ACK, 0, payload)
        elif kind == _SETTINGS and not flags & _ACK:
            self._obey(dict(struct.iter_unpack(">HI", payload)))
        elif kind == _WINDOW_UPDATE:
            self._widen(number, int.from_bytes(payload, "big"))
        elif kind == _RST_STREAM and number in self._streams:
            stream = self._streams.pop(number)
            replies.append(Reply(stream.tag, f"reset with code {int.from_bytes(payload, 'big')}", b"", b""))
        elif kind == _GOAWAY:
            self._leave(payload, replies)

    def _obey(self, values: dict[int, int]) -> None:
        """Takes the server's settings; only those that bind a client that indexes nothing are looked at."""
        self._most = values.get(_MAX_CONCURRENT_STREAMS, self._most)
        window = values.get(_INITIAL_WINDOW_SIZE, self._stream_window)
        for stream in self._streams.values():
            stream.window += window - self._stream_window
        self._stream_window = window
        self._owed += _frame(_SETTINGS, _ACK, 0) + self._let_out()

    def _widen(self, number: int, size: int) -> None:
        if not number:
            self._window += size
        elif number in self._streams:
            self._streams[number].window += size
        if self._held:
            self._owed += self._let_out()

    def _let_out(self) -> bytes:
        """As many frames of what is held back as the windows allow, in order."""
        frames = b""
        while self._held:
            number, message = self._held[0]
            stream = self._streams.get(number)
            if stream is None:  # answered or reset before its message was out
                self._held.popleft()
                continue
            size = min(len(message), self._window, stream.window, _FRAME_BYTES)
            if size <= 0:
                break
            last = size == len(message)
            frames += _frame(_DATA, _END_STREAM if last else 0, number, message[:size])
            self._window -= size
            stream.window -= size
            if last:
                self._held.popleft()
            else:
                self._held[0] = (number, message[size:])
        return frames

    def _leave(self, payload: bytes, replies: list[Reply]) -> None:
        """Sends nothing more on this connection; calls that the server never saw are over."""
        last, code = struct.unpack_from(">II", payload)
        if code:
            words = payload[8:].decode("utf-8", "replace")
            raise BenchError(f"the server ended the connection over gRPC: code {code} {words}".rstrip())
        self._leaving = True
        unseen = [number for number in self._streams if number > last & _LARGEST]
        replies += [
            Reply(self._streams.pop(number).tag, "refused: the server goes away", b"", b"") for number in unseen
        ]


def _frame(kind: int, flags: int, number: int, payload: bytes = b"") -> bytes:
    return _FRAME.pack(len(payload) >> 8, len(payload) & 255, kind, flags, number) + payload


def _code(value: bytes) -> str:
    """The name of a status that is no success."""
    number = int(value) if value.isdigit() else len(_CODES)
    return _CODES[number] if number < len(_CODES) else f"grpc-status {value.decode('latin-1')}"
