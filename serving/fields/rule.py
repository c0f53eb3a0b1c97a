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
from itertools import islice
from typing import TYPE_CHECKING, Any

from msgspec.inspect import ListType, Metadata, StructType, UnionType, VarTupleType, type_info

from bertserve.serving.errors import InvalidRequest, quote

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


class Ignored(dict[str, None]):
    """The names of the ignored fields of a request, each once."""

    @property
    def listed(self) -> list[str]:
        """The first names, and `+` with the number of others: safe in a header and in a log."""
        names = list(islice(filter(_NAME.fullmatch, self), _NAMED))
        others = len(self) - len(names)
        return [*names, f"+{others}"] if others else names

    def __str__(self) -> str:
        return ", ".join(self.listed)


class Level:
    """The fields of an object that the server reads, in order and as a set, and the required ones of them.

    `place` is the object's place, for error messages; "" at the top level.
    """

    __slots__ = ("_place", "known", "names", "required")

    def __init__(self, known: Iterable[str], required: Iterable[str] = (), place: str = "") -> None:
        self.known = tuple(known)
        self.names = frozenset(self.known)
        self.required = frozenset(required)
        self._place = place

    def apply_rule(self, fields: Mapping[str, object], ignored: Ignored) -> None:
        """Adds the unread fields of an open map to the ignored ones.

        Raises:
            InvalidRequest: A value has an unsupported effect, or a name resembles an absent field.
        """
        if not fields.keys() <= self.names:
            present = {name for name, value in fields.items() if value is not None}
            for name in fields:
                if name not in self.names:
                    self.ignore(name, fields[name], present, self._place, ignored)

    def ignore(self, name: str, value: object, present: Collection[str], place: str, ignored: Ignored) -> None:
        """Applies the rule to an unread field of an object at a place with some fields present; raises likewise."""
        where = f" (at `{place}`)" if place else ""
        harmless = _UNSUPPORTED.get(name)
        if harmless is not None:
            if not any(type(value) is type(one) and value == one for one in (None, *harmless)):
                values = " or ".join(map(json.dumps, harmless))
                instead = f" or send {values}" if values else ""
                raise InvalidRequest(
                    f"the value of `{name}`{where} is not supported; leave it out{instead}", param=name
                )
        elif value is not None and len(ignored) < _COMPARED:
            absent = [near for near in resembled(name, self.known) if near not in present]
            # A request without a required field would be rejected anyway.
            meant = next((near for near in absent if near in self.required or name not in _NO_TYPOS), None)
            if meant is not None:
                raise InvalidRequest(f'unknown field {quote(name)}{where}; did you mean "{meant}"?', param=name)
        ignored[name] = None


def resembled(name: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """The known names that a received one resembles, nearest first. Only then may a message quote it."""
    return near_names(name, known) if _NAME.fullmatch(name) else ()


@lru_cache(maxsize=_KEPT)
def near_names(name: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """The known names that a name resembles, nearest first."""
    return tuple(difflib.get_close_matches(name.lower(), known, len(known), _RESEMBLES)) if known else ()


@dataclass(frozen=True, slots=True)
class _Object:
    """A message or a nested message: its fields, those that null omits, and the places of those that hold messages."""

    level: Level
    optional: frozenset[str]
    below: Mapping[str, _Place]
    tag_field: str | None
    tag: object


@dataclass(frozen=True, slots=True)
class _Place:
    """A place of a value: the messages that it may be, and the place of its elements."""

    objects: Sequence[_Object]
    elements: _Place | None


def obey_rule(value: object, kind: type[msgspec.Struct], ignored: Ignored) -> bool:
    """Applies the rule to decoded JSON in place; returns whether anything changed.

    Raises:
        InvalidRequest: A value has an unsupported effect, or a name resembles an absent field.
    """
    place = _place_of(kind)
    return place is not None and _obey(value, place, "", ignored)


def _obey(value: object, place: _Place, path: str, ignored: Ignored) -> bool:
    changed = False
    if isinstance(value, list) and place.elements is not None:
        for index, element in enumerate(value):
            if isinstance(element, dict | list):
                changed |= _obey(element, place.elements, f"{path or '$'}[{index}]", ignored)
    elif isinstance(value, dict):
        for kind in place.objects:
            if kind.tag_field is None or value.get(kind.tag_field) == kind.tag:
                return _obey_object(value, kind, path, ignored)
    return changed


def _obey_object(value: dict[str, Any], kind: _Object, path: str, ignored: Ignored) -> bool:
    dropped = [name for name in value.keys() & kind.optional if value[name] is None]
    for name in dropped:
        del value[name]
    unread = [name for name in value if name not in kind.level.names and name != kind.tag_field]
    for name in unread:
        if value[name] is not None:
            _refuse_misplaced(name, value, kind, path)
        kind.level.ignore(name, value[name], value.keys(), path, ignored)
    for name in unread:
        del value[name]
    changed = bool(dropped or unread)
    for name, place in kind.below.items():
        if name in value:
            changed |= _obey(value[name], place, f"{path or '$'}.{name}", ignored)
    return changed


def _refuse_misplaced(name: str, value: Mapping[str, Any], kind: _Object, path: str) -> None:
    """Rejects a field that belongs in an absent required object one level below.

    The request would be rejected anyway. Beside an optional object, such as `parameters`, the field is ignored like any
    other.
    """
    for field, place in kind.below.items():
        if field in kind.optional or value.get(field) is not None:
            continue
        for level in (below.level for below in place.objects):
            if name in level.names and level.required:
                body = ", ".join(f'"{each}": ...' for each in level.known if each in level.required)
                where = f" (at `{path}`)" if path else ""
                said = f'unknown field {quote(name)}{where}; did you mean "{field}.{name}"?'
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
    places = {field.encode_name: _place(field.type) for field in kind.fields}
    required = frozenset(field.encode_name for field in kind.fields if field.required)
    return _Object(
        Level(places, required),
        optional=frozenset(places) - required,
        below={name: place for name, place in places.items() if place is not None},
        tag_field=kind.tag_field,
        tag=kind.tag,
    )


def members_of(kind: Type) -> Sequence[Type]:
    """The types that a value of a type may have, without unions and metadata."""
    if isinstance(kind, Metadata):
        return members_of(kind.type)
    return [part for member in kind.types for part in members_of(member)] if isinstance(kind, UnionType) else [kind]
