"""Decodes JSON bodies, and says what is wrong with those that it rejects, without repeating what they contain."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import msgspec
import numpy as np
import orjson
from msgspec.inspect import ListType, LiteralType, StructType, Type, VarTupleType, type_info

from bertserve.serving.errors import InvalidRequest, MalformedRequest, quote
from bertserve.serving.fields.rule import Ignored, members_of, obey_rule

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

M = TypeVar("M", bound=msgspec.Struct)

_UNCOUNTED_BYTES = 131_072
_COUNTED_BYTES = 65_536
_MAX_ELEMENTS = 100_000
_MAX_NUMBERS = 1_000_000
"""Limits of a JSON body: the most inputs that any setting allows, and 4 MiB of token ids."""
_COMMA, _QUOTE, _ZERO, _NINE = b',"09'

_MAX_COMMAS = 100_000
"""Of a body in which a text is searched for: more take tenths of a second."""

_REFUSAL = re.compile(
    r"(?:(Expected `[^`]+`(?: (?:of length|with)[^`]*)?(?:, got `[^`]+`)?|Object missing required field `(\w+)`)|.*?)"
    r"(?: - at `([^`]*)`)?\Z",
    re.DOTALL,
)
"""A message of msgspec: what it says, if that repeats nothing received; a missing field; and the place."""

_STEP = re.compile(r"\.(\w+)|\[[^\]]*\]")
"""A step of a place: a field, or an element."""

_NAMES: set[str] = set()
"""Field names of all messages."""

_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_ANY_JSON = msgspec.json.Decoder()


class Request(Protocol):
    """The request that a body belongs to."""

    def pass_over(self, ignored: Ignored) -> None:
        """Records ignored fields, for the reply to name them."""


class JsonDecoder(Generic[M]):
    """Decodes one type of message.

    Most bodies have no unread fields and are decoded at once. If that fails, the body is decoded again as plain JSON,
    for the rule of `serving.fields`.
    """

    def __init__(self, kind: type[M]) -> None:
        self._decoder = msgspec.json.Decoder(kind)
        self._kind = kind
        _NAMES.update(field.encode_name for field in msgspec.structs.fields(kind))

    def decode(self, data: bytes | memoryview, request: Request | None = None) -> M:
        """The message in `data`. Of duplicate keys the last one wins.

        Args:
            data: JSON, possibly invalid.
            request: Collects the ignored fields.

        Raises:
            MalformedRequest: Not JSON, or not UTF-8.
            InvalidRequest: JSON of another shape, or with a rejected field.
        """
        try:
            return self._decoder.decode(data)
        except msgspec.ValidationError as error:
            return self._by_rule(data, request, error)
        except _NOT_JSON as error:
            raise _malformed(data) from error

    async def decode_in_turn(
        self, data: bytes | memoryview, large_body_lock: asyncio.Lock, request: Request | None = None
    ) -> M:
        """As `decode`, for messages that may be large.

        Raises:
            InvalidRequest: Also for more elements than the limit.
        """
        if len(data) <= _UNCOUNTED_BYTES:
            return self.decode(data, request)
        await _check_elements(data, large_body_lock)
        try:
            return self._decoder.decode(data)
        except msgspec.ValidationError as error:
            async with large_body_lock:
                return await asyncio.to_thread(self._by_rule, data, request, error)
        except _NOT_JSON as error:
            async with large_body_lock:
                raise await asyncio.to_thread(_malformed, data) from error

    def _by_rule(self, data: bytes | memoryview, request: Request | None, refusal: msgspec.ValidationError) -> M:
        """Decodes the message without the fields that the rule drops, or raises the reason for its rejection."""
        try:
            message = _ANY_JSON.decode(data)
        except msgspec.ValidationError as error:
            raise InvalidRequest("a number in the body is out of range") from error
        except _NOT_JSON as error:
            raise _malformed(data) from error
        ignored = Ignored()
        if not obey_rule(message, self._kind, ignored):
            raise self._refused(refusal) from refusal
        try:
            decoded = msgspec.convert(message, self._kind)
        except msgspec.ValidationError as error:
            raise self._refused(error) from error
        if request is not None and ignored:
            request.pass_over(ignored)
        return decoded

    def _refused(self, refusal: msgspec.ValidationError) -> InvalidRequest:
        """The rejection, with the library's message if that repeats nothing received."""
        said, missing, path = _REFUSAL.findall(str(refusal))[0]
        steps, where = _STEP.findall(path), f" (at `{path}`)" if path else ""
        if said:
            message = f"{said[0].lower()}{said[1:]}{where}"
        else:
            kinds = [kind for kind in _kinds_at(self._kind, steps) if isinstance(kind, LiteralType)]
            allowed = ", ".join(str(value) for kind in kinds for value in kind.values)
            message = f"invalid value{where}; allowed: {allowed}"
        return InvalidRequest(message, param=(steps[0] if steps else missing) or None)


