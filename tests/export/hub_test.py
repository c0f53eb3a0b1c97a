"""Exports in processes of their own: from the hub, by its own client, and such as are ended before they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bertserve.export.cli.export import main
from bertserve.serving.errors import StartupError
from bertserve.serving.inference.served_models import Repository
from bertserve.serving.models.bundle import read_bundle
from tests.support.checkpoints import write_checkpoint, write_task_checkpoint
from tests.support.fork_server import export_fork_server
from tests.support.hub import GATED, TOKEN, Hub
from tests.support.megatron import write_megatron
from tests.support.tensor_bundles import write_google_bert

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.fork_server import ForkedProcess

ROOT = Path(__file__).parents[2]
MODEL = "somebody/small"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub(MODEL, write_checkpoint(tmp_path / "files", layers=1), tmp_path / "client") as running:
        yield running


def export(hub: Hub, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in a process of its own: the hub's client reads its environment once."""
    env = {**os.environ, "HF_TOKEN": "", **hub.environment, **variables}
    return export_fork_server().run(["export", *words], env, ROOT, timeout_s=300)


def exported(hub: Hub, *words: str, **variables: str) -> str:
    done = export(hub, *words, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    return line


def test_what_is_exported_is_not_loaded_again(hub: Hub, tmp_path: Path) -> None:
    """The commit decides, and a hub that cannot be asked stops nothing that is there."""
    models = tmp_path / "models"
    words = (MODEL, "--out", str(models), "--precision", "fp32", "--if-changed")
    hub.private = True
    exported(hub, *words, "--token", TOKEN)
    source = read_bundle(models / "small" / "1").manifest.source
    assert (source.name, source.revision) == (MODEL, hub.commit)

    hub.requests.clear()
    again = exported(hub, *words, HF_TOKEN=TOKEN, HF_HOME=str(tmp_path / "another-client"))
    assert "already exported" in again
    assert hub.requests == [f"/api/models/{MODEL}"]

    hub.requests.clear()
    exported(hub, *words, "--revision", hub.commit)
    assert hub.requests == []

    hub.down = True
    for variables in ({}, {"HF_HUB_OFFLINE": "1"}):
        said = exported(hub, *words, **variables)
        assert "note: the hub cannot be reached, so this may not be the newest commit" in said
    assert [entry.name for entry in (models / "small").iterdir()] == ["1"]


def google(folder: Path) -> Path:
    saved = write_task_checkpoint(folder.with_name("saved"), "bert", "fill_mask")
    return write_google_bert(folder, saved, shards=2)


def megatron(folder: Path) -> Path:
    return write_megatron(folder, 2, 3.0)


@pytest.mark.parametrize("write", [google, pytest.param(megatron, marks=pytest.mark.slow)])
def test_checkpoints_as_their_makers_left_them(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    """Weights in another layout than Transformers' are loaded too."""
    with Hub(MODEL, write(tmp_path / "files"), tmp_path / "client") as hub:
        models = tmp_path / "models"
        exported(hub, MODEL, "--out", str(models), "--precision", "fp32")
        assert read_bundle(models / "small" / "1").manifest.source.revision == hub.commit


def test_another_commit_is_loaded(hub: Hub) -> None:
    """Its files lie in the client's cache afterwards, where they are found without the hub."""
    code = (
        "import json, sys\nfrom bertserve.export.checkpoint.source import locate\n"
        "source = locate(sys.argv[1], *sys.argv[2:]).load()\nprint(json.dumps([str(source.path), source.commit]))"
    )

    def load(*words: str, **variables: str) -> tuple[Path, str]:
        done = subprocess.run(
            [sys.executable, "-c", code, *words],
            cwd=ROOT,
            env={**os.environ, "HF_TOKEN": "", **hub.environment, **variables},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        path, commit = json.loads(done.stdout)
        return Path(path), commit

    assert load(MODEL)[1] == "a" * 40
    hub.commit = "b" * 40
    path, commit = load(MODEL, "main")
    assert commit == hub.commit
    assert (path / "1_Pooling" / "config.json").is_file()
    assert load(MODEL, HF_HUB_OFFLINE="1") == (path, commit)
    hub.down = True
    assert load(MODEL) == (path, commit)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["somebody/nothing"], "Hugging Face has no such public model; check the ID, or set a token"),
        ([GATED], "accept its terms on Hugging Face, then set a token of that account (--token"),
        ([MODEL, "--revision", "v9"], "unknown revision 'v9'"),
    ],
)
def test_what_the_hub_does_not_give(hub: Hub, tmp_path: Path, words: list[str], sentence: str) -> None:
    """One sentence says why and what to do, and nothing is left."""
    assert sentence in refused(export(hub, *words, "--out", str(tmp_path / "models"), "--if-changed"))
    assert not (tmp_path / "models").exists()


def test_a_hub_that_is_down(hub: Hub, tmp_path: Path) -> None:
    """It is said so, where neither the client nor the repository has anything."""
    hub.down = True
    assert "the hub cannot be reached" in refused(export(hub, MODEL, "--out", str(tmp_path / "models")))


@contextmanager
def exporting_until(stage: str, folder: Path, out: Path, errors: Path) -> Iterator[ForkedProcess]:
    """An export that has finished a stage and runs; its standard error goes to the file `errors`."""
    with errors.open("w") as file:
        words = ["export", str(folder), "--out", str(out)]
        child = export_fork_server().start(words, os.environ, folder, errors=file.fileno())
    with child.stdout:
        assert any(stage in line for line in child.stdout)
        yield child


@pytest.mark.parametrize(
    ("number", "stage", "code"),
    [
        (signal.SIGTERM, "loading the weights", 143),
        pytest.param(signal.SIGINT, "fusing operators", 130, marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_export_leaves_nothing(tmp_path: Path, number: signal.Signals, stage: str, code: int) -> None:
    """SIGTERM and SIGINT end the export with their exit codes, one line, and no file."""
    folder = write_checkpoint(tmp_path / "small", positions=512, hidden_size=128)
    with exporting_until(stage, folder, tmp_path / "models", tmp_path / "errors") as child:
        child.send_signal(number)
        assert child.wait(60) == code
    assert (tmp_path / "errors").read_text() == f"bertserve export: interrupted by {number.name}\n"
    assert not (tmp_path / "models").exists()


@pytest.mark.usefixtures("few_texts_of_pytorch")
@pytest.mark.parametrize(
    "stage", [pytest.param("loading the weights", marks=pytest.mark.slow), "comparing model.fp32.onnx"]
)
def test_what_a_killed_export_leaves_is_swept(tmp_path: Path, stage: str) -> None:
    """SIGKILL leaves only a hidden directory, which no server takes for a model and which the next export removes."""
    folder, out = write_checkpoint(tmp_path / "small", layers=1), tmp_path / "models"
    with exporting_until(stage, folder, out, tmp_path / "errors") as child:
        child.kill()
        child.wait()
    (leftover,) = (out / "small").iterdir()
    assert leftover.name.startswith(".staging-")
    with pytest.raises(StartupError, match="contains no model"):
        Repository.open(out)
    assert main([str(folder), "--out", str(out), "--precision", "fp32"]) == 0
    assert [entry.name for entry in (out / "small").iterdir()] == ["1"]
    assert Repository.open(out).models[0].version == "1"
