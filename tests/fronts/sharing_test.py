"""What processes of one server share: the buffer budget, the counts, and how many there are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from bertserve.serving.engine.base import EngineLoad
from bertserve.serving.fronts.slots import SharedSlots, automatic
from bertserve.serving.inference.requests import Outcome, Timings
from bertserve.serving.net.buffers import BufferBudget
from bertserve.serving.records import BULK, DEFAULT_PRIORITY
from bertserve.serving.scheduling.cost import CostPoint
from bertserve.serving.settings import Settings
from bertserve.serving.telemetry.metrics import CountsSince, Metrics

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20


def test_budgets_of_several_processes_are_one() -> None:
    """What one holds, the others cannot; each gives back its own alone."""
    settings = Settings.load(["--buffer-limit-mb", "16"], {})
    slots = SharedSlots.create(3)
    budgets = [BufferBudget.of(settings, slots.values, slot) for slot in range(3)]
    shares = [budget.share() for budget in budgets]
    assert shares[0].take(8 * MIB)
    assert shares[1].take(6 * MIB)
    assert not shares[2].take(3 * MIB)
    assert [budget.used for budget in budgets] == [14 * MIB] * 3
    assert [budget.refusals for budget in budgets] == [0, 0, 1]
    shares[1].close()
    assert list(slots.values) == [8 * MIB, 0, 0]
    assert shares[2].take(3 * MIB)


def test_a_process_writes_only_what_it_holds_itself() -> None:
    """Others take and give at any moment, also between two looks at what all hold."""

    class Busy(list[int]):
        def __iter__(self) -> Iterator[int]:
            yield from super().__iter__()
            self[1] += MIB

    slots = Busy([0, 0])
    share = BufferBudget(16 * MIB, 8 * MIB, slots).share(16_384)
    for size in (MIB, 100, MIB):
        assert share.take(size)
    assert slots[0] == share.held - 16_384
    share.close()
    assert slots[0] == 0


def outcome(number: int) -> Outcome[np.ndarray]:
    timings = Timings(10.0 * number, 20.0 * number, 30.0 * number, 1000.0 * number)
    priority = BULK if number % 3 == 0 else DEFAULT_PRIORITY
    answer = np.zeros((number, 2))
    return Outcome(answer, f"m{number % 2}", "1", timings, 8 * number, number, cached=number == 2, priority=priority)


def count(metrics: Metrics, numbers: range) -> None:
    for number in numbers:
        metrics.count_outcome(outcome(number), ("http", "grpc")[number % 2])
        metrics.refused("overloaded", "http", "m0")
        metrics.failures["m1", "1"].count += 1
        metrics.failures["m1", "1"].ns += number


def test_counts_of_several_processes_add_up() -> None:
    """As if one process had counted all; each count is passed on once."""
    alone, core, fronts = Metrics(), Metrics(), [Metrics(), Metrics()]
    count(alone, range(1, 13))
    for turn in range(3):
        for place, front in enumerate(fronts):
            first = 1 + 4 * turn + 2 * place
            count(front, range(first, first + 2))
            sent = msgspec.json.encode(front.take())
            core.add(msgspec.json.decode(sent, type=CountsSince))
    for front in fronts:
        core.add(front.take())
    assert core.counts() == alone.counts()
    assert core.failures == alone.failures
    assert sorted(core.times) == sorted(alone.times)
    for key, totals in alone.totals.items():
        assert msgspec.structs.replace(core.totals[key], last_at=0) == msgspec.structs.replace(totals, last_at=0)
    assert shown(core) == pytest.approx(shown(alone))


def shown(metrics: Metrics) -> dict[str, float]:
    """What a scrape says, without the figures of this process."""
    lines = [line for line in metrics.render().decode().splitlines() if not line.startswith(("#", "process_"))]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def load(us: float | None, gpus: int = 0) -> EngineLoad:
    costs = [] if us is None else [[CostPoint("wide", 32, 1, us), CostPoint("wide", 32, 8, 4 * us)]]
    return EngineLoad("fake", [], 1, costs=costs, gpus=list(range(gpus)))


@pytest.mark.parametrize(
    ("us", "gpus", "cpus", "fronts"),
    [
        (None, 0, 32, 1),
        (None, 1, 8, 2),
        (None, 1, 2, 1),
        (4000.0, 0, 2, 1),
        (100.0, 1, 16, 3),  # 20,000 texts a second, 7,700 of one front
        (100.0, 2, 16, 6),
        (100.0, 2, 4, 3),
    ],
)
def test_as_many_fronts_as_an_engine_can_use(us: float | None, gpus: int, cpus: int, fronts: int) -> None:
    assert automatic(load(us, gpus), cpus) == fronts
