"""Bundles and the repository: how they are written, found and named. Hostile ones are in tests/fault."""

from __future__ import annotations

import logging
import shutil
import stat
from typing import TYPE_CHECKING, Any, get_args

import msgspec
import onnx
import pytest

from bertserve.serving.engine.base import read_artifact, verified_bytes
from bertserve.serving.errors import BundleError, InvalidRequest, ModelNotFound, StartupError
from bertserve.serving.inference.served_models import Repository
from bertserve.serving.models.bundle import BundleWriter, Manifest, file_entry, open_bundle
from bertserve.serving.models.manifest import ENGINE_GRAPHS
from bertserve.serving.models.staging_dir import StagedVersion
from bertserve.serving.models.verified_dir import digest, versions
from bertserve.serving.rollout.engine_choice import Chooser
from bertserve.serving.settings import Settings
from bertserve.serving.tasks.parts import Part
from tests.support.models import NAME
from tests.support.poison import FP32, edit_manifest, sign, tiny_bundle, tiny_model
from tests.support.specs import model_spec

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def bundle(models: Path, tmp_path: Path) -> Path:
    return tiny_bundle(models, tmp_path / "models")


def write(bundle: Path, repository: Path, model: str = NAME) -> Path:
    """Publishes a copy of a bundle as the next version; returns its directory."""
    manifest = msgspec.json.decode((bundle / "manifest.json").read_bytes(), type=Manifest)
    with BundleWriter(repository, model) as writer:
        for entry in manifest.entries():
            (writer.path / entry.file).write_bytes((bundle / entry.file).read_bytes())
        manifest = msgspec.structs.replace(manifest, model=model, version=writer.version)
        return writer.publish(manifest).path


def test_open(bundle: Path) -> None:
    """An honest bundle opens, with the artifacts that it has."""
    opened = open_bundle(bundle)
    found = opened.artifact("fp32")
    assert found.file == FP32
    assert opened.artifact("int8") is None


def test_a_bundle_of_an_earlier_schema_is_served_with_a_warning(bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log names what its export did not prove; nothing is said of a bundle of today's schema."""
    settings = Settings(models=bundle.parents[1], engine="ort-cpu", precision="fp32")
    with caplog.at_level(logging.WARNING, logger="bertserve"):
        Chooser(settings).first()
    assert not caplog.records

    def to_2(manifest: dict[str, Any]) -> None:
        manifest |= {"schema_version": 2, "pooling": manifest["embedding"]["pooling"][0]}
        for field in ("truncation_side", *get_args(Part)):
            del manifest[field]

    edit_manifest(bundle, to_2)
    with caplog.at_level(logging.WARNING, logger="bertserve"):
        (model,) = Chooser(settings).first().repository.models
    assert model.tokenizer.truncation_side == "right"
    (record,) = caplog.records
    assert f"{NAME}: version 1 has a manifest of schema 2" in record.message
    assert "truncation_side, do_lower_case" in record.message
    assert "export it again" in record.message


def test_digests(bundle: Path) -> None:
    entry = file_entry(bundle / FP32)
    assert (entry.file, entry.sha256, entry.size_bytes) == (FP32, digest(bundle / FP32), (bundle / FP32).stat().st_size)


@pytest.mark.parametrize("domain", ["", "evil"])
def test_a_graph_that_engines_are_built_of_is_looked_into(bundle: Path, domain: str) -> None:
    """It is held to what the graphs are held to that an engine loads, though none loads it."""
    model = tiny_model(before=[onnx.helper.make_node("Gelu", ["input_ids"], ["y"], domain=domain)])
    file = ENGINE_GRAPHS["int8"]
    (bundle / file).write_bytes(model.SerializeToString())
    edit_manifest(bundle, lambda manifest: manifest["files"].append({**manifest["files"][0], "file": file}))
    sign(bundle)
    if not domain:
        assert open_bundle(bundle).engine_graphs
        return
    with pytest.raises(BundleError, match=r"engine\.int8\.onnx uses an unsupported operator domain"):
        open_bundle(bundle)


def test_an_artifact_that_changes_after_the_check(bundle: Path) -> None:
    """The very bytes that are loaded are verified, whatever happened to the file since."""
    checked = open_bundle(bundle).artifact("fp32")
    assert read_artifact(bundle / FP32, checked.sha256)
    (bundle / FP32).write_bytes(b"something else")
    with pytest.raises(BundleError, match="SHA-256"):
        read_artifact(bundle / FP32, checked.sha256)


def test_weights_that_change_while_they_are_loaded(tmp_path: Path) -> None:
    """A library maps them, so their file is verified before and must be the same one, unchanged, afterwards."""
    graph, beside = tmp_path / "model.onnx", tmp_path / "model.onnx.data"
    graph.write_bytes(b"graph")
    beside.write_bytes(b"weights")
    spec = model_spec(path=str(graph), sha256=digest(graph), data_sha256=digest(beside))
    with verified_bytes(spec) as data:
        assert data == b"graph"
    with pytest.raises(BundleError, match=r"model\.onnx\.data changed while loading"), verified_bytes(spec):
        beside.write_bytes(b"other weights")
    beside.write_bytes(b"weights")
    twin = shutil.copyfile(beside, tmp_path / "twin")
    with pytest.raises(BundleError, match="changed while loading"), verified_bytes(spec):
        twin.rename(beside)
    beside.write_bytes(b"others")
    with pytest.raises(BundleError, match=r"model\.onnx\.data does not match its SHA-256"), verified_bytes(spec):
        pytest.fail("it is not loaded")


def test_publish_numbers_versions(bundle: Path, tmp_path: Path) -> None:
    """Each export is the next version; earlier ones stay."""
    assert [write(bundle, tmp_path / "out").name for _ in range(3)] == ["1", "2", "3"]
    assert versions(tmp_path / "out" / NAME) == [1, 2, 3]


def test_of_two_at_once_one_is_written(tmp_path: Path) -> None:
    """What another export has published in the meantime stays, and the second one says why it is not written."""
    with StagedVersion(tmp_path) as first, StagedVersion(tmp_path) as second:
        for staging in (first, second):
            (staging.path / "file").write_text(staging.path.name, encoding="utf-8")
        written = second.path.name
        second.move()
        with pytest.raises(FileExistsError, match="another process has written this version"):
            first.move()
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    assert (tmp_path / "1" / "file").read_text(encoding="utf-8") == written


def test_publish_verifies(bundle: Path, tmp_path: Path) -> None:
    """What would be refused at start is refused when written, and leaves nothing behind."""
    manifest = msgspec.json.decode((bundle / "manifest.json").read_bytes(), type=Manifest)
    with pytest.raises(BundleError, match="missing"), BundleWriter(tmp_path / "out", NAME) as writer:
        writer.publish(manifest)
    assert not (tmp_path / "out" / NAME).exists()


def test_whoever_serves_can_read_it(tmp_path: Path) -> None:
    """A file that a library made for its owner alone is as open as the others: who serves is often another user."""
    with StagedVersion(tmp_path) as staging:
        (staging.path / "open").write_bytes(b"x")
        (staging.path / "closed").write_bytes(b"x")
        (staging.path / "closed").chmod(0o600)
        moved = staging.move()
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in moved.iterdir()}
    assert modes["closed"] == modes["open"]


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", ".hidden", "-dash", "a b", "a\n", "é", "a" * 129])
def test_model_names(tmp_path: Path, name: str) -> None:
    """A model's name is a plain file name."""
    with pytest.raises(BundleError, match="model name"):
        BundleWriter(tmp_path, name)


