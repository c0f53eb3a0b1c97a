"""The pool of front processes: restarts, and what processes share."""

from __future__ import annotations

import asyncio
import contextlib
import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from bertserve.serving.fronts import pool
from bertserve.serving.fronts.wire import FrontCounts, Kind
from bertserve.serving.net.connection_limiter import PeerDebts
from bertserve.serving.telemetry.metrics import Metrics
from tests.support.virtual_time import now, virtually

START_S = 4.0
"""Seconds after which a front fails in its start."""


class Failing:
    """A front that ends. `lives` has how long each is up, or None if it never is; `starts` gets their starts."""

    def __init__(self, lives: list[float | None], starts: list[float]) -> None:
        self._lives, self._starts = lives, starts
        self.link = SimpleNamespace(tell=lambda *_: None)
        self.process = SimpleNamespace(pid=1, returncode=1)
        self.ended = asyncio.Event()
        self.up_at = math.inf

    async def start(self, *_: object) -> None:
        self._starts.append(now())
        lives_s = self._lives.pop(0)
        if lives_s is not None:
            self.up_at = now()
        asyncio.get_running_loop().call_later(START_S if lives_s is None else lives_s, self.ended.set)

    def set_up(self, _: object) -> None: ...

    async def close(self) -> None: ...


async def pauses(lives: list[float | None], monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds before each restart of fronts that are up for so long, or never."""
    lived = [START_S if one is None else one for one in lives]
    starts: list[float] = []
    monkeypatch.setattr(pool, "FrontProcess", lambda *_: Failing(lives, starts))
    monkeypatch.setattr(pool, "time", SimpleNamespace(monotonic=now))
    parts = {"_ending": False, "_fronts": [], "slots": SimpleNamespace(values=[0]), "restarts": 0}
    keeper = SimpleNamespace(**parts, _setup=lambda _: None, changed=lambda: None)
    with pytest.raises(IndexError):  # there are no more
        await pool.FrontPool._keep(cast("Any", keeper), 0, cast("Any", None), PeerDebts(30_000, 1))
    return [end - begin - one for (begin, end), one in zip(pairwise(starts), lived, strict=True)]


@virtually
async def test_the_pause_before_a_restart_grows_to_half_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """While no front comes up: each reads its models, and logs that it cannot start."""
    assert await pauses([None] * 12, monkeypatch) == pytest.approx([0, 0, 0, 0.5, 1, 2, 4, 8, 16, 30, 30, 30])


@virtually
async def test_a_front_that_was_up_for_a_while_is_started_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends before it do not count any more."""
    lives: list[float | None] = [1.0, 1.0, 1.0, 1.0, 1.0, 60.0, 1.0, 1.0, 1.0]
    assert await pauses(lives, monkeypatch) == pytest.approx([0, 0, 0, 0.5, 1, 0, 0, 0, 0.5])


@pytest.mark.parametrize(("up", "limit_s"), [(True, 15.0), (False, 60.0)])
@virtually
async def test_a_front_that_hangs_is_killed(*, up: bool, limit_s: float) -> None:
    """In its start, too, or no engine could be replaced; a start may take longer than a silence."""
    killed: list[float] = []
    front = SimpleNamespace(up=up, silent_s=0.0, kill=lambda _: killed.append(now()))
    limiter = SimpleNamespace(taken=0, limit=1)
    watched = SimpleNamespace(_fronts=[front], up=[front] * up, _limiter=limiter)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s + 1):
            await pool.FrontPool._watch(cast("Any", watched))
    assert killed[0] == pytest.approx(limit_s, abs=0.5)


@virtually
async def test_a_front_that_took_long_to_start_is_not_silent_once_it_is_up() -> None:
    """Its first report comes a moment later."""
    front = pool.FrontProcess(cast("Any", SimpleNamespace(changed=lambda: None)), 1)
    front.silent_s = 50.0
    front._is_up(b"")
    assert (front.up, front.silent_s) == (True, 0.0)


def test_a_debt_holds_in_all_processes() -> None:
    """Whoever closes connections of a front owes the core and other fronts as much, and fronts what the core tells."""
    told: dict[int, list[Any]] = {1: [], 2: []}
    links = [SimpleNamespace(tell=lambda kind, debt, slot=slot: told[slot].append((kind, debt))) for slot in told]
    first, second = (SimpleNamespace(link=link) for link in links)
    shared = pool.FrontPool.__new__(pool.FrontPool)
    shared._fronts, shared.processes = cast("Any", [first, second]), 0
    debts = PeerDebts(30_000, 1)
    shared.start(cast("Any", None), debts)
    payload = msgspec.json.encode(("192.0.2.7", 20_000.0))
    shared.charge(debts, cast("Any", first), payload)
    assert told == {1: [], 2: [(Kind.DEBT, msgspec.Raw(payload))]}
    assert debts.begin("192.0.2.7")[0] == pytest.approx(15_000)
    assert [peer for peer, _ in debts.present()] == ["192.0.2.7"]
    debts.charge("192.0.2.8", 20_000.0)
    assert told[1] == [(Kind.DEBT, ("192.0.2.8", 20_000.0))] == told[2][1:]


@virtually
async def test_a_scrape_waits_for_what_its_fronts_count_after_it() -> None:
    """A report that was under way lacks answers that clients have already."""
    counted, asked = [], []
    front = pool.FrontProcess(cast("Any", SimpleNamespace(count=counted.append)), 1)
    front.link = cast("Any", SimpleNamespace(tell=lambda kind, number: asked.append((kind, number))))
    gathering = asyncio.ensure_future(pool.FrontPool.gather(cast("Any", SimpleNamespace(_gathered=0, up=[front]))))
    await asyncio.sleep(0.1)
    assert asked == [(Kind.COUNT, 1)]
    for number in (0, 1):
        assert not gathering.done()
        front._counted(msgspec.json.encode(FrontCounts(number, Metrics().take())))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await gathering
    assert now() == pytest.approx(0.1)
    assert [each.number for each in counted] == [0, 1]
    assert not front.counting
