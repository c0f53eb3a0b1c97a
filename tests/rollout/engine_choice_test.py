"""What is asked of NVIDIA's libraries beside the driver."""

from __future__ import annotations

import re
import shutil
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from bertserve.serving import host
from bertserve.serving.engine.gpu import discovery
from bertserve.serving.engine.gpu.discovery import Library, Machine
from bertserve.serving.engine.kinds import ENGINES, kind
from bertserve.serving.engine.specs import Gpu
from bertserve.serving.errors import StartupError
from bertserve.serving.inference.served_models import Repository
from bertserve.serving.models.manifest import ENGINE_GRAPHS
from bertserve.serving.rollout.engine_choice import Chooser
from bertserve.serving.rollout.model_export import home_of
from bertserve.serving.settings import Settings
from tests.support.gpus import without_gpu
from tests.support.poison import edit_manifest, sign
from tests.support.tasks import tiny_model, write_bundle

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bertserve.serving.rollout.model_export import Home

UUID = "GPU-00000000-0000-0000-0000-000000000000"


T4 = Gpu(0, "Tesla T4", UUID, "7.5", 16 << 30)


def on_a_t4(models: Path) -> Chooser:
    """What chooses on a T4 with TensorRT for RTX."""
    missing = Library(problem="not installed")
    libraries = {"rtx": Library("1.7.1.116", 13), "enterprise": missing, "ort-cuda": missing}
    found = Machine((T4,), (13, 0), libraries=libraries, free_bytes=(15 << 30,))
    return Chooser(Settings(models=models), lambda: found)


def on_t4s(models: Path, free: Sequence[int], engine: str = "ort-cuda") -> Chooser:
    """What chooses on as many T4s, of which so many bytes are free, with ONNX Runtime for CUDA."""
    cards = tuple(msgspec.structs.replace(T4, ordinal=ordinal) for ordinal in range(len(free)))
    libraries = {"ort-cuda": Library("1.23", 13)}
    found = Machine(cards, (13, 0), libraries=libraries, free_bytes=tuple(free))
    return Chooser(Settings(models=models, engine=engine), lambda: found)


