from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.support.clients import Grpc, Tei
from tests.support.expected import fake_answers
from tests.support.versions import Shelf

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.server import Server

CANARY = ["a normal request", "and one more, somewhat longer than the first"]


def sing(server: Server, models: Path) -> None:
    """Checks that a normal request to a fake server is answered right over HTTP and gRPC."""
    expected = fake_answers(models, CANARY)
    for transport in (Tei, Grpc):
        with transport(server) as client:
            np.testing.assert_allclose(client.embed(CANARY).vectors, expected, atol=1e-5)


@pytest.fixture(autouse=True)
def canary(request: pytest.FixtureRequest, models: Path) -> Iterator[None]:
    """After every abuse of a shared server, a normal request is answered right."""
    yield
    for name in ("fake_server", "impatient_server"):
        if name in request.fixturenames:
            sing(request.getfixturevalue(name), models)


@pytest.fixture
def own_shelf(models: Path, tmp_path: Path) -> Shelf:
    """A repository for one test, which puts versions into it."""
    return Shelf(models, tmp_path)
