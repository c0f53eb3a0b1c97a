"""The rule for fields over decoded JSON, by the message that it should become."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from msgspec.inspect import BoolType, ListType, Metadata, StructType, UnionType, VarTupleType, type_info

from serving.errors import InvalidRequest
from serving.fields.owners import NO_OWNER
from serving.fields.rule import BOOLEANS, Level

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import msgspec
    from msgspec.inspect import Type

    from serving.fields.owners import Owners
    from serving.fields.rule import Ignored


@dataclass(frozen=True, slots=True)
class _Object:
    """A message, or one below it.

    Attributes:
        names: Its fields, and the one that says which of several it is.
        optional: Those that null leaves out.
        below: The places of fields that hold messages.
        booleans: Fields that texts may stand for.
    """

    level: Level
    names: frozenset[str]
    optional: frozenset[str]
    below: Mapping[str, _Place]
    booleans: Sequence[str]
    tag_field: str | None
    tag: object


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a value stands: the messages that it may be, and what its elements may be."""

    objects: Sequence[_Object]
    elements: _Place | None

    def object_of(self, value: Mapping[str, Any]) -> _Object | None:
        for kind in self.objects:
            if kind.tag_field is None or value.get(kind.tag_field) == kind.tag:
                return kind
        return None


def obey_rule(value: object, kind: type[msgspec.Struct], ignored: Ignored | None) -> bool:
    """Takes out of decoded JSON what the rule leaves out; whether there was anything.

    Args:
        value: What the JSON holds; changed in place.
        kind: The message that it should become.
        ignored: Takes up what is passed over. None: unknown fields stay, for the decoder to refuse.

    Raises:
        InvalidRequest: A field asks for what is not done here, or resembles one that is absent.
    """
    place = _place_of(kind)
    if place is None:
        return False
    walk = _Walk(ignored)
    walk.value(value, place)
    return walk.changed


class _Walk:
    """One pass over a request."""

    def __init__(self, ignored: Ignored | None) -> None:
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
        if self._ignored is not None and (others := [name for name in value if name not in kind.names]):
            where = f" (at `{''.join(self._path)}`)" if len(self._path) > 1 else ""
            for name in others:
                _refuse_misplaced(name, value, kind, where)
                kind.level.pass_over(name, value[name], value.keys(), where, self._ignored)
            for name in others:
                del value[name]
            self.changed = True
        for name in kind.booleans:
            if isinstance(text := value.get(name), str) and text.lower() in BOOLEANS:
                value[name] = BOOLEANS[text.lower()]
                self.changed = True
        for name, place in kind.below.items():
            if name in value:
                self._below(f".{name}", value[name], place)


def _refuse_misplaced(name: str, value: Mapping[str, Any], kind: _Object, where: str) -> None:
    """Refuses a field that belongs into a required object below, which is absent.

    The request would be refused anyway. Beside an optional object, as `parameters`, it is ignored as any other name.
    """
    if value[name] is None or name in kind.level.owners.unread:
        return
    for field, place in kind.below.items():
        if field in kind.optional or value.get(field) is not None:
            continue
        for below in place.objects:
            if name in below.names and below.level.required:
                body = ", ".join(f'"{each}": ...' for each in below.level.known if each in below.level.required)
                said = f'unknown field "{name}"{where}; did you mean "{field}.{name}"?'
                raise InvalidRequest(f'{said} The body is {{"{field}": {{{body}}}}}', param=name)


@cache
def _place_of(kind: type[msgspec.Struct]) -> _Place | None:
    return _place(type_info(kind))


def _place(kind: Type) -> _Place | None:
    """What stands at a place of a type; None where no message does."""
    members = _members(kind)
    objects = [_object(member) for member in members if isinstance(member, StructType)]
    below = [_place(member.item_type) for member in members if isinstance(member, ListType | VarTupleType)]
    elements = next((place for place in below if place is not None), None)
    return _Place(objects, elements) if objects or elements else None


def _object(kind: StructType) -> _Object:
    owners: Owners = getattr(kind.cls, "owners", NO_OWNER)
    fields = {field.encode_name: field for field in kind.fields}
    places = {name: _place(field.type) for name, field in fields.items()}
    booleans = [
        name for name, field in fields.items() if any(isinstance(one, BoolType) for one in _members(field.type))
    ]
    required = frozenset(name for name, field in fields.items() if field.required)
    return _Object(
        level=Level(tuple(fields), required, owners),
        names=frozenset(fields) | ({kind.tag_field} if kind.tag_field else set()),
        optional=frozenset(fields) - required,
        below={name: place for name, place in places.items() if place is not None},
        booleans=booleans if owners.texts_for_booleans else [],
        tag_field=kind.tag_field,
        tag=kind.tag,
    )


def _members(kind: Type) -> Sequence[Type]:
    if isinstance(kind, Metadata):
        return _members(kind.type)
    return [part for member in kind.types for part in _members(member)] if isinstance(kind, UnionType) else [kind]