def test_a_bundle_that_has_only_the_graph_names_the_build(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The server runs on the CPU, degraded, and its log says how to build an engine for this GPU."""
    models = tmp_path / "models"
    bundle, file = write_bundle(models, tiny_model("embed")), ENGINE_GRAPHS["fp16"]
    shutil.copy(bundle / "model.fp32.onnx", bundle / file)
    edit_manifest(bundle, lambda manifest: manifest["files"].append({**manifest["files"][0], "file": file}))
    sign(bundle)
    choice = on_a_t4(models).first()
    assert (choice.engine, choice.degraded) == ("ort-cpu", True)
    choice.log()
    expected = "has no artifact for the engine tensorrt on sm75 .*; build one with `.* build .*embed/1 --cache-dir DIR`"
    assert re.search(expected, caplog.text)


def test_another_engine_has_the_versions_that_are_served_now(tmp_path: Path) -> None:
    """Not those of the start: a swap was asked for, and falling back is no way out of it."""
    models = tmp_path / "models"
    write_bundle(models, tiny_model("embed"), "embed")
    chooser = Chooser(Settings(models=models), discovery.Machine)
    assert chooser.first().engine == "ort-cpu"
    write_bundle(models, tiny_model("embed", seed=1), "embed")
    served = Repository.open(models).models
    write_bundle(models, tiny_model("embed", seed=2), "embed")
    choice = chooser.fallback("ort-cuda", "it died", served, crashed=False)
    assert choice is not None
    assert [(model.version, model.bundle.path) for model in choice.repository.models] == [("2", served[0].bundle.path)]
    assert ("ort-cuda", "it died") in [(each.engine, each.reason) for each in choice.rejected]
    assert chooser.fallback("ort-cpu", "it died too", served, crashed=False) is None


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A repository with a model that has a form for each library on a CPU."""
    write_bundle(tmp_path / "models", tiny_model("embed"), second=tiny_model("embed"))
    return tmp_path / "models"


@pytest.fixture
def vnni(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a processor without it, `auto` leaves OpenVINO out."""
    monkeypatch.setattr(host, "saturates", lambda: False)


def without_openvino(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kind, "find_spec", lambda module: None if module == "openvino" else find_spec(module))


with_openvino = pytest.mark.skipif(not ENGINES["openvino"].installed, reason="the extra `openvino` is not installed")


@with_openvino
@pytest.mark.usefixtures("vnni")
def test_auto_takes_both_libraries_for_each_model_that_has_a_form_for_each(
    models: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without OpenVINO, or for a model that has one form, it is ONNX Runtime alone, and a line says why."""
    caplog.set_level("INFO")
    assert Chooser(Settings(models=models), discovery.Machine).first().engine == "cpu"
    with monkeypatch.context() as patched:
        without_openvino(patched)
        choice = Chooser(Settings(models=models), discovery.Machine).first()
    choice.log()
    assert (choice.engine, choice.degraded) == ("ort-cpu", False)
    assert "--editable '.[openvino]'" in choice.rejected[-1].reason
    assert "engine cpu not used: the engine cpu cannot run here: OpenVINO is not installed; run `" in caplog.text
    write_bundle(models, tiny_model("tag"))
    caplog.clear()
    choice = Chooser(Settings(models=models), discovery.Machine).first()
    choice.log()
    assert (choice.engine, choice.degraded) == ("cpu", False)
    assert [(model.name, model.second is not None) for model in choice.repository.models] == [
        ("embed", True),
        ("tag", False),
    ]
    (line,) = [record.getMessage() for record in caplog.records if "OpenVINO" in record.getMessage()]
    assert line.startswith("only ONNX Runtime runs tag: OpenVINO needs an artifact of its own; export again with")
    shutil.rmtree(models / "embed")
    choice = Chooser(Settings(models=models), discovery.Machine).first()
    assert (choice.engine, choice.degraded) == ("ort-cpu", False)
    assert choice.rejected[-1].reason.startswith(
        "the engine cpu has only one library to choose: only ONNX Runtime runs tag"
    )
    with pytest.raises(StartupError, match="only one library to choose"):
        Chooser(Settings(models=models, engine="cpu")).first()
    assert {record.levelname for record in caplog.records} == {"INFO"}


@with_openvino
@pytest.mark.usefixtures("vnni")
@pytest.mark.parametrize("precision", ["auto", "fp32"])
def test_a_second_form_of_another_precision_is_named_as_such(
    precision: str, models: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody is told to export again: where INT8 agrees too little the line about that is the only one."""
    caplog.set_level("INFO")

    def reserve(manifest: dict[str, Any]) -> None:
        manifest["artifacts"][1] |= {"precision": "int8", "reserved": "agrees too little"}

    edit_manifest(write_bundle(models, tiny_model("tag"), second=tiny_model("tag")), reserve)
    Chooser(Settings(models=models, precision=precision), discovery.Machine).first().log()
    about_tag = [record.getMessage() for record in caplog.records if "tag" in record.getMessage()]
    expected = {
        "auto": "tag: serving fp32: model.fp32.openvino.onnx agrees too little; set --precision int8 to serve INT8",
        "fp32": "only ONNX Runtime runs tag: its artifact for OpenVINO is int8, and fp32 is served",
    }
    assert about_tag == [expected[precision]]
    shutil.rmtree(models / "embed")
    choice = Chooser(Settings(models=models, precision=precision), discovery.Machine).first()
    assert choice.engine == "ort-cpu"
    assert choice.rejected[-1].reason == f"the engine cpu has only one library to choose: {expected['fp32']}"


@with_openvino
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"batch_invariant": False}, "only one of model.fp32.onnx and model.fp32.openvino.onnx is batch-invariant"),
        ({"batch_invariant": False, "invariance": None, "parity": None}, "model.fp32.openvino.onnx is not proven"),
    ],
)
def test_a_second_form_that_may_not_answer_is_named_with_its_reason(
    models: Path, fields: dict[str, object], reason: str
) -> None:
    """Nobody is told to export what there is."""
    bundle = write_bundle(models, tiny_model("tag"), second=tiny_model("tag"))
    edit_manifest(bundle, lambda manifest: manifest["artifacts"][1].update(fields))
    shutil.rmtree(models / "embed")
    with pytest.raises(StartupError, match=f"only one library to choose: only ONNX Runtime runs tag: {reason}"):
        Chooser(Settings(models=models, engine="cpu"), discovery.Machine).first()


@with_openvino
@pytest.mark.usefixtures("vnni")
def test_onnx_runtime_takes_over_from_both_libraries(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where they do not start or die too often, if `--engine` did not ask for them; they take over from a GPU."""
    served = Repository.open(models).models

    def fallback(gone: str, *, crashed: bool, **settings: Any) -> str | None:
        chooser = Chooser(Settings(models=models, **settings), discovery.Machine)
        if gone == "cpu":
            chooser.reject("ort-cuda", "there is no GPU")
        choice = chooser.fallback(gone, "it died", served, crashed=crashed)
        if choice is None:
            return None
        assert choice.degraded == crashed
        if gone == "cpu":
            said = {(record.levelname, record.getMessage()) for record in caplog.records}
            assert ("WARNING", "engine cpu not used: it died") in said
            assert not any("there is no GPU" in message for _, message in said)
        assert (choice.repository.models[0].second is None) == (choice.engine == "ort-cpu")
        return choice.engine

    for crashed in (True, False):
        assert fallback("cpu", crashed=crashed) == "ort-cpu"
        assert fallback("cpu", crashed=crashed, engine="cpu") is None
        assert fallback("cpu", crashed=crashed, engine="tensorrt", cpu_fallback=True) == "ort-cpu"
        assert fallback("ort-cpu", crashed=crashed) is None
    assert fallback("tensorrt", crashed=True, cpu_fallback=True) == "cpu"
    assert fallback("tensorrt", crashed=True) is None
    assert fallback("ort-cuda", crashed=False) == "cpu"


@with_openvino
def test_the_engine_cpu_wants_openvino_and_something_to_choose_from(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = Chooser(Settings(models=models, engine="cpu")).first()
    assert (choice.engine, choice.degraded) == ("cpu", False)
    without_openvino(monkeypatch)
    with pytest.raises(StartupError, match=r"--editable '\.\[openvino\]'"):
        Chooser(Settings(models=models, engine="cpu")).first()
    monkeypatch.undo()
    write_bundle(tmp_path / "others", tiny_model("embed"))
    with pytest.raises(StartupError, match="export again with --precision int8 --precision int8-openvino"):
        Chooser(Settings(models=tmp_path / "others", engine="cpu")).first()


@pytest.mark.parametrize("engine", ["ort-cpu", "openvino"])
def test_an_engine_without_its_library_is_refused_before_its_process_starts(
    models: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """The error says what to install."""
    assert Chooser(Settings(models=models, engine=engine)).first().engine == engine
    monkeypatch.setattr(kind, "find_spec", lambda _module: None)
    with pytest.raises(
        StartupError, match=rf"the engine {engine} cannot run here: .* is not installed; run `.*pip install"
    ):
        Chooser(Settings(models=models, engine=engine)).first()


@with_openvino
def test_a_model_by_its_id_is_exported_for_what_auto_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For both libraries where OpenVINO is installed, unless fp32 is asked for, which it has no form of."""

    def home(**settings: Any) -> Home:
        return home_of(Settings(model_id="demo", cache_dir=tmp_path, **settings))

    assert home() == home(engine="cpu") != home(engine="ort-cpu")
    assert home(precision="int8") == home(precision="int8", engine="cpu") != home(precision="int8", engine="ort-cpu")
    assert home(precision="fp32") == home(precision="fp32", engine="ort-cpu")
    without_openvino(monkeypatch)
    assert home() == home(engine="ort-cpu")


@without_gpu
def test_looking_for_cards_where_there_are_none() -> None:
    """The very process that a server asks, on this machine."""
    found = discovery.look()
    assert found.gpus == ()
    assert not found.broken
    assert "no NVIDIA driver found" in found.problem


def test_a_driver_that_does_not_answer_is_not_waited_for() -> None:
    """Whoever asks goes on, and says why there is no GPU."""
    found = discovery.look(limit_s=0.001)
    assert found.broken
    assert "the NVIDIA driver did not respond within 0.001 s" in found.problem
