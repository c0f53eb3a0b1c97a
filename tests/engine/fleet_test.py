"""Several GPUs as one engine: what each of them is told to load, and a GPU whose process cannot be started."""

from __future__ import annotations

import asyncio
import subprocess
from functools import partial

import pytest

from serving.engine.base import EngineLoad
from serving.engine.process import fleet
from serving.engine.process.fleet import RemoteFleet, for_one_gpu
from serving.engine.process.supervisor import Supervisor
from serving.engine.specs import KernelFiles, PartFile
from serving.errors import EngineFailed
from serving.scheduling.cost import CostPoint
from tests.support.specs import model_spec

WIDE, NARROW = CostPoint("wide", 8, 1, 100.0), CostPoint("narrow", 8, 1, 100.0)


def test_a_card_is_told_its_own_costs_alone() -> None:
    """The narrow lanes are the fleet's: if a GPU repeated them, every start would double the table."""
    load = EngineLoad("fake", [], threads=1, gpus=[0, 1], costs=[[WIDE, NARROW]], kernels=[KernelFiles(write="x")])
    first, second = for_one_gpu(load, 0), for_one_gpu(load, 1)
    assert first.costs == second.costs == [[WIDE]]
    assert (first.gpus, second.gpus) == ([0], [1])
    assert [first.kernels[0].write, second.kernels[0].write] == ["x", ""]


@pytest.mark.parametrize(("parts", "expected"), [(1, "fleet"), (2, "engine")])
def test_cards_that_share_a_model_have_one_process(monkeypatch: pytest.MonkeyPatch, parts: int, expected: str) -> None:
    """Which starts the others itself; without such a model each GPU has an engine of its own."""

    async def start(kind: str, load: EngineLoad, *_: object, **__: object) -> tuple[str, list[int]]:
        return kind, load.gpus

    monkeypatch.setattr(fleet.RemoteEngine, "start", partial(start, "engine"))
    monkeypatch.setattr(fleet.RemoteFleet, "start", partial(start, "fleet"))
    split = model_spec(parts=(PartFile("2.onnx", ""),) * (parts - 1), split_by="layers" if parts > 1 else None)
    load = EngineLoad("ort-cuda", [model_spec(), split], threads=1, gpus=[0, 1])
    assert asyncio.run(fleet.start_engine(load)) == (expected, [0, 1])


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
