"""Imports that wait until tests run, so that collecting them loads neither PyTorch nor what needs it.

pytest imports every test module in every process, and most of them are run by another one. While tests are collected,
an import of one of `MODULES` by a module of the project binds a stand-in. `DeferredImports.load` replaces the stand-ins
by the modules before the first test of a test module. Imports by other packages are not affected.
"""

from __future__ import annotations

import builtins
import importlib
import sys
from collections import defaultdict
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.support.lasting import lasting_objects

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

MODULES = (
    # The libraries that take longest to import.
    "openai",
    "pandas",
    "sentence_transformers",
    "torch",
    "transformers",
    "safetensors.torch",
    "sentence_transformers.sentence_transformer.modules",
    "torch.nn",
    "torch.nn.functional",
    # Ours that need one of them to be imported: as the base of a class, in a table, through another library.
    "export.build",
    "export.checkpoint.unpickle",
    "export.graph.architectures",
    "export.graph.optimize",
    "export.graph.sparse_head",
    "export.graph.task_model",
    "export.precision.int8",
    "export.precision.quantize",
    "tests.support.traced",
)
"""What is deferred where it is imported as a module: `import torch`, `from torch import nn`."""

SLOW = (*MODULES, "locust", "ray", "schemathesis", "scipy", "sklearn", "sympy")
"""What collecting tests must not load."""

PACKAGES = ("export", "loadtest", "tests")
"""Packages of the project that import them."""


class _StandIn(ModuleType):
    """What is bound in place of a module."""

    def __init__(self, name: str, imports: DeferredImports) -> None:
        super().__init__(name)
        self._imports = imports
        self._bound_in: list[dict[str, Any]] = []

    def _load(self) -> ModuleType:
        with lasting_objects():
            module = importlib.import_module(self.__name__)
        for namespace in self._bound_in:
            namespace.update((name, module) for name, value in [*namespace.items()] if value is self)
        self._bound_in.clear()
        return module

    def __getattr__(self, name: str) -> Any:
        if self._imports.are_deferred:
            raise AttributeError(
                f"{self.__name__}.{name} is used while tests are collected, when {self.__name__} is not loaded: "
                "use it in a test or a fixture, or see tests/support/deferred.py"
            )
        # In a fixture that was not imported by the test's module.
        return getattr(self._load(), name)


class DeferredImports:
    """Defers the imports of some modules inside a `with` block.

    Attributes:
        are_deferred: The block is entered.
        loaded: Those of `SLOW` that were loaded at its end.
    """

    def __init__(self, modules: Iterable[str] = MODULES) -> None:
        self.are_deferred = False
        self.loaded: list[str] = []
        self._stand_ins = {name: _StandIn(name, self) for name in modules}
        self._imported_by: dict[str, set[str]] = defaultdict(set)
        self._import = builtins.__import__

    def __enter__(self) -> None:
        self.are_deferred = True
        builtins.__import__ = self._bind

    def __exit__(self, *_: object) -> None:
        self.are_deferred = False
        builtins.__import__ = self._import
        self.loaded = [name for name in SLOW if name in sys.modules]

    def load(self, module: str) -> None:
        """Loads what was deferred for a module and for the modules that it imported, at any depth."""
        names = [module]
        while names:
            name = names.pop()
            names += self._imported_by.pop(name, ())
            if stand_in := self._stand_ins.get(name):
                stand_in._load()

    # The shape of `__import__`, whose callers may name its arguments.
    def _bind(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,  # noqa: A002
        locals: Mapping[str, object] | None = None,  # noqa: A002
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        """Does what an import statement asks for, as `__import__`."""
        importer = globals.get("__name__", "") if isinstance(globals, dict) else ""
        if importer.partition(".")[0] not in PACKAGES:
            return self._import(name, globals, locals, fromlist, level)
        parts = {part: f"{name}.{part}" for part in fromlist or ()}
        self._imported_by[importer].update((name, *parts.values()))
        if not parts:
            return self._stand_in(name, globals) or self._import(name, globals, locals, fromlist, level)
        bound = {part: stand_in for part, full in parts.items() if (stand_in := self._stand_in(full, globals))}
        if not bound:
            return self._import(name, globals, locals, fromlist, level)
        if rest := [part for part in parts if part not in bound]:
            package = self._import(name, globals, locals, rest, level)
            bound |= {part: getattr(package, part) for part in rest}
        return SimpleNamespace(**bound)

    def _stand_in(self, name: str, namespace: dict[str, Any]) -> ModuleType | None:
        if name not in self._stand_ins or name in sys.modules:
            return None
        self._stand_ins[name]._bound_in.append(namespace)
        return self._stand_ins[name]


DEFERRED = DeferredImports()
"""Those of this run."""
