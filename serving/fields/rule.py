"""The rule for request fields, the same on every route and wire; documented in docs/reference/protocols.md.

A field that the server reads takes effect, and null omits it. Any other field is ignored, and the reply names it. It is
rejected if it resembles an absent field, because it is probably a typo of that field. It is also rejected if it is one
of the few fields of other vendors that would change the answer, unless its value changes nothing.
"""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from msgspec.inspect import ListType, Metadata, StructType, UnionType, VarTupleType, type_info

from bertserve.serving.errors import InvalidRequest, quoted

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    import msgspec
    from msgspec.inspect import Type


_UNSUPPORTED: Mapping[str, Sequence[object]] = {
    "late_chunking": (False,),  # Jina
    "return_multivector": (False,),
    "return_embeddings": (False,),
    "output_dimension": (),  # Voyage
    "output_dtype": ("float",),
    "truncation": (True, "longest_first"),  # Voyage, Jina, Transformers
    "use_activation": (True,),  # vLLM
    "instruction": (),
    "multi_class": (False,),  # Transformers' former name of `multi_label`
    "config": (),  # Triton, of a model to load
}
"""Fields of other vendors that would change the answer, with the values that would not."""

_NO_TYPOS = frozenset(
    (
        *("add_special_tokens", "binary_data", "binary_data_output", "binary_data_size", "bytes", "chat_template"),
        *("dimension", "doc_stride", "documents", "embed_dtype", "embedding_type", "embedding_types", "id", "ids"),
        *("image", "input", "inputs", "max_answer_len", "max_tokens", "max_tokens_per_query", "normalize"),
        *("normalized", "output_type", "raw_scores", "return_len", "sequence_end", "sequence_id"),
        *("shared_memory_offset", "skip_special_tokens", "stride", "text", "text_type", "texts", "timeout"),
        *("top_k", "top_n", "truncate"),
    )
)
"""Fields of OpenAI, Cohere, Jina, Voyage, vLLM, Xinference, Alibaba, Hugging Face or Triton that resemble other fields.

They count as typos only of fields that the request needs.
"""

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NAMED = 8
_COMPARED = 16
"""Maximum names per request to compare with the known ones: each takes tens of microseconds."""

_RESEMBLES = 0.75
_KEPT = 1024


class Ignored:
    """The ignored fields of a request.

    Attributes:
        names: The first names that are safe in a header.
        others: Number of further fields.
    """

    __slots__ = ("_seen", "names", "others")

    def __init__(self) -> None:
        self.names: list[str] = []
        self.others = 0
        self._seen: dict[str, None] = {}

    @property
    def count(self) -> int:
        return len(self._seen)

    def add(self, name: str) -> None:
        if name in self._seen:
            return
        self._seen[name] = None
        if len(self.names) < _NAMED and _NAME.fullmatch(name):
            self.names.append(name)
        else:
            self.others += 1

    def update(self, other: Ignored) -> Ignored:
        """Adds the ignored fields of another part of the request."""
        for name in other._seen:
            self.add(name)
        return self

    def __bool__(self) -> bool:
        return bool(self._seen)

    @property
    def listed(self) -> list[str]:
        """The names, and `+` with the number of others: safe in a header and in a log."""
        return [*self.names, *([f"+{self.others}"] if self.others else [])]

    def __str__(self) -> str:
        return ", ".join(self.listed)


class Level:
    """The fields of an object.

    Attributes:
        known: The fields that the server reads.
        required: The required fields.
    """

    __slots__ = ("_where", "known", "names", "required")

    def __init__(self, known: Iterable[str], required: Iterable[str] = (), place: str = "") -> None:
        self.known = tuple(known)
        self.names = frozenset(self.known)
        self.required = frozenset(required)
        self._where = f" (at `{place}`)" if place else ""

    def pass_over(self, name: str, value: object, present: Collection[str], where: str, ignored: Ignored) -> None:
        """Applies the rule to an unread field.

        Args:
            name: The field's name.
            value: Its value in decoded JSON.
            present: All fields of the object.
            where: Its place, for the error message; empty at the top level.
            ignored: Collects the field if it is ignored.

        Raises:
            InvalidRequest: The value has an unsupported effect, or the name resembles an absent field.
        """
        harmless = _UNSUPPORTED.get(name)
        if harmless is not None:
            if not any(type(value) is type(one) and value == one for one in (None, *harmless)):
                raise InvalidRequest(_unsupported(name, harmless, where), param=name)
        elif value is not None and ignored.count < _COMPARED and (meant := self._meant(name, present)):
            raise InvalidRequest(f'unknown field {quoted(name)}{where}; did you mean "{meant}"?', param=name)
        ignored.add(name)

    def _meant(self, name: str, present: Collection[str]) -> str | None:
        """The absent field that a name resembles. A request without a required field would be rejected anyway."""
        absent = [near for near in resembled(name, self.known) if near not in present]
        return next((near for near in absent if near in self.required or name not in _NO_TYPOS), None)

    def passed_over(self, fields: Mapping[str, object]) -> Ignored | None:
        """The ignored fields of an open map; None if all are read.

        Raises:
            InvalidRequest: A value has an unsupported effect, or a name resembles an absent field.
        """
        if fields.keys() <= self.names:
            return None
        ignored = Ignored()
        present = {name for name, value in fields.items() if value is not None}
        for name in [name for name in fields if name not in self.names]:
            self.pass_over(name, fields[name], present, self._where, ignored)
        return ignored or None


