"""The attacker's process: `python -m tests.hostile.attacker` attacks on request (see child.py)."""

from __future__ import annotations

import contextlib
import random
import resource
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from bertserve.loadtest.errors import BenchError
from bertserve.loadtest.generator.child import answer
from bertserve.loadtest.generator.closed_loop import Lane, connect
from bertserve.loadtest.generator.messages import Target, messages
from tests.hostile.attacks import ATTACKS, BYTES_PER_S, CONNECTIONS, MODEL
from tests.hostile.lines import HOST, Over, Pace

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.hostile.attacks import Attack

_REOPEN_S = 0.02
_SLICE_S = 0.5
_SIDE_BY_SIDE = {"http": 1, "grpc": 8}
"""Concurrent good calls on one connection."""


def attack(name: str, port: int, seconds: float, rate: float = 1.0) -> dict[str, float]:
    """Attacks at `rate` times the usual speed; returns the bytes per second and the connections opened."""
    what = ATTACKS[name]
    opened: list[int] = []
    sent = _in_threads(what.connections, rate * BYTES_PER_S, seconds, partial(_attack, what, port, opened))
    return sent | {"connections": sum(opened)}


def mixed(ports: dict[str, int], seconds: float, seed: int) -> dict[str, float]:
    """Runs attacks of all kinds side by side, each for a moment, with good calls between them."""
    chosen = random.Random(seed)
    seeds = iter([chosen.random() for _ in range(CONNECTIONS)])
    return _in_threads(CONNECTIONS, BYTES_PER_S, seconds, lambda pace: _mixed(ports, random.Random(next(seeds)), pace))


def _mixed(ports: dict[str, int], chosen: random.Random, pace: Pace) -> None:
    while time.monotonic() < pace.until:
        name = chosen.choice(["", *ATTACKS])
        slice_ = Pace(pace.bytes_per_s, min(pace.until, time.monotonic() + _SLICE_S))
        if name:
            _attack(ATTACKS[name], ports[ATTACKS[name].wire], [], slice_)
        else:
            wire = chosen.choice(list(ports))
            _good(Target(wire, HOST, ports[wire], MODEL), slice_)
        pace.sent += slice_.sent


def _in_threads(count: int, rate: float, seconds: float, do: Callable[[Pace], None]) -> dict[str, float]:
    until = time.monotonic() + seconds
    paces = [Pace(rate, until) for _ in range(count)]
    threads = [threading.Thread(target=do, args=(pace,)) for pace in paces]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"bytes_per_s": sum(pace.sent for pace in paces) / seconds}


def _attack(what: Attack, port: int, opened: list[int], pace: Pace) -> None:
    """One slot: one connection after another until the time is over."""
    count = 0
    with contextlib.suppress(Over):
        while True:
            with contextlib.suppress(OSError), what.line(port, pace) as line:
                count += 1
                what.does(line)
            pace.rest(_REOPEN_S)
    opened.append(count)


def _good(target: Target, pace: Pace) -> None:
    """Good cheap calls, as fast as they are answered."""
    with contextlib.suppress(Over, BenchError), connect(HOST, target.port) as connection:
        lane = Lane(connection, target.wire(), lambda _: None)
        [message] = messages(target, "embed", ["short"])
        burst = [message] * _SIDE_BY_SIDE[target.protocol]
        while True:
            size = sum(map(len, burst))
            pace.allowed(size)
            lane.send(burst)
            pace.sent += size
            due = len(burst)
            while due:
                due -= len(lane.receive())


if __name__ == "__main__":
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    answer({"attack": attack, "mixed": mixed})
