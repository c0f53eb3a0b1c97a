"""What a process holds: every value that is reached from the modules of the server and from given objects."""

from __future__ import annotations

import enum
import sys
import types
from collections import deque
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_LEAVES = (str, bytes, int, float, complex, bool, type(None), enum.Enum, PurePath)
_MOST = 1_000_000
_ROOM = "serving"


def held(*roots: object) -> dict[str, object]:
    """By place: values that are leaves, and of all others their type and how much they hold."""
    found: dict[str, object] = {}
    modules = [(name, module) for name, module in sorted(sys.modules.items()) if name.split(".")[0] == _ROOM]
    waiting: deque[tuple[str, Any]] = deque([*modules, *((f"root {index}", root) for index, root in enumerate(roots))])
    seen: dict[int, object] = {}  # which keeps them, so that no other one gets the same number
    while waiting:
        place, value = waiting.popleft()
        if isinstance(value, _LEAVES):
            found[place] = value
            continue
        if id(value) in seen:
            continue
        seen[id(value)] = value
        parts = list(_parts(value))
        found[place] = (type(value).__qualname__, len(parts))
        waiting.extend((f"{place}{step}", part) for step, part in parts)
        assert len(found) < _MOST
    return found


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | types.MappingProxyType):
        yield from ((f"[{key!r}]"[:80], each) for key, each in list(value.items()))
    elif isinstance(value, list | tuple | deque):
        yield from ((f"[{index}]", each) for index, each in enumerate(list(value)))
    elif isinstance(value, set | frozenset):
        yield from ((f"{{{index}}}", each) for index, each in enumerate(sorted(value, key=repr)))
    elif isinstance(value, types.FunctionType):
        cells = value.__closure__ or ()
        yield from (
            (f"<{name}>", cell.cell_contents) for name, cell in zip(value.__code__.co_freevars, cells, strict=True)
        )
        yield from ((".default", each) for each in (value.__defaults__, value.__kwdefaults__) if each)
    elif isinstance(value, types.MethodType):
        yield from ((".self", value.__self__), (".function", value.__func__))
    elif _ours(value):
        yield from ((f".{name}", each) for name, each in _fields(value))


def _ours(value: Any) -> bool:
    if isinstance(value, types.ModuleType):
        return value.__name__.split(".")[0] == _ROOM
    kind = value if isinstance(value, type) else type(value)
    return kind.__module__.split(".")[0] == _ROOM


def _fields(value: Any) -> Iterable[tuple[str, Any]]:
    names = dict.fromkeys(getattr(value, "__dict__", ()))
    for kind in () if isinstance(value, type) else type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names |= dict.fromkeys((slots,) if isinstance(slots, str) else slots)
    if not isinstance(value, type):
        names |= dict.fromkeys(getattr(type(value), "__struct_fields__", ()))
    for name in names:
        if name in {"__weakref__", "__dict__", "__builtins__", "__annotations__"}:
            continue
        full = (
            f"_{type(value).__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
        )
        try:
            yield name, getattr(value, full)
        except AttributeError:
            continue
