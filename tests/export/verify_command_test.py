from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from safetensors import safe_open
from safetensors.numpy import save_file

from bertserve.export.cli import inspect, verify
from bertserve.export.cli.export import main as export
from bertserve.serving.models.manifest import MANIFEST
from tests.support.checkpoints import edit_json, write_task_checkpoint
from tests.support.clients import get
from tests.support.poison import add_engine, edit_manifest, keep_only_fp32, sign
from tests.support.server import Server, environment
from tests.support.simulated.simulated_trt import plan
from tests.support.simulated_gpus import environment as gpu_environment

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.exports import Export

ROOT = Path(__file__).parents[2]
FP32 = "model.fp32.onnx"


@pytest.fixture(scope="module")
def exported(small_export: Export, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with two small models: one that embeds, and one that classifies with labels of an enemy's."""
    folder, models = tmp_path_factory.mktemp("checkpoints"), tmp_path_factory.mktemp("verified") / "models"
    shutil.copytree(small_export.models, models)
    write_task_checkpoint(folder / "moods", "bert", "classify")
    edit_json(folder / "moods" / "config.json", id2label={"0": "<script>alert(1)</script>", "1": "\x1b[2Jup", "2": "b"})
    reference = folder / "moods.csv"
    reference.write_text("the server,b\na text of it,2\nnot that,1\n")
    words = ["--precision", "fp32", "--precision", "fp16", "--reference", str(reference)]
    assert export([str(folder / "moods"), "--out", str(models), *words]) == 0
    shutil.copy(reference, models / "moods.csv")
    return models


@pytest.fixture
def both(exported: Path, tmp_path: Path) -> Path:
    """A copy of the embedding bundle, for a test to spoil."""
    return shutil.copytree(exported / "small" / "1", tmp_path / "models" / "small" / "1")


@pytest.fixture
def small(both: Path) -> Path:
    """The same with the fp32 artifact alone."""
    (both / "model.int8.onnx").unlink()
    edit_manifest(both, keep_only_fp32)
    return both


def change_weights(bundle: Path) -> None:
    """Moves one matrix of the fp32 artifact a little, and signs the bundle again."""
    model = onnx.load(bundle / FP32)
    weight = next(tensor for tensor in model.graph.initializer if len(tensor.dims) == 2)
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * np.float32(1.05), weight.name))
    onnx.save(model, bundle / FP32)
    sign(bundle)


def test_an_honest_bundle_is_proven_again(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every artifact is run and is within its limits; the figures are those of the export."""
    assert verify.main([str(exported / "small" / "1")]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "model.fp32.onnx is within its limits\n" in captured.out
    assert "model.int8.onnx is within its limits\n" in captured.out
    assert re.search(r"comparing model\.int8\.onnx with PyTorch +\d+\.\d s", captured.out)
    worst = json.loads((exported / "small" / "1" / MANIFEST).read_text())["artifacts"][0]["parity"]["cosine_min"]
    assert f"{worst:.5f}" in captured.out


def test_the_newest_version_is_meant_by_a_models_directory(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The task's own metric is repeated beside PyTorch's score of the export, and fp16 is run as well."""
    assert verify.main([str(exported / "moods"), "--reference", str(exported / "moods.csv"), "--threads", "1"]) == 0
    out = capsys.readouterr().out
    assert "model.fp16.onnx is within its limits\n" in out
    assert re.search(r"model\.fp32\.onnx +accuracy +3 of moods\.csv +\d+\.\d\d +\d+\.\d\d +[+]0\.00", out)
    assert "\x1b" not in out


def test_no_pytorch_is_needed(exported: Path) -> None:
    """The verb runs where neither PyTorch nor Transformers nor ONNX can be imported."""
    script = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'onnx', 'huggingface_hub', 'sympy'): sys.modules[name] = None\n"
        "import bertserve\n"
        f"sys.exit(bertserve.main(['verify', {str(exported / 'moods' / '1')!r}]))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "model.fp32.onnx is within its limits" in done.stdout
    assert "model.fp16.onnx was not run: it is for a GPU; verifying it on a CPU needs the module onnx" in done.stdout


