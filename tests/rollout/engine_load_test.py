"""What a load needs, before an engine takes it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from bertserve.serving.engine.base import EngineLoad
from bertserve.serving.engine.specs import Gpu
from bertserve.serving.errors import EngineFailed
from bertserve.serving.rollout import engine_load
from bertserve.serving.rollout.engine_load import LoadBuilder
from bertserve.serving.settings import Settings
from tests.support.specs import model_spec

if TYPE_CHECKING:
    from bertserve.serving.engine.specs import ModelSpec
    from bertserve.serving.rollout.engine_choice import Chooser

MIB = 1 << 20
SMALL, LARGE = 100, 1000


def weights(name: str, size_mib: int) -> ModelSpec:
    return model_spec(name, size_bytes=size_mib * MIB)


@pytest.mark.parametrize(
    ("limit_mib", "threads", "narrow", "needed_mib", "said"),
    [
        (None, 4, [True, True], 2_432, ""),
        (2_432, 4, [True, True], 2_432, ""),  # 200 for the processes, twice the weights, 4 lanes of 8
        (
            2_431,
            4,
            [False, True],
            1_432,
            "no room for a second copy of large, which narrow lanes would run; give it 2,432",
        ),
        (1_432, 4, [False, True], 1_432, "second copy of large, which"),
        (1_431, 4, [False, False], 1_300, "second copy of small, large, which"),
        (
            1_299,
            4,
            [False, False],
            1_300,
            "limit of 1,299 MiB may be too low: these models need about 1,300 MiB; give it 2,432",
        ),
        (1_299, 1, [True, True], 1_300, "may be too low: these models need about 1,300 MiB; give it 1,300"),
        (1_300, 1, [True, True], 1_300, ""),  # on one core there are no narrow lanes
    ],
)
def test_what_fits_a_containers_memory(
    monkeypatch: pytest.MonkeyPatch,
    limit_mib: int | None,
    threads: int,
    narrow: list[bool],
    needed_mib: int,
    said: str,
) -> None:
    """Second copies of the smallest models first; others stay on the wide lane, and the operator is told."""
    monkeypatch.setattr(engine_load, "memory_limit", lambda: limit_mib and limit_mib * MIB)
    models = [weights("large", LARGE), weights("small", SMALL)]
    fitting, needed_bytes, problem = engine_load.within_limit(models, threads)
    assert ([model.narrow for model in fitting], needed_bytes) == (narrow, needed_mib * MIB)
    assert said in problem
    assert bool(said) == bool(problem)


@pytest.mark.parametrize(("free_mib", "fits"), [(1900, True), (1800, False)])
def test_a_second_engine_needs_room_on_a_gpu(free_mib: int, *, fits: bool) -> None:
    """1.3 times its 1,010 MiB and 500 more."""
    gpu = Gpu(0, "card", "GPU-0", "7.5", 16_384 * MIB)
    chooser = cast("Chooser", SimpleNamespace(free_bytes=lambda: [(gpu, free_mib * MIB)]))
    loads = LoadBuilder(Settings.load([], {}), chooser)
    load = EngineLoad(engine="ort-cuda", models=[weights("m", 1010)], threads=1, gpus=[0])
    if fits:
        loads.check_room(load)
    else:
        with pytest.raises(EngineFailed, match="need about 1,813 MiB beside the serving engine; free GPU memory"):
            loads.check_room(load)
