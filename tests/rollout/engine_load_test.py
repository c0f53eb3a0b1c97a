"""What a load needs, before an engine takes it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from serving.engine.base import EngineLoad
from serving.engine.specs import Gpu, ModelSpec
from serving.errors import EngineFailed
from serving.rollout.engine_load import LoadBuilder
from serving.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

    from serving.rollout.engine_choice import Chooser

MIB = 1 << 20


@pytest.mark.parametrize(("free_mib", "fits"), [(1900, True), (1800, False)])
def test_weights_beside_a_graph_need_room_too(tmp_path: Path, free_mib: int, *, fits: bool) -> None:
    """10 + 1,000 MiB, 1.3 times that and 500 more."""
    for name, size_mib in (("a", 10), ("a.data", 1000)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(size_mib * MIB)
    model = ModelSpec("m", str(tmp_path / "a"), "", True, 10, 10, {}, (), ())
    gpu = Gpu(0, "card", "GPU-0", "7.5", 16_384 * MIB)
    chooser = cast("Chooser", SimpleNamespace(free_bytes=lambda: [(gpu, free_mib * MIB)]))
    loads = LoadBuilder(Settings.load([], {}), chooser)
    load = EngineLoad(engine="ort-cuda", models=[model], threads=1, gpus=[0])
    if fits:
        loads.check_room(load)
    else:
        with pytest.raises(EngineFailed, match="need about 1,813 MiB beside the serving engine; free GPU memory"):
            loads.check_room(load)