def flip(bundle: Path) -> None:
    data = bytearray((bundle / FP32).read_bytes())
    data[len(data) // 2] ^= 1
    (bundle / FP32).write_bytes(data)


def edit_reference(change: Callable[[dict[str, Any], dict[str, str]], object]) -> Callable[[Path], None]:
    """Changes the tensors and the metadata of PyTorch's answers, and signs the bundle again."""

    def spoil(bundle: Path) -> None:
        path = bundle / "reference.safetensors"
        with safe_open(path, framework="numpy") as handle:
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118  not a mapping
            metadata = handle.metadata()
        change(tensors, metadata)
        save_file(tensors, path, metadata)
        sign(bundle)

    return spoil


def other_text(_tensors: dict[str, Any], metadata: dict[str, str]) -> None:
    metadata["texts"] = json.dumps(["other", *json.loads(metadata["texts"])[1:]])


def few_texts(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
    length = int(tensors["lengths"][0])
    metadata["texts"] = json.dumps(json.loads(metadata["texts"])[:1])
    kept = {"ids": length, "types": length, "lengths": 1, "output.pooled": 32}
    tensors.update({name: tensors[name][:size] for name, size in kept.items()})


def forget_reference(bundle: Path) -> None:
    (bundle / "reference.safetensors").unlink()
    edit_manifest(bundle, lambda m: m.update(files=[f for f in m["files"] if f["file"] != "reference.safetensors"]))


def edit_fp32(**changes: object) -> Callable[[Path], None]:
    return lambda bundle: edit_manifest(bundle, lambda manifest: manifest["artifacts"][0].update(changes))


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (flip, r"model\.fp32\.onnx does not match its SHA-256 in the manifest"),
        (lambda bundle: (bundle / "extra").touch(), "'extra' is not listed in the manifest"),
        (change_weights, r"model\.fp32\.onnx failed and must not be served"),
        (edit_reference(lambda tensors, _: tensors["output.pooled"].__imul__(2)), "fp32.onnx failed"),
        (edit_reference(lambda tensors, _: tensors.pop("output.pooled")), "not the reference of this model"),
        (edit_reference(other_text), r"tokenizer\.json gives different token IDs from those of the export"),
        (edit_reference(few_texts), "has 1 texts; minimum: 256"),
        (forget_reference, "has no PyTorch answers to compare with; export it again"),
        (edit_fp32(limits={"beauty": 1}), "sets an unknown limit for model.fp32.onnx: 'beauty'"),
        (edit_fp32(limits={"max_abs_difference": 1e-12}), r"model\.fp32\.onnx failed and must not be served"),
    ],
)
def test_a_spoiled_bundle_fails(
    small: Path, spoil: Callable[[Path], object], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever was changed, signed again or not, ends in exit code 1 and one line."""
    spoil(small)
    assert verify.main([str(small)]) == 1
    assert re.fullmatch(f"bertserve verify: .*{sentence}.*\n", capsys.readouterr().err)


def test_changed_weights_are_told_by_their_figures(both: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The artifact that breaks its limit is named with figure and limit; the others are judged as well."""
    change_weights(both)
    assert verify.main([str(both)]) == 1
    out = capsys.readouterr().out
    assert re.search(r"model\.fp32\.onnx does not match PyTorch: largest difference .*allowed 0\.0001", out)
    assert "model.int8.onnx is within its limits" in out


def test_what_is_waived_is_let_pass_and_told(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A limit that the manifest says was broken may be broken here."""
    change_weights(small)
    edit_fp32(waived=["max_abs_difference"])(small)
    assert verify.main([str(small)]) == 0
    assert "except those waived at export: max_abs_difference" in capsys.readouterr().out


def test_a_denied_lack_of_invariance_fails(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An artifact that is called batch-invariant and is not would answer by its neighbours."""
    edit_fp32(limits={"invariance_difference": 1e-12})(small)
    assert verify.main([str(small)]) == 1
    assert "its answers change with padding or batching" in capsys.readouterr().out


def test_an_unproven_artifact_is_proven_here(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What nobody had run before the bundle came to this machine is run, and told apart."""
    edit_fp32(parity=None, invariance=None, batch_invariant=False)(small)
    assert verify.main([str(small)]) == 0
    assert "model.fp32.onnx was unproven; now proven on this machine" in capsys.readouterr().out


def test_what_cannot_be_run_is_said(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An engine for a GPU is passed over with a sentence; a bundle of nothing else is not called right."""
    add_engine(small)
    edit_manifest(small, lambda manifest: manifest.update(artifacts=manifest["artifacts"][-1:]))
    for graph in small.glob("*.onnx"):
        graph.unlink()
    assert verify.main([str(small)]) == 1
    captured = capsys.readouterr()
    assert "model.sm75.fp16.engine was not run: it is a TensorRT engine for compute capability 7.5" in captured.out
    assert "this machine can run none of its artifacts, so nothing was verified" in captured.err


@pytest.mark.parametrize("verb", [verify, inspect])
def test_a_missing_bundle_is_one_line(verb: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both verbs say what is missing, with exit code 1; without an argument they explain themselves with 2."""
    assert verb.main([str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err.endswith("none: no such directory\n")
    assert verb.main([]) == 2
    assert re.fullmatch(r"bertserve \w+: .* required: BUNDLE; .*\n", capsys.readouterr().err)


def test_a_bundle_is_printed(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`inspect` shows model, source, figures, limits and files; nothing in it steers the terminal."""
    assert inspect.main([str(exported / "moods")]) == 0
    out = capsys.readouterr().out
    manifest = json.loads((exported / "moods" / "1" / MANIFEST).read_text())
    assert manifest["source"]["sha256"] in out
    for entry in manifest["files"] + manifest["artifacts"]:
        assert entry["file"] in out
        assert entry["sha256"] in out
    for word in ("moods, version 1", "classify, 3 labels", "agreement 0.999", "3 of moods.csv", r"\x1b[2Jup"):
        assert word in out
    assert "\x1b" not in out


def test_the_manifest_is_printed_for_programs(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`inspect --json` prints the manifest as it is, and nothing else."""
    assert inspect.main([str(exported / "small" / "1"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((exported / "small" / "1" / MANIFEST).read_text())


def test_a_spoiled_bundle_is_not_printed(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a manifest says of files that it does not match is not worth printing."""
    flip(small)
    assert inspect.main([str(small)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("bertserve inspect: bundle ")


def test_the_bundle_carries_its_report(exported: Path) -> None:
    """The page of a real export names its artifacts and figures, and an enemy's label stays text."""
    page = (exported / "moods" / "1" / "report.html").read_text()
    manifest = json.loads((exported / "moods" / "1" / MANIFEST).read_text())
    for artifact in manifest["artifacts"]:
        assert artifact["sha256"] in page
        assert f"{artifact['parity']['max_abs_difference']:.2e}" in page
        assert f"{artifact['parity']['agreement']:.6f}" in page
        assert f"{artifact['accuracy'][0]['artifact']:.2f}" in page
    assert page.count("<svg") == 2 * len(manifest["artifacts"])
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_an_engine_is_proven_on_its_gpu_and_served_from_there(small: Path, tmp_path: Path) -> None:
    """On a simulated T4: `verify` runs the engine, keeps the proof in the node's cache, and `serve` believes it."""
    limit = json.loads((small / MANIFEST).read_text())["max_length"]
    add_engine(small, plan((small / FP32).read_bytes(), "rtx", [limit]))
    env = environment(gpu_environment())
    command = [sys.executable, "-m", "bertserve", "verify", str(small), "--cache-dir", str(tmp_path / "cache")]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "model.sm75.fp16.engine was unproven; now proven on this machine" in done.stdout
    repository = small.parents[1]
    with Server(repository, "--cache-dir", str(tmp_path / "cache"), env=gpu_environment()) as server:
        status = get(server.http, "/status").json()
        (model,) = status["models"]
        assert (status["state"], status["choice"]["engine"]) == ("ready", "tensorrt")
        assert (model["target"], model["batch_invariant"]) == ("sm75", True)
        assert {cell["texts"] for cell in model["costs"]["table"]} > {1, 2}
