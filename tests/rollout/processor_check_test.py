"""INT8 on a processor on which nobody has compared it with PyTorch: repeated on a few texts before it is served."""

from __future__ import annotations

import logging
import shutil
from typing import TYPE_CHECKING, Any

import onnx
import pytest
from onnx import numpy_helper

from bertserve.serving import host
from bertserve.serving.engine.gpu.discovery import Machine
from bertserve.serving.errors import StartupError
from bertserve.serving.models.bundle import open_bundle
from bertserve.serving.models.node_cache import CacheWriter, Proof
from bertserve.serving.rollout import processor_check
from bertserve.serving.rollout.engine_choice import Chooser
from bertserve.serving.settings import Settings
from tests.support.models import NAME, copy_bundle
from tests.support.poison import edit_manifest, sign

if TYPE_CHECKING:
    from pathlib import Path

INT8 = "model.int8.onnx"
ELSEWHERE = ("x86_64", "sse9")


def prove_elsewhere(bundle: Path, **changes: Any) -> None:
    """Has the INT8 artifact proven on another processor, and of what the manifest says of it something else."""

    def change(manifest: dict[str, Any]) -> None:
        artifact = next(artifact for artifact in manifest["artifacts"] if artifact["file"] == INT8)
        artifact |= {"proven_on": ELSEWHERE, **changes}

    edit_manifest(bundle, change)


def spoil(bundle: Path) -> None:
    """Has INT8 answer as if half of a matrix were lost, with true digests."""
    model = onnx.load(bundle / INT8)
    scale = next(tensor for tensor in model.graph.initializer if tensor.name.endswith(".scale") and len(tensor.dims))
    values = numpy_helper.to_array(scale).copy()
    values[: len(values) // 2] = 0
    scale.CopyFrom(numpy_helper.from_array(values, scale.name))
    onnx.save(model, bundle / INT8)
    sign(bundle)


@pytest.fixture
def bundle(models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Path:
    """The demo model's, for a test to change; the log is read too."""
    caplog.set_level(logging.INFO, "bertserve")
    return copy_bundle(models, tmp_path / "models")


def chosen(bundle: Path, **options: Any) -> str:
    settings = Settings(models=bundle.parents[1], engine="ort-cpu", threads=1, **options)
    (model,) = Chooser(settings).first().repository.models
    return model.artifact.file


def test_where_it_was_proven_nothing_is_repeated(bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The export says on which instructions it proved INT8: this machine's."""
    artifact = open_bundle(bundle).artifact("int8")
    assert artifact is not None
    assert artifact.proven_on == host.integer_kernels()
    assert artifact.sample is not None
    assert artifact.sample.texts == 16
    assert chosen(bundle) == INT8
    assert "proven on" not in caplog.text


def test_on_another_processor_a_few_texts_are_compared(bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The same integers give the same figure, which the log says beside the one of the export."""
    prove_elsewhere(bundle)
    assert chosen(bundle) == INT8
    (line,) = (record.getMessage() for record in caplog.records if "proven on" in record.getMessage())
    assert "model.int8.onnx was proven on x86_64, sse9; this processor has " in line
    here, there = line.partition("mean cosine to PyTorch ")[2].split(", ")
    assert there == f"{here} on the machine of the proof"


@pytest.mark.slow
def test_a_bundle_of_an_earlier_version_is_compared_too(bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its manifest names no processor and has no figures of the few texts."""
    prove_elsewhere(bundle, proven_on=[], sample=None)
    assert chosen(bundle) == INT8
    assert "was proven on an unknown processor" in caplog.text
    assert "mean cosine to PyTorch 0.99" in caplog.text


@pytest.mark.slow
def test_the_node_s_cache_keeps_what_was_found(
    bundle: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start compares nothing, unless the processor is another one by then."""
    prove_elsewhere(bundle)
    assert chosen(bundle, cache_dir=tmp_path / "cache") == INT8
    caplog.clear()
    assert chosen(bundle, cache_dir=tmp_path / "cache") == INT8
    assert caplog.text == ""
    monkeypatch.setattr(host, "cpu", lambda: "another processor")
    assert chosen(bundle, cache_dir=tmp_path / "cache") == INT8
    assert "Compared a few texts" in caplog.text


def test_what_the_node_has_proven_is_not_repeated(
    bundle: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`bertserve verify --cache-dir` compares all of the texts."""
    prove_elsewhere(bundle)
    opened = open_bundle(bundle)
    artifact = opened.artifact("int8")
    assert artifact is not None
    with CacheWriter(tmp_path / "cache", NAME, 1) as writer:
        writer.publish(opened, proofs={INT8: Proof.of(artifact)})
    assert chosen(bundle, cache_dir=tmp_path / "cache") == INT8
    assert caplog.text == ""


def test_an_artifact_that_answers_otherwise_is_left_out(
    bundle: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """fp32 is taken in its place, at this start and at the next; where INT8 is asked for, the reason is given."""
    spoil(bundle)
    prove_elsewhere(bundle)
    for _ in range(2):
        assert chosen(bundle, cache_dir=tmp_path / "cache") == "model.fp32.onnx"
    assert caplog.text.count("Not serving it") == 1
    assert "does not match PyTorch: mean cosine to PyTorch" in caplog.text
    with pytest.raises(StartupError, match=r"on this processor model\.int8\.onnx does not match PyTorch"):
        chosen(bundle, cache_dir=tmp_path / "cache", precision="int8")


def test_where_nothing_can_be_compared_it_is_served(bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A bundle may hold no answers of PyTorch's; the log says what is not known."""
    prove_elsewhere(bundle)
    (bundle / "reference.safetensors").unlink()
    edit_manifest(bundle, lambda m: m.update(files=[f for f in m["files"] if f["file"] != "reference.safetensors"]))
    assert chosen(bundle) == INT8
    assert "Serving it unchecked, because the comparison failed: " in caplog.text
    assert "has no PyTorch answers" in caplog.text


def test_a_comparison_without_an_end_holds_no_start(
    bundle: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    prove_elsewhere(bundle)
    monkeypatch.setattr(processor_check, "_LIMIT_S", 0.05)
    assert chosen(bundle) == INT8
    assert "it took more than 0.05 s" in caplog.text


def test_without_vnni_auto_leaves_openvino_out(
    bundle: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would multiply INT8 in fp32 there: ONNX Runtime alone is chosen, and log and choice say why."""
    pytest.importorskip("openvino")

    def add(manifest: dict[str, Any]) -> None:
        artifact = next(artifact for artifact in manifest["artifacts"] if artifact["file"] == INT8)
        manifest["artifacts"].append(artifact | {"file": "model.int8.openvino.onnx", "target": "openvino"})

    shutil.copyfile(bundle / INT8, bundle / "model.int8.openvino.onnx")
    edit_manifest(bundle, add)
    settings = Settings(models=bundle.parents[1], threads=1)
    for saturates, engine in ((False, "cpu"), (True, "ort-cpu")):
        monkeypatch.setattr(host, "saturates", lambda saturates=saturates: saturates)
        caplog.clear()
        choice = Chooser(settings, Machine).first()
        choice.log()
        assert choice.engine == engine
        assert ("this processor has no VNNI" in caplog.text) is saturates
    assert "this processor has no VNNI" in choice.summary().rejected[-1].reason
    assert not choice.degraded
