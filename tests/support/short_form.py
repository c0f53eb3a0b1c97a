"""Which parameter sets of a test `make test` runs, where it matters which: of each kind of fault a cheap one."""

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
