"""No client can hurt another: a table of attacks, each beside a polite client of both wires.

What is asserted holds on a busy machine, too: no request of the polite client fails, or waits while the server works
for others for long; memory and descriptors are bounded and come back; the log does not fill. What latencies are on a
quiet machine is in docs/benchmarks/decisions.md.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.hostile.attacks import ATTACKS
from tests.hostile.measure import FEW_DESCRIPTORS, LEFT_MB, MAX_MB, Plan, trial
from tests.support.clients import get

if TYPE_CHECKING:
    from bertserve.loadtest.generator.child import Child
    from tests.hostile.polite import Polite
    from tests.hostile.victim import Victim
    from tests.support.server import Server

SHORT = Plan(attack_s=0.7, settle_s=20.0, hurries=True)
FULL = Plan(attack_s=8.0, settle_s=60.0)

MAX_WORK_MS = 500
"""CPU time that the server may spend on others while a polite request waits. No busy machine makes it more."""

NOISE_MB = 10
MAX_DESCRIPTORS = 1_300
MAX_LINES = 60


def check(victim: Victim, polite: Polite, attacker: Child, name: str, plan: Plan) -> None:
    """That an attack does nothing."""
    found = trial(victim, polite, attacker, name, plan)
    memory = found["memory_mb"]
    shown = json.dumps(found, indent=1)
    assert found["faults"] == [], shown
    assert memory["most"] - memory["before"] <= MAX_MB, shown
    assert memory["after"] - memory["before"] <= LEFT_MB + NOISE_MB, shown
    descriptors = found["descriptors"]
    assert descriptors["most"] <= MAX_DESCRIPTORS, shown
    assert descriptors["after"] <= descriptors["before"] + FEW_DESCRIPTORS, shown
    assert found["log_lines"] <= MAX_LINES, shown
    assert found["work_max_ms"] < MAX_WORK_MS, shown


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack(attacked: Server, victim: Victim, polite: Polite, attacker: Child, name: str) -> None:
    """A moment of it leaves nothing behind and holds nobody up."""
    check(victim, polite, attacker, name, SHORT)
    assert get(attacked.metrics, "/readyz").status == 200


@pytest.mark.endurance
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_in_full(attacked: Server, victim: Victim, polite: Polite, attacker: Child, name: str) -> None:
    """Nor does one that lasts."""
    check(victim, polite, attacker, name, FULL)
    assert get(attacked.metrics, "/readyz").status == 200
