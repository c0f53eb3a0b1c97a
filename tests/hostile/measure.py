"""One attack on a running server: its effect on the polite client, memory, descriptors and log."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from tests.hostile.attacks import ATTACKS

if TYPE_CHECKING:
    from collections.abc import Callable

    from bertserve.loadtest.generator.child import Child
    from tests.hostile.polite import Polite
    from tests.hostile.victim import Victim

_LOOK_S = 0.05
FEW_DESCRIPTORS = 4
"""Tolerated difference in descriptors: the polite client, or a probe, may have reconnected."""

MAX_MB, LEFT_MB = 150.0, 20.0
"""Maximum memory growth during an attack, and after it."""

_MB = 1e6
_CLOSING_S = 15.0
_MARGIN_S = 0.1
"""Requests scheduled this shortly before the attack may be answered during it."""


@dataclass(slots=True, frozen=True)
class Plan:
    """Durations of a trial, in seconds.

    Attributes:
        attack_s: The attack.
        settle_s: Maximum wait until memory and descriptors are back.
        hurries: Whether attacks with large requests send faster.
    """

    attack_s: float
    settle_s: float
    hurries: bool = False


class Peaks:
    """Samples figures periodically (the period is in seconds) within a `with` block.

    Attributes:
        seen: The largest value of each.
    """

    def __init__(self, every_s: float, **figures: Callable[[], float]) -> None:
        self._every_s, self._figures = every_s, figures
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.seen = dict.fromkeys(figures, 0.0)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(self._every_s):
            for name, figure in self._figures.items():
                self.seen[name] = max(self.seen[name], figure())


def trial(victim: Victim, polite: Polite, attacker: Child, name: str, plan: Plan) -> dict[str, Any]:
    """Runs one attack; returns JSON values."""
    attack = ATTACKS[name]
    rate = attack.hurry if plan.hurries else 1.0
    begin = time.monotonic()
    time.sleep(_MARGIN_S)
    memory, descriptors, lines = victim.memory_mb(), victim.descriptors(), victim.log_lines()
    attacked = time.monotonic()
    with Peaks(_LOOK_S, memory=victim.memory_mb, descriptors=victim.descriptors) as peaks:
        sent = attacker.ask("attack", name=name, port=victim.ports[attack.wire], seconds=plan.attack_s, rate=rate)
        over = time.monotonic()
        settled_s = _settle(victim, memory + LEFT_MB, descriptors + FEW_DESCRIPTORS, plan.settle_s)
    return {
        "attack": sent,
        "work_max_ms": polite.most_work_ms(attacked, over),
        "faults": polite.faults(begin, time.monotonic()),
        "memory_mb": {"before": memory, "most": peaks.seen["memory"], "after": victim.memory_mb()},
        "descriptors": {"before": descriptors, "most": int(peaks.seen["descriptors"]), "after": victim.descriptors()},
        "settled_s": settled_s,
        "log_lines": victim.log_lines() - lines,
    }


def _settle(victim: Victim, memory_mb: float, descriptors: int, limit_s: float) -> float:
    """Waits until memory and descriptors are back; returns the time it took, or the limit if they are not."""
    begin = time.monotonic()
    while (passed := time.monotonic() - begin) < limit_s:
        if victim.memory_mb() <= memory_mb and victim.descriptors() <= descriptors:
            return passed
        time.sleep(_LOOK_S)
    return limit_s


def soak(victim: Victim, attacker: Child, rounds: int, seconds: float) -> dict[str, Any]:
    """Rounds of the same mixed traffic; returns idle resident memory before the first round and after each."""
    descriptors = victim.descriptors()
    memory = [victim.memory_mb()]
    sent = 0.0
    for _ in range(rounds):
        done = attacker.ask("mixed", limit_s=seconds + 60, ports=victim.ports, seconds=seconds, seed=1)
        sent += done["bytes_per_s"] * seconds
        _settle(victim, memory[-1] + LEFT_MB, descriptors + FEW_DESCRIPTORS, _CLOSING_S)
        memory.append(victim.memory_mb())
    return {"memory_mb": memory, "sent_mb": sent / _MB, "descriptors": victim.descriptors() - descriptors}
