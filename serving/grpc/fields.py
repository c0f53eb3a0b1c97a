"""Counts a message's fields before it is parsed: one of many small fields takes up to forty times its size."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from google.protobuf.message import Message

_VARINT, _FIXED64, _SIZED, _GROUP, _GROUP_END, _FIXED32 = range(6)
_LONGEST_VARINT_BITS = 70
_WIDTHS = {_FIXED64: 8, _GROUP: 0, _GROUP_END: 0, _FIXED32: 4}


def has_more_fields(data: bytes, kind: type[Message], most: int) -> bool:
    """Whether a message and all that are in it have more fields, as far as its bytes are a message at all."""
    left = most
    pending: list[tuple[int, int, Any]] = [(0, len(data), kind.DESCRIPTOR)]
    try:
        while pending:
            at, end, descriptor = pending.pop()
            messages = _messages(descriptor)
            while at < end:
                left -= 1
                if left < 0:
                    return True
                tag, at = _varint(data, at)
                encoding = tag & 7
                if encoding == _SIZED:
                    size, at = _varint(data, at)
                    if (inner := messages.get(tag >> 3)) is not None:
                        pending.append((at, min(at + size, end), inner))
                    at += size
                elif encoding == _VARINT:
                    _, at = _varint(data, at)
                else:
                    at += _WIDTHS[encoding]
    except (IndexError, KeyError):
        pass  # no message: the parser comes no further
    return False


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that begins here, and where it ends; raises IndexError for one of more than ten bytes."""
    value = data[at]
    at += 1
    if value < 0x80:  # noqa: PLR2004  as nearly all
        return value, at
    value &= 0x7F
    shift = 7
    while (byte := data[at]) >= 0x80:  # noqa: PLR2004
        value |= (byte & 0x7F) << shift
        shift += 7
        at += 1
        if shift >= _LONGEST_VARINT_BITS:  # or one number of all the message would take minutes
            raise IndexError
    return value | byte << shift, at + 1


@cache
def _messages(descriptor: Any) -> Mapping[int, Any]:  # noqa: ANN401  of one of two implementations
    """The fields of a kind of message that are messages themselves, by number."""
    return {field.number: field.message_type for field in descriptor.fields if field.message_type is not None}
