"""Several GPUs as one engine: what each of them is told to load, and a GPU whose process cannot be started."""

from __future__ import annotations

import asyncio
import subprocess

import pytest

from bertserve.serving.engine.base import EngineLoad
from bertserve.serving.engine.process.fleet import RemoteFleet, for_one_gpu
from bertserve.serving.engine.process.supervisor import Supervisor
from bertserve.serving.engine.specs import KernelFiles
from bertserve.serving.errors import EngineFailed
from bertserve.serving.scheduling.cost import CostPoint

WIDE, NARROW = CostPoint("wide", 8, 1, 100.0), CostPoint("narrow", 8, 1, 100.0)


def test_a_card_is_told_its_own_costs_alone() -> None:
    """The narrow lanes are the fleet's: if a GPU repeated them, every start would double the table."""
    load = EngineLoad("fake", [], threads=1, gpus=[0, 1], costs=[[WIDE, NARROW]], kernels=[KernelFiles(write="x")])
    first, second = for_one_gpu(load, 0), for_one_gpu(load, 1)
    assert first.costs == second.costs == [[WIDE]]
    assert (first.gpus, second.gpus) == ([0], [1])
    assert [first.kernels[0].write, second.kernels[0].write] == ["x", ""]


def test_a_fleet_whose_processes_cannot_be_started_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else whoever waits for the first warm GPU would wait for ever."""

    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)

    async def main() -> None:
        async with asyncio.timeout(10):
            await RemoteFleet.start(EngineLoad("fake", [], threads=1, gpus=[0, 1]), start_limit_s=1.5)

    with pytest.raises(EngineFailed, match="cannot be started: Resource temporarily unavailable") as failed:
        asyncio.run(main())
    assert failed.value.passing


def test_a_fleet_that_is_refused_for_want_of_memory_may_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Like one engine, and not where one of the GPUs has another reason."""

    async def start(reasons: dict[int, bool]) -> None:
        async def refuse(load: EngineLoad, _: float) -> None:
            raise EngineFailed("refused", passing=reasons[load.gpus[0]])

        monkeypatch.setitem(Supervisor.__init__.__kwdefaults__, "start", refuse)
        async with asyncio.timeout(10):
            await RemoteFleet.start(EngineLoad("fake", [], threads=1, gpus=[0, 1]), start_limit_s=1.5)

    for reasons, passing in (({0: True, 1: True}, True), ({0: True, 1: False}, False)):
        with pytest.raises(EngineFailed, match="refused") as failed:
            asyncio.run(start(reasons))
        assert failed.value.passing is passing
