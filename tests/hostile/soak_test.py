"""Mixed good, bad, cancelled and refused traffic leaves memory as it was."""

from __future__ import annotations

import json
import signal
import sys
from typing import TYPE_CHECKING

import pytest

from tests.hostile.measure import LEFT_MB, soak
from tests.hostile.polite import Polite
from tests.support.hostile import few_descriptors, victim_of
from tests.support.models import NAME, ROOT
from tests.support.server import FAKE, Server
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from loadtest.generator.child import Child

NOISE_MB = 10
TRACED = (sys.executable, str(ROOT / "tests" / "support" / "traced_server.py"))


@pytest.mark.parametrize(
    ("rounds", "seconds"),
    [pytest.param(1, 1.0, id="short"), pytest.param(30, 60.0, id="half an hour", marks=pytest.mark.endurance)],
)
def test_memory_stays_flat(
    serve: Callable[..., Server], attacker: Child, tmp_path: Path, rounds: int, seconds: float
) -> None:
    """After every round it is what it was at the start, and the polite client beside them never fails.

    Where memory grows, the same traffic goes to a server that traces its allocations, and the failure shows what grew.
    """
    with few_descriptors():
        server = serve(*FAKE)
    victim = victim_of(server)
    with Polite(victim, NAME, 20.0) as polite:
        found = soak(victim, attacker, rounds, seconds)
        assert polite.faults() == []
    memory = found["memory_mb"]
    if max(memory) - memory[0] > LEFT_MB + NOISE_MB:
        pytest.fail(json.dumps(found) + "\n" + _growth(serve, attacker, tmp_path / "growth.txt"))


def _growth(serve: Callable[..., Server], attacker: Child, file: Path) -> str:
    """What grows in a server that traces its allocations, by the lines that allocate."""
    server = serve(*FAKE, program=(*TRACED, str(file)))
    victim = victim_of(server)
    soak(victim, attacker, 1, 4.0)
    _told(server, file)
    soak(victim, attacker, 1, 8.0)
    return _told(server, file)


def _told(server: Server, file: Path) -> str:
    file.unlink(missing_ok=True)
    server.signal(signal.SIGUSR2)
    wait_for(file.exists, "what the server tells of its memory", 30)
    return file.read_text(encoding="utf-8")
