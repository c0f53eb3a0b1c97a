"""Models whose weights one ONNX file cannot hold: with the limit lowered, and at their full size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import onnxruntime as ort
import pytest
import torch
import transformers

from bertserve.export.cli import inspect, verify
from bertserve.export.cli.export import main as export
from bertserve.export.graph import editor
from bertserve.serving.models.bundle import Bundle, open_bundle
from bertserve.serving.models.manifest import ENGINE_GRAPHS
from tests.support.checkpoints import write_large_checkpoint
from tests.support.clients import post_json
from tests.support.expected import cosines
from tests.support.exports import ORT, Export
from tests.support.models import ROOT
from tests.support.server import Server, environment

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray


NAMES = ("model.fp32.onnx", "model.int8.onnx", "model.int8.openvino.onnx", "model.fp16.onnx")
IDS = [[2, 95, 96, 97, 98, 3], [2, 70, 80, 90, 3], [2, 3]]
WORDS = [*(word for form in ("fp32", "int8", "int8-openvino", "fp16") for word in ("--precision", form))]


@pytest.fixture(scope="module")
def models(small_export: Export, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a small model in every form."""
    folder: Path = tmp_path_factory.mktemp("large")
    words = ["--out", str(folder / "models"), "--tensorrt", "graph", *WORDS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(editor, "LARGEST_FILE", 0)
        assert export([str(small_export.checkpoint), *words]) == 0
    return folder / "models"


@pytest.fixture(scope="module")
def bundle(models: Path) -> Bundle:
    return open_bundle(models / "small" / "1")


@pytest.fixture(scope="module")
def expected(small_export: Export) -> NDArray[np.float32]:
    return vectors(transformers.BertModel.from_pretrained(small_export.checkpoint), IDS)


def vectors(model: torch.nn.Module, texts: list[list[int]]) -> NDArray[np.float32]:
    """Transformers' vectors of texts of token ids, each alone: the means over the tokens, of length 1."""
    with torch.inference_mode():
        means = [model.eval()(torch.tensor([ids])).last_hidden_state[0].mean(dim=0).numpy() for ids in texts]
    return np.stack([mean / np.linalg.norm(mean) for mean in means])


def pooled(graph: Path) -> NDArray[np.float32]:
    """A graph's answer to a text, opened by its path."""
    ids = np.array(IDS[:1], np.int32)
    tensors = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    found: NDArray[np.float32] = ort.InferenceSession(graph, providers=["CPUExecutionProvider"]).run(None, tensors)[0]
    return found


def served(server: Server, texts: list[list[int]]) -> NDArray[np.float32]:
    """The server's vectors of texts of token ids, of length 1."""
    body = json.dumps({"inputs": texts, "normalize": True}).encode()
    return np.array(post_json(server.http, "/embed", body).json(), np.float32)


def test_each_graph_has_one_file_of_weights_beside_it(bundle: Bundle) -> None:
    """Listed with its artifact, which counts both; that of the engine graph is listed among the other files."""
    manifest = bundle.manifest
    assert [artifact.file for artifact in manifest.artifacts] == list(NAMES)
    for artifact in manifest.artifacts:
        assert artifact.data.file == f"{artifact.file}.data"
        assert artifact.total_bytes == artifact.size_bytes + artifact.data.size_bytes
    assert manifest.data_of(ENGINE_GRAPHS["fp16"]) is not None


def test_answers_are_those_of_one_file(bundle: Bundle, small_export: Export) -> None:
    """Where the numbers lie changes none of them."""
    for name in NAMES[:2]:
        np.testing.assert_array_equal(pooled(bundle.path / name), pooled(small_export.bundle.path / name))


@pytest.mark.slow
def test_it_is_proven_again(bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    """`verify` loads graph and weights of every artifact, of fp16 its twin."""
    assert verify.main([str(bundle.path)]) == 0
    out = capsys.readouterr().out
    assert all(f"{name} is within its limits\n" in out for name in NAMES)


def test_it_is_shown_with_its_weights(bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    """`inspect` and `report.html` list the files, and show of an artifact what an engine loads."""
    assert inspect.main([str(bundle.path)]) == 0
    out, page = capsys.readouterr().out, (bundle.path / "report.html").read_text(encoding="utf-8")
    for artifact in bundle.manifest.artifacts:
        assert f"{artifact.file}.data" in out
        for shown in (out, page):
            assert artifact.data.sha256 in shown
            assert (
                f"{artifact.total_bytes / 1024:.1f} KiB" in shown or f"{artifact.total_bytes / 2**20:.1f} MiB" in shown
            )


@pytest.mark.parametrize(
    ("options", "off"),
    # 8 bits leave the direction: a cosine of 0.98 is a distance of 0.2.
    [(("--precision", "fp32"), 1e-5), pytest.param(("--engine", "openvino"), 0.2, marks=pytest.mark.slow)],
)
def test_it_is_served(models: Path, expected: NDArray[np.float32], options: tuple[str, ...], off: float) -> None:
    """Vectors are those of Transformers; OpenVINO finds the weights by the graph's path."""
    with Server(models, *options) as server:
        assert np.linalg.norm(served(server, IDS) - expected, axis=1).max() < off


def test_the_same_is_not_exported_twice(models: Path, small_export: Export, capsys: pytest.CaptureFixture[str]) -> None:
    """`--if-changed` finds a whole bundle."""
    words = [str(small_export.checkpoint), "--out", str(models), "--tensorrt", "graph", *WORDS, "--if-changed"]
    assert export(words) == 0
    assert "already exported" in capsys.readouterr().out
    assert [version.name for version in (models / "small").iterdir()] == ["1"]


@pytest.mark.usefixtures("few_texts_of_pytorch")
def test_an_artifact_that_is_left_out_leaves_no_weights(
    small_export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bundle holds what its manifest lists, and nothing else."""
    monkeypatch.setattr(editor, "LARGEST_FILE", 0)
    words = ["--out", str(tmp_path), "--precision", "fp32", "--precision", "int8", "--limit", "int8.cosine_min=1"]
    assert export([str(small_export.checkpoint), *words]) == 3
    assert [artifact.file for artifact in open_bundle(tmp_path / "small" / "1").manifest.artifacts] == [NAMES[0]]


@pytest.mark.slow
def test_xlm_roberta_large(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """560 million random weights: exported within 12 GB of memory, and served as Transformers answers.

    The vectors of ids from all over the vocabulary are compared: a gigabyte of it is mapped.
    """
    checkpoint = write_large_checkpoint(tmp_path / "large")
    command = [sys.executable, "-m", "bertserve", "export", str(checkpoint), "--out", str(tmp_path / "models"), *ORT]
    with subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        out = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    record_property(
        "export", f"peak {usage.ru_maxrss / 1e6:.2f} GB, CPU {usage.ru_utime + usage.ru_stime:.0f} s\n{out}"
    )
    assert process.returncode == 0, out
    assert usage.ru_maxrss < 12e6  # kilobytes

    fp32, int8 = open_bundle(tmp_path / "models" / "large" / "1").manifest.artifacts
    assert fp32.data.size_bytes > 2**31
    assert int8.data is not None
    assert fp32.parity.max_abs_difference < 1e-4
    assert fp32.batch_invariant

    texts = [[0, *range(at, 250_000, 16_000), 2] for at in (5, 5_000, 10_000)]
    expected = vectors(transformers.XLMRobertaModel.from_pretrained(checkpoint, add_pooling_layer=False), texts)
    for precision, least in (("fp32", 1 - 1e-6), ("int8", 0.98)):
        with Server(tmp_path / "models", "--precision", precision, start_limit_s=600) as server:
            found = served(server, texts)
            record_property(precision, f"least cosine {cosines(found, expected).min():.8f}")
            assert cosines(found, expected).min() > least
            if precision == "fp32":
                np.testing.assert_allclose(found, expected, atol=1e-5)
