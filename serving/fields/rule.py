"""The rule for fields, the same on every route and wire; docs/protocols.md has it in words.

A field that is read is obeyed, and null leaves it out. One that an owner of the protocol documents is taken with the
values that ask for nothing special, and refused by its name with others. One that nobody documents is passed over, and
the reply names it; but where it resembles a field that is absent, it is refused: it is likely to mean that.
"""

from __future__ import annotations

import difflib
import json
import re
from functools import lru_cache
from typing import TYPE_CHECKING

from serving.errors import InvalidRequest
from serving.fields.owners import ANY, DOCUMENTED, NO_OWNER

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from serving.fields.owners import Owners

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NAMED = 8
_COMPARED = 16
"""So many names of a request are compared with those that are read: each takes tens of microseconds."""

_RESEMBLES = 0.75
_KEPT = 1024


class Ignored:
    """The fields of a request that were passed over.

    Attributes:
        names: The first of those whose names may stand in a header.
        others: How many there were beside them.
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
        """Adds what another part of a request passed over."""
        for name in other._seen:
            self.add(name)
        return self

    def __bool__(self) -> bool:
        return bool(self._seen)

    @property
    def listed(self) -> list[str]:
        """The names, and `+` with the number of others: harmless in a header and in a log."""
        return [*self.names, *([f"+{self.others}"] if self.others else [])]

    def __str__(self) -> str:
        return ", ".join(self.listed)


class Level:
    """The fields that an object may have.

    Attributes:
        known: Those that are read.
        names: The same.
        required: Those without which it is refused.
        owners: Who documents others.
    """

    __slots__ = ("_where", "known", "names", "owners", "required")

    def __init__(
        self,
        known: Iterable[str],
        required: Iterable[str] = (),
        owners: Owners = NO_OWNER,
        place: str = "",
    ) -> None:
        self.known = tuple(known)
        self.names = frozenset(self.known)
        self.required = frozenset(required)
        self.owners = owners
        self._where = f" (at `{place}`)" if place else ""

    def pass_over(self, name: str, value: object, present: Collection[str], where: str, ignored: Ignored) -> None:
        """Decides on a field that is not read.

        Args:
            name: Its name.
            value: Its value, as JSON has it.
            present: All fields that the object has.
            where: Its place, for the message; empty at the top.
            ignored: Takes it up, if it is passed over.

        Raises:
            InvalidRequest: It asks for what is not done here, or resembles a field that is absent.
        """
        harmless = self.owners.unread.get(name)
        if harmless is None:
            if value is not None and ignored.count < _COMPARED and (meant := self._meant(name, present)):
                raise InvalidRequest(f'unknown field "{name}"{where}; did you mean "{meant}"?', param=name)
            ignored.add(name)
        elif value is not None and harmless is not ANY and not self._asks_nothing(value, harmless):
            raise InvalidRequest(_unsupported(name, harmless, where), param=name)

    def _meant(self, name: str, present: Collection[str]) -> str | None:
        """The absent field that a name resembles. Without a required one the request would be refused anyway."""
        if not _NAME.fullmatch(name):
            return None
        absent = [near for near in near_names(name, self.known) if near not in present]
        return next((near for near in absent if near in self.required or name not in DOCUMENTED), None)

    def _asks_nothing(self, value: object, harmless: Sequence[object]) -> bool:
        if self.owners.texts_for_booleans and isinstance(value, str):
            value = BOOLEANS.get(value.lower(), value)
        return any(type(value) is type(one) and value == one for one in harmless)

    def passed_over(self, fields: Mapping[str, object]) -> Ignored | None:
        """The fields of an open map that are passed over; None where all are read or ask for nothing.

        Raises:
            InvalidRequest: One asks for what is not done here, or resembles one that is absent.
        """
        if fields.keys() <= self.names:
            return None
        ignored = Ignored()
        present = {name for name, value in fields.items() if value is not None}
        for name in [name for name in fields if name not in self.names]:
            self.pass_over(name, fields[name], present, self._where, ignored)
        return ignored or None


BOOLEANS = {
    **dict.fromkeys(("true", "t", "yes", "y", "on", "1"), True),
    **dict.fromkeys(("false", "f", "no", "n", "off", "0"), False),
}
"""The texts that pydantic, with which Xinference reads requests, takes for booleans."""


@lru_cache(maxsize=_KEPT)
def near_names(name: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """The known names that a name resembles, the nearest first."""
    return tuple(difflib.get_close_matches(name.lower(), known, len(known), _RESEMBLES)) if known else ()


def _unsupported(name: str, harmless: Sequence[object], where: str) -> str:
    # The name is the owner's, not the request's.
    values = " or ".join([json.dumps(value) for value in harmless])
    return f"the field `{name}`{where} asks for what this server does not do; leave it out" + (
        f" or send {values}" if values else ""
    )
