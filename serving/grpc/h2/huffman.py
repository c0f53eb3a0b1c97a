"""Huffman's code of HPACK (RFC 7541, 5.2), read byte by byte.

The `hpack` library's table steps by half a byte. Two steps at a time, and without a tuple for each, a string is read
four times as fast: a peer can make every header a string of it.
"""

from __future__ import annotations

from hpack import HPACKDecodingError
from hpack.huffman_table import HUFFMAN_COMPLETE, HUFFMAN_EMIT_SYMBOL, HUFFMAN_FAIL, HUFFMAN_TABLE

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
        raise HPACKDecodingError("a string that is not in Huffman's code")
    return b"".join(pieces)


def _tables() -> tuple[list[int], list[bytes], set[int]]:
    """Of each node and byte (at 256 times the node plus the byte) where the next node begins, and what is emitted.

    The nodes at which a string may end are the third.
    """
    starts = [_NODES * node for node in range(_NODES + 1)]
    rows = [HUFFMAN_TABLE[at : at + _NIBBLES] for at in range(0, len(HUFFMAN_TABLE), _NIBBLES)]
    complete = {0} | {starts[end] for row in rows for end, flags, _ in row if flags & HUFFMAN_COMPLETE}
    # A row's ends and symbols are the same by whichever way the second half of a byte gets there.
    ends = [[starts[_FAILED if flags & HUFFMAN_FAIL else end] for end, flags, _ in row] for row in rows]
    symbols = [[bytes([one] if flags & HUFFMAN_EMIT_SYMBOL else []) for _, flags, one in row] for row in rows]
    following: list[int] = []
    emitted: list[bytes] = []
    for row, firsts in zip(rows, symbols, strict=True):
        for (middle, flags, _), first in zip(row, firsts, strict=True):
            following += [starts[_FAILED]] * _NIBBLES if flags & HUFFMAN_FAIL else ends[middle]
            emitted += [first + second for second in symbols[middle]] if first else symbols[middle]
    # Out of a failure no byte leads. Equal strings are one object: most of 2 MB less.
    known: dict[bytes, bytes] = {}
    emitted = [known.setdefault(string, string) for string in emitted + [b""] * _NODES]
    return following + [starts[_FAILED]] * _NODES, emitted, complete


_NEXT, _EMITTED, _COMPLETE = _tables()
