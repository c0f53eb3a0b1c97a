"""No client can hurt another: a table of attacks, each beside a polite client of both wires.

What is asserted holds on a busy machine, too: no request of the polite client fails, or waits while the server works
for others for long; memory and descriptors are bounded and come back; the log does not fill. What latencies are on a
quiet machine is in docs/benchmarks/hostile.md.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from loadtest.benchmarks.hostile.attacks import ATTACKS
from loadtest.benchmarks.hostile.measure import FEW_DESCRIPTORS, LEFT_MB, MOST_MB, Plan, trial
from tests.support.clients import get

if TYPE_CHECKING:
    from loadtest.benchmarks.hostile.polite import Polite
    from loadtest.benchmarks.hostile.victim import Victim
    from loadtest.generator.child import Child
    from tests.support.server import Server

SHORT = Plan(before_s=0.1, attack_s=0.7, control_s=0.0, settle_s=20.0, hurries=True)
FULL = Plan(before_s=0.5, attack_s=8.0, control_s=0.0, settle_s=60.0)

MOST_WORK_MS = 500
"""CPU time that the server may spend on others while a polite request waits. No busy machine makes it more."""

NOISE_MB = 10
MOST_DESCRIPTORS = 1_300
MOST_LINES = 60


_GZIP = pytest.mark.xfail(
    reason="messages are inflated side by side and outside of the budget: half a second's work, 440 MB", strict=False
)
_WINDOWS = pytest.mark.xfail(reason="replies that wait for a window hold twice the budget: 150 MB", strict=False)
_SHORT = {"gRPC: gzip bombs of 4 KB": [_GZIP]}
_FULL = {**_SHORT, "gRPC: replies without a window": [_WINDOWS]}


def check(victim: Victim, polite: Polite, attacker: Child, name: str, plan: Plan) -> None:
    """That an attack does nothing. What the allocator keeps of a first one must be enough for a second."""
    found = trial(victim, polite, attacker, name, plan)
    if left(found) > LEFT_MB + NOISE_MB:
        found = trial(victim, polite, attacker, name, plan)
    shown = json.dumps(found, indent=1)
    assert found["faults"] == [], shown
    assert found["memory_mb"]["most"] - found["memory_mb"]["before"] <= MOST_MB, shown
    assert left(found) <= LEFT_MB + NOISE_MB, shown
    descriptors = found["descriptors"]
    assert descriptors["most"] <= MOST_DESCRIPTORS, shown
    assert descriptors["after"] <= descriptors["before"] + FEW_DESCRIPTORS, shown
    assert found["log_lines"] <= MOST_LINES, shown
    assert max(found["polite"]["during"][wire]["work_max_ms"] for wire in ("http", "grpc")) < MOST_WORK_MS, shown


def left(found: dict[str, Any]) -> float:
    """By how many MB resident memory grew."""
    return float(found["memory_mb"]["after"] - found["memory_mb"]["before"])


@pytest.mark.parametrize("name", [pytest.param(name, marks=_SHORT.get(name, [])) for name in ATTACKS])
def test_an_attack(attacked: Server, victim: Victim, polite: Polite, attacker: Child, name: str) -> None:
    """A moment of it leaves nothing behind and holds nobody up."""
    check(victim, polite, attacker, name, SHORT)
    assert get(attacked.metrics, "/readyz").status == 200


@pytest.mark.long
@pytest.mark.parametrize("name", [pytest.param(name, marks=_FULL.get(name, [])) for name in ATTACKS])
def test_an_attack_in_full(attacked: Server, victim: Victim, polite: Polite, attacker: Child, name: str) -> None:
    """Nor does one that lasts."""
    check(victim, polite, attacker, name, FULL)
    assert get(attacked.metrics, "/readyz").status == 200