def test_versions_are_numbers(tmp_path: Path) -> None:
    """Only directories with plain numbers are versions, in numeric order."""
    for name in ("10", "9", "01", "1a", "latest", "-1", "¹", ".staging-3-1"):
        (tmp_path / name).mkdir()
    (tmp_path / "11").write_text("a file", encoding="utf-8")
    (tmp_path / "12").symlink_to(tmp_path / "9")
    assert versions(tmp_path) == [9, 10]


def test_repository_serves_the_newest_version(bundle: Path, tmp_path: Path) -> None:
    """Of several versions the newest is opened; a broken older one does not matter."""
    out = tmp_path / "out"
    first, second = write(bundle, out), write(bundle, out)
    (first / "extra").write_bytes(b"x")
    (model,) = Repository.open(out, "auto").models
    assert (model.bundle.path, model.version) == (second, "2")


def test_repository_of_several_models(bundle: Path, tmp_path: Path) -> None:
    """Several models are found by exact name and must then be named."""
    out = tmp_path / "out"
    for name in ("beta", "alpha"):
        write(bundle, out, name)
    repository = Repository.open(out, "auto")
    for path in (out / "alpha", out / "alpha" / "1"):
        with pytest.raises(StartupError, match=f"is one .*, not a repository; use --models {out}$"):
            Repository.open(path)
    assert [(model.name, model.index) for model in repository.models] == [("alpha", 0), ("beta", 1)]
    assert repository.find("beta").name == "beta"
    assert repository.find("beta", "1").version == "1"
    with pytest.raises(InvalidRequest, match="name one"):
        repository.find(None)
    for name, version in (("gamma", None), ("Beta", None), ("beta", "2"), ("", None)):
        with pytest.raises(ModelNotFound):
            repository.find(name, version)


def test_repository_of_one_model(bundle: Path) -> None:
    """The only model need not be named; an empty version means the one served."""
    repository = Repository.open(bundle.parents[1], "auto")
    assert repository.find(None) is repository.find(NAME, "") is repository.find(NAME, "1")


def test_one_bad_model_stops_the_start(bundle: Path, tmp_path: Path) -> None:
    """A repository with one good and one bad model is refused, not served in part."""
    out = tmp_path / "out"
    write(bundle, out, "good")
    (write(bundle, out, "bad") / "extra").write_bytes(b"x")
    with pytest.raises(StartupError, match="bad"):
        Repository.open(out, "auto")
