from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.canary import sing
from tests.support.versions import Shelf

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def canary(request: pytest.FixtureRequest, models: Path) -> Iterator[None]:
    """After every abuse of a shared server, a normal request is answered right."""
    shared = {"fake_server", "impatient_server"}.intersection(request.fixturenames)
    servers = [request.getfixturevalue(name) for name in shared]
    yield
    for server in servers:
        sing(server, models)


@pytest.fixture
def own_shelf(models: Path, tmp_path: Path) -> Shelf:
    """A repository for one test, which puts versions into it."""
    return Shelf(models, tmp_path)
