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
    following: list[int] = []
    emitted: list[bytes] = []
    complete = {0}
    failed = (_FAILED, HUFFMAN_FAIL, 0)
    known: dict[bytes, bytes] = {}
    for node in range(_NODES):
        for middle, first, one in HUFFMAN_TABLE[_NIBBLES * node : _NIBBLES * (node + 1)]:
            ends = [failed] * _NIBBLES
            if not first & HUFFMAN_FAIL:
                ends = HUFFMAN_TABLE[_NIBBLES * middle : _NIBBLES * (middle + 1)]
            for end, second, other in ends:
                symbols = bytes(
                    [one] * bool(first & HUFFMAN_EMIT_SYMBOL) + [other] * bool(second & HUFFMAN_EMIT_SYMBOL)
                )
                following.append(starts[_FAILED if second & HUFFMAN_FAIL else end])
                emitted.append(known.setdefault(symbols, symbols))
                if second & HUFFMAN_COMPLETE:
                    complete.add(starts[end])
    # Out of a failure no byte leads.
    return following + [starts[_FAILED]] * _NODES, emitted + [b""] * _NODES, complete


_NEXT, _EMITTED, _COMPLETE = _tables()
