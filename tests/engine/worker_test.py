"""What the engine process does before it is ready, in this process."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from bertserve.loadtest.benchmarks.processes import resident_bytes
from bertserve.serving.engine.base import Batch, EngineLoad, LaneKind
from bertserve.serving.engine.batches import sample_text
from bertserve.serving.engine.process import warm_up
from bertserve.serving.engine.process.wire import Channel, Kind, pack
from bertserve.serving.engine.process.worker import _lacked_memory, prepare
from bertserve.serving.errors import BundleError
from bertserve.serving.inference.served_models import Repository
from bertserve.serving.models.bundle import open_bundle
from bertserve.serving.records import ModelIndex
from bertserve.serving.scheduling.cost import CostPoint
from tests.support.engine_processes import faulty
from tests.support.models import ROOT
from tests.support.poison import FP32, tiny_bundle
from tests.support.specs import model_spec

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bertserve.serving.engine.process.wire import Ready
    from bertserve.serving.engine.specs import ModelSpec


def spec(name: str, *, batch_invariant: bool, max_length: int = 100, **changes: Any) -> ModelSpec:
    fields = {"special_ids": {"cls": 1, "sep": 2}, **changes}
    return model_spec(name, batch_invariant=batch_invariant, max_length=max_length, **fields)


def ready(*models: ModelSpec, threads: int = 1, ms: float = 0.0, **order: Any) -> Ready:
    return prepare(EngineLoad("fake", list(models), threads=threads, options={"fake_ms": ms}, **order))[1]


def singles(points: Sequence[CostPoint], kind: str = "wide") -> list[int]:
    """The lengths that were measured alone on a kind of lane."""
    return [point.tokens for point in points if point.kind == kind and point.batch == 1]


def shapes(points: Sequence[CostPoint]) -> set[tuple[int, int]]:
    return {(point.tokens, point.batch) for point in points}


def test_every_model_is_measured_over_the_lengths_that_it_will_see() -> None:
    """The shortest texts, every bucket below the longest, and the longest itself; on each kind of lane that runs it."""
    models = [spec("one", batch_invariant=True, narrow=False), spec("two", batch_invariant=False, max_length=512)]
    found = ready(*models, threads=2)
    one, two = found.costs
    assert singles(one) == [8, 16, 32, 64, 100]
    assert singles(one, "narrow") == []
    assert singles(two) == singles(two, "narrow") == [8, 16, 32, 64, 128, 256, 512]
    assert all(point.us >= 0 and point.spread_us >= 0 for point in (*one, *two))
    assert found.lanes == [LaneKind.WIDE, LaneKind.NARROW, LaneKind.NARROW]
    assert (found.engine, found.threads) == ("fake", 2)


ONE, ALONE = spec("one", batch_invariant=True, max_length=8), spec("one", batch_invariant=False, max_length=8)


def test_batches_are_measured_while_they_pay() -> None:
    """A fake batch of any size takes a millisecond, so that they grow to the budget, and never beyond it."""
    found = ready(spec("one", batch_invariant=True, max_length=16), ms=1, max_batch_tokens=100)
    assert shapes(found.costs[0]) == {(8, 1), (8, 2), (8, 4), (8, 8), (16, 1), (16, 2), (16, 4)}


def test_what_is_computed_text_by_text_is_measured_alone() -> None:
    """A batch of it costs what its texts do."""
    assert shapes(ready(ALONE, threads=2, ms=1).costs[0]) == {(8, 1)}


def test_a_measurement_is_a_typical_one() -> None:
    """A fake engine that takes three milliseconds is seen to take about that long."""
    assert all(point.us >= 3000 for point in ready(ONE, ms=3).costs[0])


def test_warm_up_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no time left each length is run once on each lane. A batch costs as much as one text of as many tokens."""
    monkeypatch.setattr(warm_up, "LIMIT_S", 0.0)
    found = ready(spec("one", batch_invariant=True, max_length=16), ms=1)
    assert [(point.tokens, point.batch) for point in found.costs[0]] == [(8, 1), (16, 1), (8, 2)]
    assert found.costs[0][2].us == found.costs[0][1].us


