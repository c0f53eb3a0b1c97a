"""Header blocks (HPACK, RFC 7541): decoded behind a cache, written as literals.

A client sends the same block call after call. A block that adds nothing to the dynamic table means the same as
long as the table is the same, so what was made of it is kept, and only a new block is decoded. Replies use no
dynamic table at all: their blocks are constants, and no state is kept for a connection.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Generic, TypeVar

from hpack import Decoder, HPACKError, OversizedHeaderListError

from serving.grpc.h2.frames import Code, ConnectionFault

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

H = TypeVar("H")
Fields = list[tuple[bytes, bytes]]

DECODING_FACTOR = 4
"""A list so many times larger than the limit is not even decoded to be refused: the connection ends."""

_KEPT_BLOCKS = 32
_KEPT_BYTES = 2048

_ONE_BYTE_LENGTH = 127
_STATUS = b"\x08"  # a literal without indexing, named by the static table's entry 8


class HeaderReader(Generic[H]):
    """The decoder of one connection."""

    def __init__(self, interpret: Callable[[Fields], H], limit_bytes: int) -> None:
        """Starts with an empty dynamic table.

        Args:
            interpret: What a list of fields becomes; must depend on nothing else, unless `forget` is told.
            limit_bytes: Of a list, as RFC 9113 counts it.
        """
        self._interpret = interpret
        self._decoder = Decoder(DECODING_FACTOR * limit_bytes)
        self._kept: dict[bytes, H] = {}

    def read(self, block: bytes) -> H:
        """What the block's fields become.

        Raises:
            ConnectionFault: The block cannot be decoded, so that none after it can be.
        """
        known = self._kept.get(block)
        if known is not None:
            return known
        table = self._decoder.header_table
        entries = table.dynamic_entries
        size, count, first = table.maxsize, len(entries), entries[0] if entries else None
        fields = self._decode(block)
        # An entry that is added comes first, and is another object than the one that was first.
        same = (table.maxsize, len(entries)) == (size, count) and (entries[0] if entries else None) is first
        if not same or len(self._kept) >= _KEPT_BLOCKS:
            self._kept.clear()
        found = self._interpret(fields)
        if same and len(block) <= _KEPT_BYTES:
            self._kept[block] = found
        return found

    def forget(self) -> None:
        """Interprets every block anew: what it becomes has changed."""
        self._kept.clear()

    def skip(self, block: bytes) -> None:
        """Decodes a block for what it does to the table alone.

        Raises:
            ConnectionFault: As `read`.
        """
        self._kept.clear()
        self._decode(block)

    def _decode(self, block: bytes) -> Fields:
        try:
            return [(field[0], field[1]) for field in self._decoder.decode(block, raw=True)]
        except OversizedHeaderListError:
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "headers far beyond the limit") from None
        except HPACKError:
            raise ConnectionFault(Code.COMPRESSION_ERROR, "headers that cannot be decoded") from None


def size_of(fields: Fields) -> int:
    """The size of a list of fields, as SETTINGS_MAX_HEADER_LIST_SIZE counts it."""
    return sum(len(name) + len(value) + 32 for name, value in fields)


def status_field(status: int) -> bytes:
    """`:status` as a literal."""
    return _STATUS + literal(b"%d" % status)


def block(fields: Iterable[tuple[str, str]]) -> bytes:
    """Fields as literals that nobody indexes."""
    return b"".join([_named(name) + literal(value.encode()) for name, value in fields])


@cache
def _named(name: str) -> bytes:
    """The beginning of a literal that nobody indexes; the names are the server's own, so they are few."""
    return b"\x00" + literal(name.encode())


def literal(value: bytes) -> bytes:
    """A string: its length as an integer with a 7-bit prefix, and its bytes without Huffman's code."""
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
