"""The node's cache: what is kept of a bundle, and when it no longer counts. Hostile ones are in tests/fault."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest

from bertserve.serving import host
from bertserve.serving.errors import StartupError
from bertserve.serving.inference.served_models import Repository
from bertserve.serving.models import node_cache, verified_dir
from bertserve.serving.models.bundle import Bundle, open_bundle
from bertserve.serving.models.node_cache import CacheError, CacheWriter, Proof, open_entry, with_proofs
from tests.support.node_caches import FP32, TIMINGS, engine, fill, proof
from tests.support.poison import ENGINE
from tests.support.tasks import tiny_model, write_bundle

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle whose only artifact nobody has compared with PyTorch."""
    return open_bundle(write_bundle(tmp_path_factory.mktemp("models"), tiny_model("tag"), proven=False))


def keep(root: Path, bundle: Bundle, **proofs: Proof | None) -> None:
    """Puts proofs of the fp32 artifact into the cache."""
    with CacheWriter(root, bundle.manifest.model, bundle.manifest.version) as writer:
        writer.publish(bundle, proofs={FP32: proofs["fp32"]})


def is_proven(root: Path, bundle: Bundle) -> bool:
    """Whether the bundle's artifact is proven with what the cache holds."""
    (artifact,) = with_proofs(root, bundle).manifest.artifacts
    assert artifact.batch_invariant is artifact.proven
    return artifact.proven


