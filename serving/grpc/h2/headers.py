"""Header blocks (HPACK, RFC 7541): decoded within limits and cached, encoded as literals.

The tables come from the `hpack` library. The loop over a block is our own, because limits must apply while a block is
decoded: a field beyond them is decoded for its effect on the dynamic table, and not kept.

A client sends the same block with every call. A block that adds nothing to the dynamic table keeps its meaning as long
as the table is the same, so its decoded fields are cached. Replies use no dynamic table: their blocks are constants,
and need no state per connection.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec
from hpack import HPACKDecodingError, HPACKError
from hpack.huffman_table import HUFFMAN_COMPLETE, HUFFMAN_EMIT_SYMBOL, HUFFMAN_FAIL, HUFFMAN_TABLE
from hpack.table import HeaderTable

from bertserve.serving.grpc.h2.frames import ConnectionFault, ErrorCode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bertserve.serving.grpc.h2.frames import Limits

_NODES = 256
_NIBBLES = 16
_FAILED = _NODES


def decode_huffman(data: bytes) -> bytes:
    at, pieces = 0, []
    for byte in data:
        at += byte
        pieces.append(_EMITTED[at])
        at = _NEXT[at]
    if at not in _COMPLETE:
        raise HPACKDecodingError("an invalid Huffman code")
    return b"".join(pieces)


def _tables() -> tuple[list[int], list[bytes], set[int]]:
    """The tables of the Huffman decoder: where the next node begins, what is emitted, and where a string may end.

    The first two are lists, indexed by 256 times the node plus the byte. The third is a set of nodes.
    """
    starts = [_NODES * node for node in range(_NODES + 1)]
    rows = [HUFFMAN_TABLE[at : at + _NIBBLES] for at in range(0, len(HUFFMAN_TABLE), _NIBBLES)]
    complete = {0} | {starts[end] for row in rows for end, flags, _ in row if flags & HUFFMAN_COMPLETE}
    # A row's ends and symbols are the same, whichever first half of a byte leads to it.
    ends = [[starts[_FAILED if flags & HUFFMAN_FAIL else end] for end, flags, _ in row] for row in rows]
    symbols = [[bytes([one] if flags & HUFFMAN_EMIT_SYMBOL else []) for _, flags, one in row] for row in rows]
    following: list[int] = []
    emitted: list[bytes] = []
    for row, firsts in zip(rows, symbols, strict=True):
        for (middle, flags, _), first in zip(row, firsts, strict=True):
            following += [starts[_FAILED]] * _NIBBLES if flags & HUFFMAN_FAIL else ends[middle]
            emitted += [first + second for second in symbols[middle]] if first else symbols[middle]
    # No byte leads out of a failure. Equal strings are one object, which saves most of 2 MB.
    known: dict[bytes, bytes] = {}
    emitted = [known.setdefault(string, string) for string in emitted + [b""] * _NODES]
    return following + [starts[_FAILED]] * _NODES, emitted, complete


_NEXT, _EMITTED, _COMPLETE = _tables()


FIELD_OVERHEAD = 32
"""Bytes that a field counts besides its name and value (RFC 9113, 6.5.2)."""

DEFAULT_TABLE_BYTES = 4096
"""Size of the dynamic table, both ways, unless a peer asks for another one."""

RESIZED_TABLE = b"\x20"
"""Starts the first header block after a peer has asked for a smaller table (RFC 7541, 4.2). It sets the size to 0:
replies use no table."""

_CACHED_BLOCKS = 32
_CACHED_BLOCK_BYTES = 2048
_MAX_TABLE_RESIZES = 8
_MAX_INTEGER_SHIFT = 28
_MAX_LENGTH_DIGITS = 18

_FIELD_WORK = 2
_HUFFMAN_BYTES_OF_WORK = 8

_TABLE_STRING_BYTES = DEFAULT_TABLE_BYTES * 30 // 8
"""A longer encoded string cannot be an entry of the table: Huffman codes have up to 30 bits a byte."""

_ONE_BYTE_LENGTH = 127
_STATUS = b"\x08"  # a literal without indexing, named by the static table's entry 8

_REQUIRED = {b":method", b":scheme", b":path"}
_PSEUDO = _REQUIRED | {b":authority"}
_CONNECTION_FIELDS = {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
_NAMES = re.compile(rb"(?::?[!-9;-@[-~]+\n)*")  # no capitals
_BAD_VALUES = re.compile(rb"[\0\r]|[ \t]\n|\n[ \t]")  # RFC 9113, 8.2.1


class Headers(msgspec.Struct, eq=False):
    """The fields of a request.

    Attributes:
        fields: In their order; cut off where a limit was exceeded.
        size: Size of the whole list, as RFC 9113 counts it. A field skipped beyond the limit counts as encoded.
        count: Number of fields in the whole list.
        content_length: The value of that field; None if there is none.
        memo: Anything that the caller has derived from the fields. If the same block comes again on the connection, the
            same object is returned, unless `H2Connection.forget_headers` was called in between.
    """

    fields: list[tuple[bytes, bytes]]
    size: int
    count: int
    content_length: int | None = None
    memo: Any = None


class HeaderDecoder:
    """The decoder of one connection.

    Attributes:
        known: Decoded blocks that may come again.
        work: Work of decoding since this was last set to 0 (`Limits`).
    """

    def __init__(self, limits: Limits) -> None:
        self.known: dict[bytes, Headers] = {}
        self.work = 0
        self._limits = limits
        self._table = HeaderTable()

    def request(self, block: bytes) -> Headers | None:
        """The fields of a request; None if they are malformed (RFC 9113, 8.2 and 8.3)."""
        headers = self.known.get(block)
        if headers is not None:
            return headers
        headers, table_changed = self._decode(block)
        if not self._exceeds_limits(headers) and not _well_formed_request(headers):
            return None
        if not table_changed and len(block) <= _CACHED_BLOCK_BYTES:
            if len(self.known) >= _CACHED_BLOCKS:
                self.known.clear()
            self.known[block] = headers
        return headers

    def trailers(self, block: bytes) -> bool:
        """Whether a block is well-formed as trailers. Their fields are discarded."""
        headers, _ = self._decode(block)
        fields = headers.fields
        return (
            not self._exceeds_limits(headers)
            and not any(name.startswith(b":") for name, _ in fields)
            and _well_formed(fields)
        )

    def forget(self) -> None:
        self.known.clear()

    def _exceeds_limits(self, headers: Headers) -> bool:
        return headers.size > self._limits.header_bytes or headers.count > self._limits.header_fields

    def _decode(self, block: bytes) -> tuple[Headers, bool]:
        """The fields of a block, and whether it changed the dynamic table, which invalidates known blocks."""
        try:
            headers, table_changed = self._decode_fields(block)
        except (HPACKError, IndexError):
            raise ConnectionFault(ErrorCode.COMPRESSION_ERROR, "headers that cannot be decoded") from None
        if table_changed:
            self.known.clear()
        return headers, table_changed

    def _decode_fields(self, block: bytes) -> tuple[Headers, bool]:
        table, limits = self._table, self._limits
        most_bytes, most_fields = limits.header_bytes, limits.header_fields
        fields: list[tuple[bytes, bytes]] = []
        at = size = count = resizes = 0
        table_changed = False
        while at < len(block):
            first = block[at]
            count += 1
            if first & 0x80:
                index, at = _integer(block, at, 0x7F)
                name, value = table.get_by_index(index)
            elif first & 0xE0 == 0x20:  # noqa: PLR2004  001: a new table size
                count -= 1
                resizes += 1
                table.maxsize, at = _integer(block, at, 0x1F)
                if count or resizes > _MAX_TABLE_RESIZES or table.maxsize > DEFAULT_TABLE_BYTES:
                    raise HPACKDecodingError("a disallowed change of the table size")
                table_changed = True
                continue
            else:
                indexed = first & 0x40
                index, at = _integer(block, at, 0x3F if indexed else 0x0F)
                # Beyond the limit, only strings that the table keeps are decoded.
                room = most_bytes - size if count <= most_fields else 0
                if indexed:
                    room = max(room, _TABLE_STRING_BYTES)
                if index:
                    name = table.get_by_index(index)[0]
                else:
                    name, at = self._string(block, at, room)
                value, at = self._string(block, at, room)
                if indexed:
                    table.add(name, value)
                    table_changed = True
            size += FIELD_OVERHEAD + len(name) + len(value)
            if size > limits.decoded_header_bytes or count > limits.decoded_header_fields:
                raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "headers far above the limit")
            if size <= most_bytes and count <= most_fields:
                fields.append((name, value))
        self.work += _FIELD_WORK * count
        return Headers(fields, size, count), table_changed

    def _string(self, block: bytes, at: int, room: int) -> tuple[bytes, int]:
        """A string and its end (RFC 7541, 5.2). A string with more than `room` encoded bytes stays encoded."""
        huffman = block[at] & 0x80
        size, at = _integer(block, at, 0x7F)
        end = at + size
        if end > len(block):
            raise HPACKDecodingError("a string past the end of its block")
        value = block[at:end]
        if not huffman or size > room:
            return value, end
        self.work += size // _HUFFMAN_BYTES_OF_WORK
        return decode_huffman(value), end


def _integer(data: bytes, at: int, mask: int) -> tuple[int, int]:
    """An integer with the prefix bits in `mask`, and its end (RFC 7541, 5.1)."""
    number = data[at] & mask
    at += 1
    if number < mask:
        return number, at
    shift = 0
    while True:
        octet = data[at]
        at += 1
        number += (octet & 0x7F) << shift
        if octet < 0x80:  # noqa: PLR2004  seven bits per byte
            return number, at
        shift += 7
        if shift > _MAX_INTEGER_SHIFT:
            raise HPACKDecodingError("an integer beyond 32 bits")


def _well_formed_request(headers: Headers) -> bool:
    """Checks the fields of a request (RFC 9113, 8.3), and reads its content length."""
    fields = headers.fields
    values = dict(fields)
    pseudo = [name for name, _ in fields if name.startswith(b":")]
    if b"content-length" in values:
        lengths = {value for name, value in fields if name == b"content-length"}
        length = lengths.pop()
        if lengths or not length.isdigit() or len(length) > _MAX_LENGTH_DIGITS:
            return False
        headers.content_length = int(length)
    return (
        len(set(pseudo)) == len(pseudo)
        and _PSEUDO.issuperset(pseudo)
        and values.keys() >= _REQUIRED
        and values[b":path"] != b""
        and all(name.startswith(b":") for name, _ in fields[: len(pseudo)])
        and _well_formed(fields)
    )


def _well_formed(fields: list[tuple[bytes, bytes]]) -> bool:
    """Checks all names and values (RFC 9113, 8.2) at once."""
    names = [name for name, _ in fields]
    name_lines = b"\n".join([*names, b""])
    value_lines = b"\n".join([b"", *[value for _, value in fields], b""])
    return (
        _CONNECTION_FIELDS.isdisjoint(names)
        and (b"te" not in names or all(value == b"trailers" for name, value in fields if name == b"te"))
        and _NAMES.fullmatch(name_lines) is not None
        and not _BAD_VALUES.search(value_lines)
        and name_lines.count(b"\n") + value_lines.count(b"\n") == 2 * len(fields) + 1
    )


def encode_status(status: int) -> bytes:
    """The field `:status`, which starts the header block of a reply."""
    return _STATUS + _literal(b"%d" % status)


def encode_fields(fields: Iterable[tuple[str, str]]) -> bytes:
    """Encodes fields as a header block. Such blocks can be concatenated."""
    block = b""
    for name, value in fields:
        block += _field_name(name) + _literal(value.encode())
    return block


@cache
def _field_name(name: str) -> bytes:
    """The start of a literal without indexing. The server uses few names, so the cache stays small."""
    return b"\x00" + _literal(name.encode())


def _literal(value: bytes) -> bytes:
    """A string without Huffman coding."""
    size = len(value)
    if size < _ONE_BYTE_LENGTH:
        return b"%c%b" % (size, value)
    length = bytearray([_ONE_BYTE_LENGTH])
    size -= _ONE_BYTE_LENGTH
    while size >= 0x80:  # noqa: PLR2004  seven bits per byte
        length.append(size & 0x7F | 0x80)
        size >>= 7
    length.append(size)
    return bytes(length) + value
