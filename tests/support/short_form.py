"""Which parameter sets of a test `make test` runs, where it matters which: of each kind a cheap one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable


def in_short(names: Iterable[str], *short: str) -> list[object]:
    """Parameters by name, all of which are long but those that are named again."""
    every = list(names)
    assert set(short) <= set(every), set(short) - set(every)
    return [name if name in short else pytest.param(name, marks=pytest.mark.long) for name in every]


def but_long(names: Iterable[str], *long: str) -> list[object]:
    """The other way round: parameters by name, of which those that are named again are long."""
    every = list(names)
    assert set(long) <= set(every), set(long) - set(every)
    return in_short(every, *[name for name in every if name not in long])