def test_a_proof_made_here_counts(bundle: Bundle, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The artifact has the figures of this node, may be batched, and nothing is logged."""
    keep(tmp_path, bundle, fp32=proof())
    (artifact,) = with_proofs(tmp_path, bundle).manifest.artifacts
    assert (artifact.parity, artifact.invariance) == (proof().parity, proof().invariance)
    assert artifact.batch_invariant
    assert caplog.text == ""


def test_an_empty_cache_proves_nothing(bundle: Bundle, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A directory that is empty, or is not there, is no fault."""
    assert not is_proven(tmp_path, bundle)
    assert not is_proven(tmp_path / "none", bundle)
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("changes", "made_of", "words"),
    [
        ({"libraries": {"onnxruntime": "0.1"}}, {}, "it was made with onnxruntime 0.1, but onnxruntime "),
        ({"libraries": {"openvino": "2026.4.1"}}, {}, "it was made with openvino 2026.4.1, but onnxruntime "),
        ({"device": "abacus"}, {}, f"it was made on abacus, but this is {host.cpu()}"),
        ({}, {"sha256": "0" * 64}, "it was made for another bundle"),
    ],
    ids=["another-version", "another-library", "another-device", "another-bundle"],
)
def test_a_stale_proof_counts_for_nothing(
    bundle: Bundle,
    tmp_path: Path,
    changes: dict[str, object],
    made_of: dict[str, str],
    words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Not proven, and one line says why."""
    keep(tmp_path, dataclasses.replace(bundle, **made_of), fp32=msgspec.structs.replace(proof(), **changes))
    assert not is_proven(tmp_path, bundle)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert words in record.getMessage()


def test_what_turned_out_wrong_is_taken_out(bundle: Bundle, tmp_path: Path) -> None:
    """An artifact that does not answer as PyTorch does any more loses its proof."""
    keep(tmp_path, bundle, fp32=proof())
    keep(tmp_path, bundle, fp32=None)
    assert not is_proven(tmp_path, bundle)


def test_what_is_not_made_anew_is_taken_over(bundle: Bundle, tmp_path: Path) -> None:
    """A proof leaves engines and other files as they were; a new engine takes its old proof away."""
    fill(tmp_path, bundle)
    keep(tmp_path, bundle, fp32=None)
    entry = open_entry(tmp_path, bundle)
    assert sorted(path.name for path in entry.path.iterdir()) == ["derived.json", ENGINE, TIMINGS]
    keep(tmp_path, bundle, fp32=msgspec.structs.replace(proof(), file=ENGINE))
    with CacheWriter(tmp_path, bundle.manifest.model, 1) as writer:
        made = engine(writer.path / ENGINE, bundle.manifest.max_length)
        assert writer.publish(bundle, engines=[made]).derived.proofs == ()


def test_nothing_of_another_bundle_is_taken_over(bundle: Bundle, tmp_path: Path) -> None:
    """What was made of a bundle that is no longer there goes with it."""
    fill(tmp_path, dataclasses.replace(bundle, sha256="0" * 64))
    keep(tmp_path, bundle, fp32=proof())
    entry = open_entry(tmp_path, bundle)
    assert entry.derived.engines == entry.derived.files == ()


KEEP = """
import pathlib, sys
from bertserve.serving.models.bundle import open_bundle
from bertserve.serving.models.node_cache import CacheWriter
with CacheWriter(pathlib.Path(sys.argv[1]), "tag", 1) as writer:
    (writer.path / sys.argv[3]).write_bytes(b"x")
    writer.publish(open_bundle(pathlib.Path(sys.argv[2])), files=[sys.argv[3]])
"""


def test_what_another_process_publishes_meanwhile_is_taken_over(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server keeps its costs while an engine is put beside them: the newest entry has both."""

    def late(*arguments: object) -> None:
        monkeypatch.undo()
        words = [sys.executable, "-c", KEEP, str(tmp_path), str(bundle.path), "costs"]
        subprocess.run(words, cwd=ROOT, check=True)
        verified_dir.write(*arguments)

    fill(tmp_path, bundle)
    monkeypatch.setattr("bertserve.serving.models.verified_dir.write", late)
    with CacheWriter(tmp_path, "tag", 1) as writer:
        (writer.path / "new").write_bytes(b"x")
        published = writer.publish(bundle, files=["new"])
    entry = open_entry(tmp_path, bundle)
    assert entry == published
    assert {path.name for path in entry.path.iterdir()} == {"derived.json", ENGINE, TIMINGS, "costs", "new"}


def test_the_newest_three_stay(bundle: Bundle, tmp_path: Path) -> None:
    """Older ones do not pile up; what an engine was started from is there when costs and kernels have been kept."""
    for _ in range(5):
        keep(tmp_path, bundle, fp32=proof())
    assert sorted(path.name for path in (tmp_path / "tag" / "1").iterdir()) == ["3", "4", "5"]


def test_an_error_leaves_nothing_behind(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="it has a proof of an unknown artifact"):
        keep(tmp_path / "cache", bundle, fp32=proof("model.none.onnx"))
    assert list(tmp_path.iterdir()) == []


def test_the_repository_serves_what_the_node_proved(bundle: Bundle, tmp_path: Path) -> None:
    """Without the proof the start is refused with how to make it; with it, the model is served as proven."""
    models = bundle.path.parents[1]
    with pytest.raises(StartupError, match=rf"`bertserve verify {bundle.path} --cache-dir DIR` and serve it with"):
        Repository.open(models, cache=tmp_path)
    keep(tmp_path, bundle, fp32=proof())
    (model,) = Repository.open(models, cache=tmp_path).models
    assert model.artifact.proven
    assert model.spec().batch_invariant


CPUINFO = "processor\t: 0\nmodel name\t: A processor of 2 GHz\nflags\t\t: fpu avx2 avx512f popcnt\n"


def test_a_device_is_told_by_what_decides_its_arithmetic(tmp_path: Path) -> None:
    """Name and instructions of the processor; where the system tells nothing, its architecture."""
    (tmp_path / "cpuinfo").write_text(CPUINFO, encoding="ascii")
    assert host.cpu(tmp_path / "cpuinfo") == "A processor of 2 GHz (avx2, avx512f)"
    assert host.cpu(tmp_path / "none") == os.uname().machine


def test_the_libraries_of_a_target() -> None:
    """The one that runs it, with its version; none for what nothing here can run."""
    assert list(node_cache.libraries_of("cpu")) == ["onnxruntime"]
    assert list(node_cache.libraries_of("openvino")) == ["openvino"]
    assert list(node_cache.libraries_of("sm75")) == (["tensorrt-rtx-cu13"] if find_spec("tensorrt_rtx") else [])
