"""Mixed good, bad, cancelled and refused traffic leaves memory as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.hostile.measure import LEFT_MB, soak
from tests.hostile.polite import Polite
from tests.hostile.victim import few_descriptors, victim_of
from tests.support.models import NAME
from tests.support.server import FAKE, Server

if TYPE_CHECKING:
    from collections.abc import Callable

    from bertserve.loadtest.generator.child import Child

NOISE_MB = 10


@pytest.mark.parametrize(
    ("rounds", "seconds"),
    [pytest.param(1, 1.0, id="short"), pytest.param(30, 60.0, id="half an hour", marks=pytest.mark.endurance)],
)
def test_memory_stays_flat(serve: Callable[..., Server], attacker: Child, rounds: int, seconds: float) -> None:
    """After every round it is what it was at the start, and the polite client beside them never fails."""
    with few_descriptors():
        server = serve(*FAKE)
    victim = victim_of(server)
    with Polite(victim, NAME, 20.0) as polite:
        found = soak(victim, attacker, rounds, seconds)
        assert polite.faults() == []
    memory = found["memory_mb"]
    assert max(memory) - memory[0] <= LEFT_MB + NOISE_MB, found
