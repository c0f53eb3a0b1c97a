"""Kernels that an engine compiled: kept beside what else the node has of a bundle, under the name of their artifact."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bertserve.serving.engine.cpu import openvino
from bertserve.serving.engine.specs import KernelFiles
from bertserve.serving.inference.served_models import Repository
from bertserve.serving.models.kernel_cache import KernelCache
from bertserve.serving.models.node_cache import open_entry
from bertserve.serving.models.verified_dir import digest
from tests.support.no_room import no_room
from tests.support.tasks import tiny_model, write_bundle
from tests.support.waiting import wait_for


def test_what_the_engine_cpu_compiled_is_found_at_the_next_start(tmp_path: Path) -> None:
    """It is OpenVINO's: named after the second artifact. No other engine for CPUs keeps any."""
    write_bundle(tmp_path / "models", tiny_model("tag"), second=tiny_model("tag"))
    model, root = Repository.open(tmp_path / "models", engine="cpu").models[0], tmp_path / "cache"
    assert KernelCache(root).files("ort-cpu", [model]) == []
    first = KernelCache(root)
    [files] = first.files("cpu", [model])
    assert (files.read, files.sha256) == ("", "")
    Path(files.write).write_bytes(b"kernels")
    first.keep()
    wait_for(lambda: not Path(files.write).exists(), "the kernels in the cache")
    [again] = KernelCache(root).files("cpu", [model])
    entry = open_entry(root, model.bundle)
    kept = entry.path / "kernels.model-fp32-openvino-onnx.bin"
    assert again == KernelFiles(read=str(kept), sha256=digest(kept), write=again.write)
    assert kept.read_bytes() == b"kernels"


def test_kernels_for_which_there_is_no_room_leave_nothing(tmp_path: Path) -> None:
    """Neither a part of them in the engine's file nor, where the cache has no room, that file."""
    write_bundle(tmp_path / "models", tiny_model("tag"), second=tiny_model("tag"))
    model, root = Repository.open(tmp_path / "models", engine="cpu").models[0], tmp_path / "cache"
    cache = KernelCache(root)
    [files] = cache.files("cpu", [model])
    lane: Any = SimpleNamespace(compiled=lambda: b"k" * 100_000)
    with no_room(50_000):
        openvino.keep(model.spec(), lane, files.write)
    assert not Path(files.write).exists()
    openvino.keep(model.spec(), lane, files.write)
    with no_room(50_000):
        cache.keep()
        wait_for(lambda: not Path(files.write).exists(), "the end of the file that was not kept")
    assert open_entry(root, model.bundle) is None
    assert [path.name for path in root.rglob("*") if path.is_file()] == []
