"""The states of the server and their transitions.

    STARTING ─► WARMING ─► READY ⇄ DEGRADED
                   ▲         │        │
                   └─────────┴────────┘   the engine crashed and restarts: requests wait for it
    any of these ─► DRAINING ─► STOPPED   SIGTERM, SIGINT
    any of these ─► FAILED                no engine will come any more

STARTING: ports are open, nothing is loaded. WARMING: the engine loads and warms up. READY and DEGRADED accept requests;
DEGRADED runs a fallback or unproven engine. DRAINING goes through the lame duck to the drain: then no connection is
accepted, and only requests that were sent before their client could know.
"""

from __future__ import annotations

import gc
from enum import StrEnum
from typing import TYPE_CHECKING

from bertserve.serving.errors import NotReady

if TYPE_CHECKING:
    from collections.abc import Callable


_GC_THRESHOLDS = (100_000, 50, 100)
"""Requests create no reference cycles, so the garbage collector runs rarely."""


def collect_rarely() -> None:
    """Called before imports: their objects stay alive."""
    gc.set_threshold(*_GC_THRESHOLDS)


def freeze() -> None:
    """Freezes the objects of a warm process, so that the garbage collector scans only new ones."""
    gc.collect()
    gc.freeze()


class State(StrEnum):
    STARTING = "starting"
    WARMING = "warming"
    READY = "ready"
    DEGRADED = "degraded"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


_NEXT: dict[State, frozenset[State]] = {
    State.STARTING: frozenset({State.WARMING, State.DRAINING, State.FAILED}),
    State.WARMING: frozenset({State.READY, State.DEGRADED, State.DRAINING, State.FAILED}),
    State.READY: frozenset({State.DEGRADED, State.WARMING, State.DRAINING, State.FAILED}),
    State.DEGRADED: frozenset({State.READY, State.WARMING, State.DRAINING, State.FAILED}),
    State.DRAINING: frozenset({State.STOPPED, State.FAILED}),
    State.STOPPED: frozenset(),
    State.FAILED: frozenset(),
}

_RETRY_AFTER_S = 1.0

REPLY_GRACE_S = 1.0
"""Time after the drain limit for the last rejections to reach their clients."""

TRACES_GRACE_S = 2.0
"""Time at the end for the last traces to reach their collector."""


class Lifecycle:
    """The server's state.

    Attributes:
        accepting: Whether requests are accepted.
        closing: Whether clients are asked to close their connections.
        failure: The first reason of a failure.
    """

    def __init__(self) -> None:
        self.state = State.STARTING
        self.accepting = False
        self.closing = False
        self.failure = ""
        self._listeners: list[Callable[[State], None]] = []

    def subscribe(self, listener: Callable[[State], None]) -> None:
        self._listeners.append(listener)

    def to(self, state: State) -> bool:
        """Changes the state; returns False if the transition is not allowed (a late event after the end)."""
        if state not in _NEXT[self.state]:
            return False
        # DRAINING still serves like READY or DEGRADED, and requests wait while the engine restarts.
        kept = state in {State.WARMING, State.DRAINING} and self.accepting
        self.mirror(state, accepting=state in {State.READY, State.DEGRADED} or kept)
        return True

    def mirror(self, state: State, *, accepting: bool) -> None:
        """Takes over the state of another process."""
        self.state, self.accepting = state, accepting
        self.closing = not self.live or state is State.DRAINING
        for listener in self._listeners:
            listener(state)

    def fail(self, reason: str) -> None:
        self.failure = self.failure or reason
        self.to(State.FAILED)

    def accept_no_more(self) -> None:
        """Rejects every request from now on: the time to drain is over."""
        self.accepting = False

    @property
    def ready(self) -> bool:
        """Whether new traffic should come here."""
        return self.state in {State.READY, State.DEGRADED}

    @property
    def live(self) -> bool:
        """Whether the process works; False asks for a restart."""
        return self.state not in {State.FAILED, State.STOPPED}

    def refusal(self) -> NotReady:
        """The error of a request while none is accepted."""
        return NotReady(f"the server is {self.state}; try again", retry_after_s=_RETRY_AFTER_S)
