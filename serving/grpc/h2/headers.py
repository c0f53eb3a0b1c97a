"""Header blocks (HPACK, RFC 7541): decoded within limits and behind a cache, written as literals.

The tables and Huffman's code are the `hpack` library's. The loop over a block is ours, because limits have to count
while a block is decoded: a field beyond them is decoded for what it does to the dynamic table, and not kept.

A client sends the same block call after call. A block that adds nothing to the dynamic table means the same as long
as the table is the same, so what was read from it is kept, and only new blocks are decoded. Replies use no dynamic
table: their blocks are constants, and no state is kept for a connection.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec
from hpack import HPACKDecodingError, HPACKError
from hpack.huffman_table import decode_huffman
from hpack.table import HeaderTable

from serving.grpc.h2.frames import ConnectionFault, ErrorCode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from serving.grpc.h2.limits import Limits

FIELD_OVERHEAD = 32
"""What a field counts beside its name and value (RFC 9113, 6.5.2)."""

DEFAULT_TABLE_BYTES = 4096
"""Of the dynamic table, both ways, unless a peer wants another size."""

RESIZED_TABLE = b"\x20"
"""Begins the first header block behind a wish for a smaller table (RFC 7541, 4.2): none at all is used."""

_CACHED_BLOCKS = 32
_CACHED_BLOCK_BYTES = 2048
_MAX_TABLE_RESIZES = 8
_MAX_INTEGER_SHIFT = 28

_ONE_BYTE_LENGTH = 127
_STATUS = b"\x08"  # a literal without indexing, named by the static table's entry 8

_REQUIRED = {b":method", b":scheme", b":path"}
_PSEUDO = _REQUIRED | {b":authority"}
_CONNECTION_FIELDS = {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
_NAME = re.compile(rb":?[!-9;-@[-~]+")  # no capitals
_BAD_VALUE = re.compile(rb"[\0\r\n]")


class Headers(msgspec.Struct, eq=False):
    """The fields of a request.

    Attributes:
        fields: In their order; cut off where a limit was exceeded.
        size: Of the whole list, as RFC 9113 counts it.
        count: Of the whole list.
        content_length: What the field of that name says.
        memo: For the caller: whatever it made of the fields. When the same block comes again on the same connection,
            the same object is handed out, unless `H2Connection.forget_headers` was called in between.
    """

    fields: list[tuple[bytes, bytes]]
    size: int
    count: int
    content_length: int | None = None
    memo: Any = None


class HeaderDecoder:
    """The decoder of one connection.

    Attributes:
        decoded_fields: How many fields were decoded since this was last set to 0; those from the cache do not count.
    """

    def __init__(self, limits: Limits) -> None:
        self.decoded_fields = 0
        self._limits = limits
        self._table = HeaderTable()
        self._cache: dict[bytes, Headers | None] = {}

    def request(self, block: bytes) -> Headers | None:
        """The fields of a request; None where they are malformed (RFC 9113, 8.2 and 8.3)."""
        try:
            return self._cache[block]
        except KeyError:
            pass
        headers, table_changed = self._decode(block)
        result = headers if self._exceeds_limits(headers) or _well_formed(headers) else None
        if table_changed or len(self._cache) >= _CACHED_BLOCKS:
            self._cache.clear()
        if not table_changed and len(block) <= _CACHED_BLOCK_BYTES:
            self._cache[block] = result
        return result

    def trailers(self, block: bytes) -> bool:
        """Whether a block is well-formed as trailers; their fields are thrown away."""
        headers, table_changed = self._decode(block)
        if table_changed:
            self._cache.clear()
        return not any(name.startswith(b":") for name, _ in headers.fields)

    def forget(self) -> None:
        self._cache.clear()

    def _exceeds_limits(self, headers: Headers) -> bool:
        return headers.size > self._limits.header_bytes or headers.count > self._limits.header_fields

    def _decode(self, block: bytes) -> tuple[Headers, bool]:
        """The fields of a block, and whether it changed the dynamic table."""
        try:
            return self._decode_fields(block)
        except (HPACKError, IndexError):
            raise ConnectionFault(ErrorCode.COMPRESSION_ERROR, "headers that cannot be decoded") from None

    def _decode_fields(self, block: bytes) -> tuple[Headers, bool]:
        table, limits = self._table, self._limits
        fields: list[tuple[bytes, bytes]] = []
        at = size = count = resizes = 0
        table_changed = False
        while at < len(block):
            first = block[at]
            if first & 0x80:
                index, at = _integer(block, at, 0x7F)
                field = table.get_by_index(index)
            elif first & 0xE0 == 0x20:  # noqa: PLR2004  001: a new size of the table
                table.maxsize, at = _integer(block, at, 0x1F)
                resizes += 1
                if count or resizes > _MAX_TABLE_RESIZES or table.maxsize > DEFAULT_TABLE_BYTES:
                    raise HPACKDecodingError("a change of the table's size that is not allowed")
                table_changed = True
                continue
            else:
                indexed = first & 0x40
                index, at = _integer(block, at, 0x3F if indexed else 0x0F)
                if index:
                    name = table.get_by_index(index)[0]
                else:
                    name, at = _string(block, at)
                value, at = _string(block, at)
                field = (name, value)
                if indexed:
                    table.add(name, value)
                    table_changed = True
            count += 1
            size += FIELD_OVERHEAD + len(field[0]) + len(field[1])
            if size > limits.decoded_header_bytes:
                raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "headers far beyond the limit")
            if size <= limits.header_bytes and count <= limits.header_fields:
                fields.append(field)
        self.decoded_fields += count
        return Headers(fields, size, count), table_changed


def _integer(data: bytes, at: int, mask: int) -> tuple[int, int]:
    """An integer whose first bits lie under `mask`, and where it ends (RFC 7541, 5.1)."""
    number = data[at] & mask
    at += 1
    if number < mask:
        return number, at
    shift = 0
    while True:
        octet = data[at]
        at += 1
        number += (octet & 0x7F) << shift
        if octet < 0x80:  # noqa: PLR2004  seven bits a byte
            return number, at
        shift += 7
        if shift > _MAX_INTEGER_SHIFT:
            raise HPACKDecodingError("an integer beyond 32 bits")


def _string(data: bytes, at: int) -> tuple[bytes, int]:
    """A string, and where it ends (RFC 7541, 5.2)."""
    huffman = data[at] & 0x80
    size, at = _integer(data, at, 0x7F)
    end = at + size
    if end > len(data):
        raise HPACKDecodingError("a string beyond its block")
    value = data[at:end]
    return bytes(decode_huffman(value)) if huffman else value, end


def _well_formed(headers: Headers) -> bool:
    """Checks the fields of a request (RFC 9113, 8.2 and 8.3), and reads how long its body is said to be."""
    fields = headers.fields
    values = dict(fields)
    pseudo = [name for name, _ in fields if name.startswith(b":")]
    length = values.get(b"content-length")
    if length is not None:
        if not length.isdigit():
            return False
        headers.content_length = int(length)
    return (
        len(set(pseudo)) == len(pseudo)
        and _PSEUDO.issuperset(pseudo)
        and values.keys() >= _REQUIRED
        and values[b":path"] != b""
        and all(name.startswith(b":") for name, _ in fields[: len(pseudo)])
        and _CONNECTION_FIELDS.isdisjoint(values)
        and values.get(b"te", b"trailers") == b"trailers"
        and all(_NAME.fullmatch(name) for name, _ in fields)
        and not any(_BAD_VALUE.search(value) for _, value in fields)
    )


def encode_status(status: int) -> bytes:
    """`:status`, with which the header block of a reply begins."""
    return _STATUS + _literal(b"%d" % status)


def encode_fields(fields: Iterable[tuple[str, str]]) -> bytes:
    """Fields as a header block, or as its continuation: any such blocks can be put together."""
    return b"".join([_field_name(name) + _literal(value.encode()) for name, value in fields])


@cache
def _field_name(name: str) -> bytes:
    """The beginning of a literal without indexing; the names are the server's own, so they are few."""
    return b"\x00" + _literal(name.encode())


def _literal(value: bytes) -> bytes:
    """A string without Huffman's code."""
    size = len(value)
    if size < _ONE_BYTE_LENGTH:
        return b"%c%b" % (size, value)
    length = bytearray([_ONE_BYTE_LENGTH])
    size -= _ONE_BYTE_LENGTH
    while size >= 0x80:  # noqa: PLR2004  seven bits a byte
        length.append(size & 0x7F | 0x80)
        size >>= 7
    length.append(size)
    return bytes(length) + value
