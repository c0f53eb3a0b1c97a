from __future__ import annotations

import builtins
import sys
from typing import Any

import pytest

from tests.support.deferred import DEFERRED, DeferredImports
from tests.support.spread import is_heavy, next_file


def test_collecting_tests_loads_no_slow_library() -> None:
    """Every process of a run imports every test module, so that one import is paid for several times."""
    assert DEFERRED.loaded == []


def test_a_deferred_module_is_loaded_before_the_tests_that_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of tests imports a module of their support, and this one a library; collecting must not use that."""
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    imports = DeferredImports(["colorsys"])
    support: dict[str, Any] = {"__name__": "tests.support.texts"}
    with imports:
        builtins.__import__("tests.support.texts", {"__name__": "tests.made_up_test"})
        support["colorsys"] = builtins.__import__("colorsys", support)
        with pytest.raises(AttributeError, match=r"colorsys\.rgb_to_hls is used while tests are collected"):
            _ = support["colorsys"].rgb_to_hls
    assert "colorsys" not in sys.modules
    imports.load("tests.made_up_test")
    assert support["colorsys"] is sys.modules["colorsys"]


def test_a_deferred_module_that_is_used_by_others_is_loaded_by_its_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixture may lie in a module that the test's module does not import."""
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    fixtures: dict[str, Any] = {"__name__": "tests.support.texts"}
    with DeferredImports(["colorsys"]):
        fixtures["colorsys"] = builtins.__import__("colorsys", fixtures)
    assert fixtures["colorsys"].rgb_to_hls(0, 0, 0) == (0, 0, 0)
    assert fixtures["colorsys"] is sys.modules["colorsys"]


def test_files_that_need_pytorch_stay_in_half_of_the_processes() -> None:
    """Each process takes files of its kind in their order, and then those of the other kind."""
    assert is_heavy("tests/export/metrics_test.py")
    assert is_heavy("tests/contract/tasks_test.py")
    assert not is_heavy("tests/fault/http2_test.py")
    assert next_file(["a", "b", "c"], {"b", "c"}, takes_heavy=True) == "b"
    assert next_file(["a", "b", "c"], {"b", "c"}, takes_heavy=False) == "a"
    assert next_file(["b", "c"], {"b", "c"}, takes_heavy=False) == "b"
