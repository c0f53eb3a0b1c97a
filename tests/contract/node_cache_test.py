"""A proof that a node makes for itself: `bertserve verify` keeps it, `bertserve serve` counts on it."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest

from bertserve.export.cli import verify
from bertserve.export.cli.export import main as export
from bertserve.serving.models.node_cache import DERIVED
from tests.support.checkpoints import write_checkpoint
from tests.support.clients import get
from tests.support.poison import edit_manifest
from tests.support.server import Server, refused_start

if TYPE_CHECKING:
    from pathlib import Path

PORTS = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a small model that came from a machine which could not run it."""
    folder, root = tmp_path_factory.mktemp("checkpoints"), tmp_path_factory.mktemp("models")
    write_checkpoint(folder / "small")
    assert export([str(folder / "small"), "--out", str(root), "--precision", "fp32"]) == 0
    unproven = {"parity": None, "invariance": None, "batch_invariant": False}
    edit_manifest(root / "small" / "1", lambda manifest: manifest["artifacts"][0].update(unproven))
    return root


@pytest.fixture(scope="module")
def cache(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The node's cache after `bertserve verify`."""
    root = tmp_path_factory.mktemp("cache")
    assert verify.main([str(models / "small"), "--cache-dir", str(root)]) == 0
    return root


def test_what_the_node_proved_is_ready(models: Path, cache: Path) -> None:
    """With the proof the model is served as any other: ready, not degraded, and without a setting that allows it."""
    with Server(models, "--cache-dir", str(cache)) as server:
        assert get(server.http, "/readyz").json() == {"state": "ready"}
        assert "unproven" not in server.log


def test_the_bundle_stays_as_it_was(models: Path, cache: Path) -> None:
    """The proof lies in the cache, under the digest of the bundle's manifest, and nowhere else."""
    manifest = json.loads((models / "small" / "1" / "manifest.json").read_text())
    assert manifest["artifacts"][0]["parity"] is None
    derived = json.loads((cache / "small" / "1" / "1" / DERIVED).read_text())
    assert [proof["file"] for proof in derived["proofs"]] == ["model.fp32.onnx"]
    assert derived["proofs"][0]["invariance"]["texts"] == derived["proofs"][0]["parity"]["texts"] == 256


def test_without_the_proof_the_refusal_says_how_to_make_it(models: Path) -> None:
    """One line names the command, the bundle and the setting."""
    done = refused_start("--models", str(models), *PORTS)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert f"`bertserve verify {models}/small/1 --cache-dir DIR` and serve it with the same --cache-dir" in line


def test_a_proof_with_another_library_is_refused(models: Path, cache: Path, tmp_path: Path) -> None:
    """After an upgrade the old proof counts for nothing: one line of the log says why, then the start is refused."""
    place = tmp_path / "small" / "1" / "1"
    place.mkdir(parents=True)
    derived = json.loads((cache / "small" / "1" / "1" / DERIVED).read_text())
    derived["proofs"][0]["libraries"] = {"onnxruntime": "0.1"}
    (place / DERIVED).write_text(json.dumps(derived))
    done = refused_start("--models", str(models), *PORTS, "--cache-dir", str(tmp_path))
    assert done.returncode == 1
    why, refusal = done.stderr.splitlines()
    assert "ignoring the cached proof of model.fp32.onnx: it was made with onnxruntime 0.1" in why
    assert "model.fp32.onnx is not proven (not compared with PyTorch)" in refusal


def test_an_artifact_that_breaks_its_limits_is_not_kept(models: Path, tmp_path: Path) -> None:
    """`verify` fails, and what it kept proves nothing."""
    edited = tmp_path / "models" / "small" / "1"
    shutil.copytree(models / "small" / "1", edited)
    edit_manifest(edited, lambda manifest: manifest["artifacts"][0].update(limits={"max_abs_difference": 1e-12}))
    assert verify.main([str(edited), "--cache-dir", str(tmp_path / "cache")]) == 1
    derived = json.loads((tmp_path / "cache" / "small" / "1" / "1" / DERIVED).read_text())
    assert derived["proofs"] == []