def resembled(name: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """The known names that a received one resembles, nearest first. Only then may a message quote it."""
    return near_names(name, known) if _NAME.fullmatch(name) else ()


@lru_cache(maxsize=_KEPT)
def near_names(name: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """The known names that a name resembles, nearest first."""
    return tuple(difflib.get_close_matches(name.lower(), known, len(known), _RESEMBLES)) if known else ()


def _unsupported(name: str, harmless: Sequence[object], where: str) -> str:
    values = " or ".join(map(json.dumps, harmless))
    return f"the value of `{name}`{where} is not supported; leave it out" + (f" or send {values}" if values else "")


@dataclass(frozen=True, slots=True)
class _Object:
    """A message or a nested message.

    Attributes:
        names: Its fields, including the tag field of a union.
        optional: Fields that null omits.
        below: The places of fields that hold messages.
    """

    level: Level
    names: frozenset[str]
    optional: frozenset[str]
    below: Mapping[str, _Place]
    tag_field: str | None
    tag: object


@dataclass(frozen=True, slots=True)
class _Place:
    """A place of a value: the messages that it may be, and the place of its elements."""

    objects: Sequence[_Object]
    elements: _Place | None

    def object_of(self, value: Mapping[str, Any]) -> _Object | None:
        for kind in self.objects:
            if kind.tag_field is None or value.get(kind.tag_field) == kind.tag:
                return kind
        return None


def obey_rule(value: object, kind: type[msgspec.Struct], ignored: Ignored) -> bool:
    """Applies the rule to decoded JSON in place; returns whether anything changed.

    Raises:
        InvalidRequest: A value has an unsupported effect, or a name resembles an absent field.
    """
    place = _place_of(kind)
    if place is None:
        return False
    walk = _Walk(ignored)
    walk.value(value, place)
    return walk.changed


class _Walk:
    def __init__(self, ignored: Ignored) -> None:
        self.changed = False
        self._ignored = ignored
        self._path: list[str] = ["$"]

    def value(self, value: object, place: _Place) -> None:
        if isinstance(value, dict):
            if (kind := place.object_of(value)) is not None:
                self._object(value, kind)
        elif isinstance(value, list) and place.elements is not None:
            for index, element in enumerate(value):
                if isinstance(element, dict | list):
                    self._below(f"[{index}]", element, place.elements)

    def _below(self, step: str, value: object, place: _Place) -> None:
        self._path.append(step)
        self.value(value, place)
        self._path.pop()

    def _object(self, value: dict[str, Any], kind: _Object) -> None:
        if None in value.values():
            for name in [name for name in value.keys() & kind.optional if value[name] is None]:
                del value[name]
                self.changed = True
        if others := [name for name in value if name not in kind.names]:
            where = f" (at `{''.join(self._path)}`)" if len(self._path) > 1 else ""
            for name in others:
                _refuse_misplaced(name, value, kind, where)
                kind.level.pass_over(name, value[name], value.keys(), where, self._ignored)
            for name in others:
                del value[name]
            self.changed = True
        for name, place in kind.below.items():
            if name in value:
                self._below(f".{name}", value[name], place)


def _refuse_misplaced(name: str, value: Mapping[str, Any], kind: _Object, where: str) -> None:
    """Rejects a field that belongs in an absent required object one level below.

    The request would be rejected anyway. Beside an optional object, such as `parameters`, the field is ignored like any
    other.
    """
    if value[name] is None:
        return
    for field, place in kind.below.items():
        if field in kind.optional or value.get(field) is not None:
            continue
        for below in place.objects:
            if name in below.names and below.level.required:
                body = ", ".join(f'"{each}": ...' for each in below.level.known if each in below.level.required)
                said = f'unknown field {quoted(name)}{where}; did you mean "{field}.{name}"?'
                raise InvalidRequest(f'{said} The body is {{"{field}": {{{body}}}}}', param=name)


@cache
def _place_of(kind: type[msgspec.Struct]) -> _Place | None:
    return _place(type_info(kind))


def _place(kind: Type) -> _Place | None:
    """The place that a type describes; None if it contains no message."""
    members = members_of(kind)
    objects = [_object(member) for member in members if isinstance(member, StructType)]
    below = [_place(member.item_type) for member in members if isinstance(member, ListType | VarTupleType)]
    elements = next((place for place in below if place is not None), None)
    return _Place(objects, elements) if objects or elements else None


def _object(kind: StructType) -> _Object:
    fields = {field.encode_name: field for field in kind.fields}
    places = {name: _place(field.type) for name, field in fields.items()}
    required = frozenset(name for name, field in fields.items() if field.required)
    return _Object(
        level=Level(tuple(fields), required),
        names=frozenset(fields) | ({kind.tag_field} if kind.tag_field else set()),
        optional=frozenset(fields) - required,
        below={name: place for name, place in places.items() if place is not None},
        tag_field=kind.tag_field,
        tag=kind.tag,
    )


def members_of(kind: Type) -> Sequence[Type]:
    """The types that a value of a type may have, without unions and metadata."""
    if isinstance(kind, Metadata):
        return members_of(kind.type)
    return [part for member in kind.types for part in members_of(member)] if isinstance(kind, UnionType) else [kind]
