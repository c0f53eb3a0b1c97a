"""What a load needs, before an engine takes it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from prometheus_client import CollectorRegistry

from serving.engine.base import EngineLoad
from serving.engine.specs import Gpu, ModelSpec, PartFile
from serving.errors import EngineFailed
from serving.rollout.engine_load import LoadBuilder
from serving.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

    from serving.rollout.engine_choice import Chooser

MIB = 1 << 20


@pytest.mark.parametrize(("gpus", "free_mib", "fits"), [(1, 3200, True), (1, 3000, False), (2, 1900, True)])
def test_weights_beside_a_graph_need_room_too(tmp_path: Path, gpus: int, free_mib: int, *, fits: bool) -> None:
    """Of every part: 2 x (10 + 1,000) MiB, 1.3 times that and 500 more; they may lie on several GPUs."""
    for name, size_mib in (("a", 10), ("a.data", 1000), ("b", 10), ("b.data", 1000)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(size_mib * MIB)
    model = ModelSpec(
        *("m", str(tmp_path / "a"), "", True, 10, 10, {}, (), ()),
        parts=(PartFile(str(tmp_path / "b"), ""),),
        split_by="layers",
    )
    gpu = Gpu(0, "card", "GPU-0", "7.5", 16_384 * MIB)
    chooser = cast("Chooser", SimpleNamespace(gpus=[gpu]))
    loads = LoadBuilder(Settings.load([], {}), chooser, CollectorRegistry())
    load = EngineLoad(engine="ort-cuda", models=[model], threads=1, gpus=[*range(gpus)])
    loads._gpus = cast("None", SimpleNamespace(free_bytes=lambda _: free_mib * MIB))
    if fits:
        loads.check_room(load)
    else:
        with pytest.raises(EngineFailed, match="need about 3,126 MiB beside the serving engine; free GPU memory"):
            loads.check_room(load)
