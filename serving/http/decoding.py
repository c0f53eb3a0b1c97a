"""Strict JSON decoding: what cannot be parsed is 400, what breaks the schema 422, and no text comes back."""

from __future__ import annotations

import re
from typing import Generic, TypeVar

import msgspec

from serving.errors import InvalidRequest, MalformedRequest

T = TypeVar("T", bound=msgspec.Struct)

_PLACE = re.compile(r" - at `([^`]*)`$")
_EXPECTED = re.compile(r"Expected `[^`]+`(?: (?:of length|with)[^`]*)?(?:, got `[^`]+`)?(?= - at|$)")
_MISSING = re.compile(r"Object missing required field `\w+`")


class JsonDecoder(Generic[T]):
    """Decodes one type of message."""

    def __init__(self, kind: type[T]) -> None:
        self._decoder = msgspec.json.Decoder(kind)
        self._fields = ", ".join(f"`{field.encode_name}`" for field in msgspec.structs.fields(kind))

    def decode(self, data: bytes | memoryview) -> T:
        """The message in `data`. Of duplicate keys the last wins.

        Raises:
            MalformedRequest: Not JSON, or not UTF-8.
            InvalidRequest: JSON of another shape.
        """
        try:
            return self._decoder.decode(data)
        except msgspec.ValidationError as error:
            raise InvalidRequest(self._explain(str(error))) from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise MalformedRequest("the body is not valid JSON in UTF-8") from error

    def _explain(self, text: str) -> str:
        """The library's sentence where it repeats nothing that was received, else one of ours."""
        place = _PLACE.search(text)
        where = f" (at `{place[1]}`)" if place else ""
        for pattern in (_EXPECTED, _MISSING):
            if found := pattern.match(text):
                return found[0][0].lower() + found[0][1:] + where
        if text.startswith("Object contains unknown field"):
            return f"unknown field{where}; the fields are {self._fields}"
        return f"the value is not one of those allowed{where}"
