from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bertserve.loadtest.generator.child import Child
from tests.hostile.polite import Polite
from tests.hostile.victim import few_descriptors, victim_of
from tests.support.models import NAME
from tests.support.server import FAKE, Server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.hostile.victim import Victim

PER_S = 50.0


@pytest.fixture(scope="session")
def attacker() -> Iterator[Child]:
    """The attacker's process."""
    with Child("tests.hostile.attacker") as running:
        yield running


@pytest.fixture(scope="module")
def attacked(models: Path) -> Iterator[Server]:
    """A server that is started as a login starts it: with 1,024 descriptors, unless it asks for more."""
    with few_descriptors(), Server(models, *FAKE) as server:
        yield server


@pytest.fixture(scope="module")
def victim(attacked: Server) -> Victim:
    """The same, as it is measured."""
    return victim_of(attacked)


@pytest.fixture(scope="module")
def polite(victim: Victim) -> Iterator[Polite]:
    """A polite client of it."""
    with Polite(victim, NAME, PER_S) as client:
        yield client
