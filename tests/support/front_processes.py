"""A pytest plugin that gives a run's servers front processes (`--front-processes`), and takes few of its tests."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from tests.support.models import ROOT
from tests.support.server import EVERY_SERVER
from tests.support.spread import is_heavy

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--front-processes", type=int, metavar="N", help="front processes of servers that tests start")
    parser.addoption("--one-in", type=int, metavar="N", help="of tests without PyTorch run one in N, always the same")


def pytest_configure(config: pytest.Config) -> None:
    if count := config.getoption("front_processes"):
        EVERY_SERVER["BERTSERVE_FRONT_PROCESSES"] = str(count)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    left_out = config.getoption("one_in") and collection_path.suffix == ".py"
    return True if left_out and is_heavy(str(collection_path.relative_to(ROOT))) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if share := config.getoption("one_in"):
        drawn = {item for item in items if zlib.crc32(item.nodeid.encode()) % share == 0}
        config.hook.pytest_deselected(items=[item for item in items if item not in drawn])
        items[:] = [item for item in items if item in drawn]
