"""The engine `cpu`: each bucket of lengths has the library that is faster, on all lanes alike."""

from __future__ import annotations

import os
import signal
import time
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from bertserve.serving import host
from bertserve.serving.engine.base import Batch, EngineLoad
from bertserve.serving.engine.cpu.ort import OrtCpuBackend
from bertserve.serving.engine.process.worker import prepare
from bertserve.serving.engine.specs import KernelFiles
from bertserve.serving.errors import EngineFault
from bertserve.serving.inference.served_models import Repository
from bertserve.serving.models.verified_dir import digest
from bertserve.serving.records import EncodedText, ModelIndex
from bertserve.serving.scheduling.cost import CostPoint
from tests.support.clients import get, post_json
from tests.support.engines import kill_engine
from tests.support.server import START_LIMIT_S, Server
from tests.support.skips import excused
from tests.support.tasks import MAX_LENGTH, tiny_model, write_bundle
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from bertserve.serving.engine.specs import ModelSpec
    from bertserve.serving.records import Array

hybrid = pytest.importorskip("bertserve.serving.engine.cpu.hybrid", reason="the extra `openvino` is not installed")

ONLY = ModelIndex(0)
LENGTHS = (3, 16, 17, 32, 33, MAX_LENGTH)
MIXED = ["onnxruntime", "openvino", "onnxruntime"]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose second artifact answers otherwise than its first, so that an answer says who gave it."""
    root = tmp_path_factory.mktemp("models")
    write_bundle(root, tiny_model("embed"), second=tiny_model("embed", seed=1))
    return root


@pytest.fixture(scope="module")
def spec(repository: Path) -> ModelSpec:
    return Repository.open(repository, engine="cpu").models[0].spec()


@pytest.fixture(scope="module")
def answers(spec: ModelSpec) -> dict[str, dict[int, Array]]:
    """By library and length: what each artifact answers, both run by ONNX Runtime."""
    forms = {"onnxruntime": spec, "openvino": spec.second}
    backends = {name: OrtCpuBackend([form], threads=1) for name, form in forms.items()}
    return {
        name: {length: backend.runner(0).run(Batch(ONLY, [text(length)])).arrays[0][0] for length in LENGTHS}
        for name, backend in backends.items()
    }


def text(length: int) -> EncodedText:
    return EncodedText(array("i", [5 + position % 7 for position in range(length)]))


def costs(libraries: Sequence[str]) -> list[CostPoint]:
    """The costs of an earlier start that chose these libraries for the buckets."""
    return [
        CostPoint(kind, length, 1, 100.0, library=library)
        for kind in ("wide", "narrow")
        for length, library in zip((16, 32, 64), libraries, strict=True)
    ]


def libraries_of(points: Sequence[CostPoint]) -> dict[int, str]:
    return {point.tokens: point.library for point in points}


@pytest.mark.parametrize(
    "libraries", [MIXED, *(pytest.param([name] * 3, marks=pytest.mark.slow) for name in ("openvino", "onnxruntime"))]
)
def test_every_lane_computes_a_length_by_the_library_of_its_bucket(
    spec: ModelSpec, answers: dict[str, dict[int, Array]], libraries: list[str]
) -> None:
    """As an earlier start has chosen, alone and in a batch: an answer does not depend on where it is computed."""
    backend, ready = prepare(EngineLoad("cpu", [spec], threads=2, costs=[costs(libraries)]))
    assert (ready.engine, ready.costs) == ("cpu", [costs(libraries)])
    assert len(backend.lanes()) == 3
    for lane in range(3):
        for length, library in zip(LENGTHS, np.repeat(libraries, 2), strict=True):
            rows = backend.runner(lane).run(Batch(ONLY, [text(length)] * 2)).arrays[0]
            lone = backend.runner(lane).run(Batch(ONLY, [text(length)])).arrays[0]
            np.testing.assert_allclose([*rows, *lone], [answers[library][length]] * 3, atol=1e-4)


def test_a_model_without_a_second_form_takes_openvino_from_no_other(tmp_path: Path) -> None:
    """The choice is made for each model: both are served, and a line names the one that ONNX Runtime alone runs."""
    write_bundle(tmp_path, tiny_model("embed"), second=tiny_model("embed"))
    write_bundle(tmp_path, tiny_model("tag"))
    asked = ["--engine", "cpu"] if host.saturates() else []  # there `auto` leaves OpenVINO out
    with Server(tmp_path, *asked) as server:
        assert get(server.http, "/info").json()["engine"]["engine"] == "cpu"
        assert "only ONNX Runtime runs tag: OpenVINO needs an artifact of its own; export again with" in server.log
        libraries = {model["name"]: model["libraries"] for model in get(server.http, "/status").json()["models"]}
        assert set(libraries["embed"]) == set(libraries["tag"]) == {"16", "32", "64"}
        assert set(libraries["tag"].values()) == {"onnxruntime"}
        for path in ("/embed", "/tag"):
            assert post_json(server.http, path, b'{"inputs": "the server is on"}').status == 200


def test_a_batch_over_two_libraries_fails(spec: ModelSpec) -> None:
    """Nothing makes one; it would let an answer depend on its company. Each of its texts is then computed alone."""
    backend, _ = prepare(EngineLoad("cpu", [spec], threads=2, costs=[costs(MIXED)]))
    with pytest.raises(EngineFault, match="different libraries"):
        backend.runner(0).run(Batch(ONLY, [text(16), text(17)]))


@pytest.mark.slow
def test_what_a_start_has_chosen_the_next_one_keeps(spec: ModelSpec) -> None:
    """Every cost names its library, one for a bucket on all lanes."""
    _, first = prepare(EngineLoad("cpu", [spec], threads=2))
    chosen = libraries_of(first.costs[0])
    assert set(chosen) == {8, 16, 32, MAX_LENGTH}
    assert set(chosen.values()) <= {"onnxruntime", "openvino"}
    assert all(point.library == chosen[point.tokens] for point in first.costs[0])
    assert chosen[8] == chosen[16]
    _, second = prepare(EngineLoad("cpu", [spec], threads=2, costs=first.costs))
    assert second.costs == first.costs


class Slower:
    """A model on a lane that takes longer than it did, for texts of some lengths."""

    def __init__(self, model: Any, is_slow: Callable[[int], bool]) -> None:
        self._model, self._is_slow = model, is_slow
        self.warm_up = getattr(model, "warm_up", None)

    def run(self, batch: Batch) -> Sequence[Array]:
        if self._is_slow(batch.padded_length):
            time.sleep(0.005)
        return self._model.run(batch)  # type: ignore[no-any-return]

    def trim(self) -> None:
        pass


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[int], bool]], None]:
    """Makes a library take five milliseconds more for some lengths: far beyond what noise makes of small models."""
    monkeypatch.setattr(hybrid, "_LIMIT_S", 60.0)

    def slow(library: str, is_slow: Callable[[int], bool]) -> None:
        module = getattr(hybrid, library)
        load = module.load
        monkeypatch.setattr(
            module, "load", lambda *model, **how: [Slower(lane, is_slow) for lane in load(*model, **how)]
        )

    return slow


@pytest.mark.parametrize(
    ("border", "limit_s", "libraries"),
    [
        pytest.param(0, 60.0, ["openvino"] * 4, marks=pytest.mark.slow),
        (32, 60.0, ["onnxruntime", "onnxruntime", "onnxruntime", "openvino"]),
        pytest.param(64, 60.0, ["onnxruntime"] * 4, marks=pytest.mark.slow),
        # What could not be measured counts as the bucket before; the first one is always measured.
        (16, 0.0, ["onnxruntime"] * 4),
    ],
)
def test_the_border_between_the_libraries_is_where_the_faster_one_changes(
    spec: ModelSpec,
    slow: Callable[[str, Callable[[int], bool]], None],
    monkeypatch: pytest.MonkeyPatch,
    border: int,
    limit_s: float,
    libraries: list[str],
) -> None:
    """Of 8, 16, 32 and 64 tokens."""
    monkeypatch.setattr(hybrid, "_LIMIT_S", limit_s)
    slow("ort", lambda length: length > border)
    slow("openvino", lambda length: length <= border)
    _, ready = prepare(EngineLoad("cpu", [spec], threads=1))
    assert list(libraries_of(ready.costs[0]).values()) == libraries


@pytest.mark.parametrize("gains", [[0.0, 0.0, 0.0], [-0.39, -1, -1], [1, 0.39, -1], [1, -0.3, 0.3], [0.0]])
def test_a_small_gain_moves_no_border(gains: list[float]) -> None:
    """What is about as fast is chosen alike at every start: up to 16 tokens ONNX Runtime."""
    assert hybrid._border(gains) == 1


def test_what_openvino_compiled_is_read_again(
    spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """To the same bits on every lane; kernels of another library or processor, or broken ones, are compiled anew."""

    def rows(*kernels: KernelFiles) -> list[NDArray[np.float32]]:
        backend = hybrid.HybridCpuBackend([spec], 2, [costs(MIXED)], kernels)
        return [backend.runner(lane).run(Batch(ONLY, [text(32)] * 2)).arrays[0] for lane in range(3)]

    kept = tmp_path / "kernels"
    compiled = rows(KernelFiles(write=str(kept)))
    with monkeypatch.context() as patched:
        patched.setattr(hybrid.openvino, "load", None)
        np.testing.assert_array_equal(rows(KernelFiles(read=str(kept), sha256=digest(kept))), compiled)
    assert "cached kernels" not in caplog.text
    np.testing.assert_array_equal(rows(KernelFiles(read=str(kept), sha256="0" * 64)), compiled)
    assert "the cached kernels of embed cannot be read" in caplog.text
    monkeypatch.setattr(hybrid.openvino.host, "cpu", lambda: "another processor")
    caplog.set_level("INFO")
    np.testing.assert_array_equal(rows(KernelFiles(read=str(kept), sha256=digest(kept))), compiled)
    assert "are for another artifact, processor or library" in caplog.text


def test_a_model_without_a_second_form_is_left_to_onnx_runtime(tmp_path: Path) -> None:
    """Beside one that has both, or as the next version of one that had."""
    write_bundle(tmp_path, tiny_model("tag"))
    model = Repository.open(tmp_path, engine="cpu").models[0].spec()
    _, ready = prepare(EngineLoad("cpu", [model], threads=2, costs=[costs(MIXED)]))
    assert set(libraries_of(ready.costs[0]).values()) == {"onnxruntime"}


def test_a_server_tells_what_computes_which_lengths_and_keeps_it(repository: Path, tmp_path: Path) -> None:
    """The choice outlives the engine process, and with a cache the server."""
    with Server(repository, "--engine", "cpu", "--cache-dir", str(tmp_path)) as server:
        chosen = told(server)
        assert chosen.keys() == {"16", "32", "64"}
        assert post_json(server.http, "/embed", b'{"inputs": "hello"}').headers["x-compute-type"] == "cpu"
        engine = server.engine_pid()
        os.kill(engine, signal.SIGKILL)
        wait_for(lambda: server.engine_pid() not in {None, engine}, "another engine", START_LIMIT_S)
        server.wait_state()
        assert told(server) == chosen
        wait_for(lambda: [*tmp_path.glob("embed/1/[0-9]*/costs.*")], "the costs in the cache")
        wait_for(lambda: not [*tmp_path.glob(".kernels-*")], "what was compiled in the cache")
    with Server(repository, "--engine", "cpu", "--cache-dir", str(tmp_path)) as server:
        assert told(server) == chosen


@pytest.mark.slow
def test_onnx_runtime_serves_on_where_the_engine_dies_too_often(repository: Path) -> None:
    """Where `auto` chose it: the server is degraded, and `/status` says why."""
    if host.saturates():
        pytest.skip(excused("auto leaves OpenVINO out on this processor"))
    with Server(repository) as server:
        assert get(server.http, "/status").json()["choice"]["engine"] == "cpu"
        for _ in range(3):
            engine = kill_engine(server)
            wait_for(lambda engine=engine: server.engine_pid() not in {None, engine}, "another engine", START_LIMIT_S)
        server.wait_state("degraded")
        status = get(server.http, "/status").json()
        assert (status["state"], status["choice"]["engine"]) == ("degraded", "ort-cpu")
        assert [each["reason"] for each in status["choice"]["rejected"] if each["engine"] == "cpu"] == [
            "the engine process died 3 times in 60 s"
        ]


def told(server: Server) -> dict[str, str]:
    """The library of each bucket, as `/status` has it."""
    status = get(server.http, "/status").json()
    assert status["engine"]["name"] == status["choice"]["engine"] == "cpu"
    libraries: dict[str, str] = status["models"][0]["libraries"]
    return libraries
