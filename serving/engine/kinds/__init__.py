"""The engine registry: each module of this package with an `ENGINE` registers one."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bertserve.serving.engine.kinds.kind import EngineKind, EngineSetting

_MODULES = [import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]

ENGINES: dict[str, EngineKind] = {
    kind.name: kind
    for kind in sorted((module.ENGINE for module in _MODULES if hasattr(module, "ENGINE")), key=lambda kind: kind.rank)
}
"""Engines by name, in order of rank."""

AUTO: Sequence[EngineKind] = [kind for kind in ENGINES.values() if kind.auto]
"""Engines that `--engine auto` tries, in this order."""

SETTINGS: dict[str, EngineSetting] = {name: each for kind in ENGINES.values() for name, each in kind.settings.items()}
"""Settings of single engines, by name."""


def engine_for(target: str) -> EngineKind:
    """Returns the engine that artifacts of a target are made for and proven with."""
    return next(kind for kind in ENGINES.values() if target in kind.made_for)