def _kinds_at(message: type, steps: Iterable[str]) -> Sequence[Type]:
    """The types that a value may have below these steps of a message: names of fields, empty for elements."""
    kinds = members_of(type_info(message))
    for field in steps:
        below: list[Type] = []
        for kind in kinds:
            if isinstance(kind, StructType) and field:
                below += [own.type for own in kind.fields if own.encode_name == field]
                if field == kind.tag_field:
                    below.append(LiteralType((kind.tag,)))
            elif isinstance(kind, ListType | VarTupleType) and not field:
                below.append(kind.item_type)
        kinds = [member for kind in below for member in members_of(kind)]
    return kinds


async def _check_elements(data: bytes | memoryview, large_body_lock: asyncio.Lock) -> None:
    """Rejects a body that would decode into hundreds of thousands of objects.

    Decoding holds the GIL, so a thread would not help: 4 MiB of `[],` took 0.2 s and 150 MB. Each comma outside of a
    string counts as an element. Numbers have a higher limit: they cost a sixth of lists, and honest requests have many.
    Bodies are scanned one at a time, one piece per turn of the event loop.
    """
    async with large_body_lock:
        in_text = escaped = elements = numbers = 0
        for at in range(0, len(data), _COUNTED_BYTES):
            piece = bytes(data[at : at + _COUNTED_BYTES])
            if escaped or b"\\" in piece:
                piece, escaped = _unescaped(piece, escaped)
            letters = np.frombuffer(piece, np.uint8)
            quotes = letters == _QUOTE
            outside = (np.cumsum(quotes, dtype=np.uint8) + in_text) & 1 == 0
            commas = outside & (letters == _COMMA)
            behind_digits = int(np.count_nonzero(commas[1:] & (letters[:-1] >= _ZERO) & (letters[:-1] <= _NINE)))
            in_text = (in_text + int(np.count_nonzero(quotes))) & 1
            numbers += behind_digits
            elements += int(np.count_nonzero(commas)) - behind_digits
            if elements > _MAX_ELEMENTS or numbers > _MAX_NUMBERS:
                raise InvalidRequest(
                    f"the body has more than {_MAX_ELEMENTS} texts and lists, or more than {_MAX_NUMBERS} numbers;"
                    " send fewer per request"
                )
            await asyncio.sleep(0)


def _unescaped(piece: bytes, escaped: int) -> tuple[bytes, int]:
    """JSON without backslashes and escaped characters, and whether its end escapes the next piece."""
    piece = (b"\\" * escaped + piece).replace(b"\\\\", b"")
    return piece.replace(b'\\"', b""), int(piece.endswith(b"\\"))


def _malformed(data: bytes | memoryview) -> MalformedRequest:
    """The error for a body that is not JSON. A place names only fields of messages."""
    data = bytes(data)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        found = f"0x{data[error.start]:02x} at byte {error.start}"
        return MalformedRequest(f"the body is not valid UTF-8: unexpected {found}")
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError as error:
        at = f"at byte {len(text[: error.pos].encode())}"
        if "surrogate" in error.msg:
            place = _half_of_a_pair(text)
            whose = f"the text at `{place}`" if place else "a text"
            return MalformedRequest(f"{whose} has half of a surrogate pair ({at}); cut texts between characters")
        found = f", found {quote(text[error.pos])}" if error.pos < len(text) else ""
        return MalformedRequest(f"the body is not valid JSON: {error.msg} {at}{found}")
    return MalformedRequest("the body is not valid JSON: nested too deeply")


def _half_of_a_pair(text: str) -> str | None:
    """The place of the first text with half of a surrogate pair, as msgspec writes places; None if it is not found."""
    if text.count(",") > _MAX_COMMAS:
        return None
    try:
        place = _place(json.loads(text))  # unlike the other libraries it accepts halves
    except (ValueError, RecursionError):
        return None
    return None if place is None else f"${place}"


def _place(value: object) -> str | None:
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, below in steps:
        if isinstance(below, str):
            found = None if below.isascii() or _is_whole(below) else ""
        else:
            found = _place(below) if isinstance(below, dict | list) else None
        if found is not None:
            return (f"[{step}]" if isinstance(step, int) else f".{step}" if step in _NAMES else "[...]") + found
    return None


def _is_whole(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
