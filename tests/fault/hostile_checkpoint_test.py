"""Row 65 of the failure modes: a checkpoint that would run code if anything in it were unpickled or imported."""

from __future__ import annotations

import json
import os
import pickle
import struct
import zipfile
from typing import TYPE_CHECKING

import pytest

from bertserve.export.cli.export import main
from bertserve.serving.models.bundle import open_bundle
from tests.support.checkpoints import edit_json, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Spoil = Callable[[Path, Path], object]

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


class Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, int]]:
        return os.mkdir, (str(self.path), 0o700)


def pickled(canary: Path) -> bytes:
    """Bytes that leave a mark when they are unpickled."""
    return pickle.dumps(Touch(canary))


def zipped(path: Path, canary: Path) -> None:
    """The same in the archive that `torch.save` writes."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled(canary))
        archive.writestr("archive/version", "3\n")


def only_pickled(name: str) -> Spoil:
    """Leaves weights of the pickled kind alone."""

    def spoil(folder: Path, canary: Path) -> None:
        (folder / WEIGHTS).unlink()
        zipped(folder / name, canary)

    return spoil


def listed(name: str) -> Spoil:
    """An index that leads to a file of that name."""

    def spoil(folder: Path, canary: Path) -> None:
        (folder / WEIGHTS).unlink()
        zipped(folder / "weights.bin", canary)
        (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))

    return spoil


def header(size: int, content: bytes) -> Spoil:
    return lambda folder, _canary: (folder / WEIGHTS).write_bytes(struct.pack("<Q", size) + content)


CASES: dict[str, tuple[Spoil, str]] = {
    "pytorch_model.bin": (only_pickled("pytorch_model.bin"), "not PyTorch weights"),
    **{
        name: (only_pickled(name), "model.safetensors and pytorch_model.bin are missing")
        for name in ("pytorch_model-00001-of-00002.bin", "model.pt", "model.pth", "last.ckpt")
    },
    "pickled under the other name": (lambda f, c: (f / WEIGHTS).write_bytes(pickled(c)), "is damaged"),
    "archive under the other name": (lambda f, c: zipped(f / WEIGHTS, c), "is damaged"),
    "index of a pickled file": (listed("weights.bin"), "must map tensors to .safetensors files"),
    "index that leads out": (listed("../weights.safetensors"), "must map tensors to .safetensors files"),
    "header beyond the file": (header(1 << 62, b"{}"), "is damaged"),
    "header that is no JSON": (header(2, b"{{"), "is damaged"),
    "tensor beyond the file": (
        header(62, b'{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}'.ljust(62)),
        "is damaged",
    ),
    "no bytes": (lambda f, _c: (f / WEIGHTS).write_bytes(b""), "is damaged"),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", CASES)
def test_row_65_weights_that_could_run_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """They are refused in one line, nothing in them runs, and no bundle is left."""
    monkeypatch.chdir(tmp_path)
    folder, canary = write_checkpoint(tmp_path / "small"), tmp_path / "canary"
    spoil, word = CASES[case]
    spoil(folder, canary)
    assert main(["small", "--out", "models"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("bertserve export: checkpoint small: ")
    assert word in line
    assert not canary.exists()
    assert not (tmp_path / "models").exists()


def test_the_canary_sings(tmp_path: Path) -> None:
    """What the cases hold does run where it is unpickled: nothing above is refused for being harmless."""
    pickle.loads(pickled(tmp_path / "canary"))  # noqa: S301  this is the proof
    assert (tmp_path / "canary").exists()


def test_row_65_code_that_a_checkpoint_brings_is_never_imported(tmp_path: Path) -> None:
    """Pickled weights, a model's and a package's Python files lie beside good weights and are left alone."""
    folder, canary = write_checkpoint(tmp_path / "small"), tmp_path / "canary"
    evil = f"import os\nos.mkdir({str(canary)!r})\n"
    for name in ("modeling_evil.py", "__init__.py", "transformers.py", "torch.py", "sitecustomize.py"):
        (folder / name).write_text(evil)
    zipped(folder / "pytorch_model.bin", canary)
    edit_json(
        folder / "config.json", auto_map={"AutoModel": "modeling_evil.Evil", "AutoConfig": "modeling_evil.Config"}
    )
    assert main([str(folder), "--out", str(tmp_path / "models"), "--precision", "fp32"]) == 0
    assert not canary.exists()
    assert not list((open_bundle(tmp_path / "models" / "small" / "1").path).glob("*.py"))