def test_what_is_known_is_not_measured_again(caplog: pytest.LogCaptureFixture) -> None:
    """The lanes are warmed all the same, and the log says so."""
    known = [CostPoint("wide", 8, 1, 123.0, 4.0)]
    caplog.set_level(logging.INFO, "bertserve.engine")
    assert ready(ONE, ms=1, costs=[known]).costs == [known]
    assert "warm-up of one: " in caplog.text
    assert "1 costs from the cache" in caplog.text


@pytest.mark.parametrize("lane", [0, 1])
def test_memory_of_the_longest_texts_is_released_after_warm_up(models: Path, lane: int) -> None:
    """The first one afterwards allocates its attention scores anew: 12 heads of 256 by 256 floats."""
    model = Repository.open(models, "fp32").models[0].spec()
    known = [[CostPoint(kind, 8, 1, 100.0) for kind in ("wide", "narrow")]]
    backend, _ = prepare(EngineLoad("ort-cpu", [model], threads=2, costs=known))
    before = resident_bytes(os.getpid())
    backend.runner(lane).run(Batch(ModelIndex(0), [sample_text(model, model.max_length)]))
    assert resident_bytes(os.getpid()) - before > 12 * 256 * 256 * 4


def test_a_model_that_cannot_answer_is_refused() -> None:
    """With the engine's own words."""
    with pytest.raises(BundleError, match=r"warm-up of one failed: .*told to fail"):
        prepare(EngineLoad("fake", [spec("one", batch_invariant=True)], threads=1, options=faulty({1: "raise"})))


def test_models_are_numbered_as_they_were_given() -> None:
    """Requests name them by that number."""
    lengths = {"a": 8, "b": 9, "c": 10}
    models = [spec(name, batch_invariant=True, max_length=length) for name, length in lengths.items()]
    assert [max(singles(points)) for points in ready(*models).costs] == [8, 9, 10]


@pytest.mark.parametrize("max_length", [3, 7, 8, 16, 17])
def test_no_text_of_warm_up_is_longer_than_the_model_takes(max_length: int) -> None:
    """A model for very short texts is a model too."""
    assert max(singles(ready(spec("one", batch_invariant=True, max_length=max_length)).costs[0])) == max_length


WITHOUT_A_LIBRARY = """
import sys
sys.modules["onnxruntime"] = None
from bertserve.serving.rollout.engine_process import main
main([int(word) for word in sys.argv[1:]])
"""


def first_word(load: EngineLoad) -> tuple[Kind, str]:
    """What an engine process that cannot import its engine's library says of an order first."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-c", WITHOUT_A_LIBRARY, str(theirs.fileno())]
        with subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=ROOT) as process:
            theirs.close()
            channel = Channel(ours)
            channel.send(pack(Kind.LOAD, msgspec.json.encode(load)))
            assert channel.receive()[0] is Kind.STARTED
            kind, _, _, payload = channel.receive()
            process.kill()
            return kind, bytes(payload).decode()


def test_a_bundle_is_verified_before_a_library_is_imported(models: Path, tmp_path: Path) -> None:
    """By the process that is to load it: a version that comes while the server serves is looked at by nobody else."""
    bundle = tiny_bundle(models, tmp_path)
    model = model_spec(path=str(bundle / FP32))
    load = EngineLoad("ort-cpu", [model], threads=1, bundles=[(str(bundle), open_bundle(bundle).sha256)])
    (bundle / "extra").touch()
    kind, said = first_word(load)
    assert kind is Kind.REFUSED
    assert "'extra' is not listed" in said


def test_memory_that_is_short_is_told_from_what_is_wrong() -> None:
    """By the words of the library underneath, at whatever depth."""

    def refused(cause: Exception) -> BundleError:
        error = BundleError("cannot be loaded")
        error.__cause__ = cause
        return error

    deep = RuntimeError("warm-up")
    deep.__cause__ = RuntimeError("BFCArena::AllocateRawInternal Failed to allocate memory for requested buffer")
    assert _lacked_memory(refused(deep))
    assert _lacked_memory(refused(RuntimeError("Exception during loading: std::bad_alloc")))
    assert _lacked_memory(refused(RuntimeError("cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY (CUDA error 2)")))
    assert not _lacked_memory(refused(RuntimeError("No Op registered for Gelu")))
    assert not _lacked_memory(BundleError("weights.onnx does not match its SHA-256 in the manifest"))
