from __future__ import annotations

import io
import os
import pickle
import re
import shutil
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors import torch as safetensors_torch

from bertserve.export.checkpoint import unpickle
from bertserve.export.graph import task_model
from tests.support.checkpoints import write_checkpoint, write_json
from tests.support.exports import opened

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BIN = "pytorch_model.bin"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("weights") / "small")


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    shutil.copytree(good, tmp_path / "small")
    return tmp_path / "small"


def take_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of the folder's file, which is removed."""
    tensors = safetensors_torch.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    return tensors


class Runs:
    """What runs a command when it is unpickled by whoever allows it."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("touch ran",)


class Calls:
    """What opens a connection when it is unpickled by whoever allows it."""

    def __reduce__(self) -> tuple[object, ...]:
        return socket.create_connection, (("127.0.0.1", 9),)


def with_old_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As the first BERT called them."""
    renamed = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    return {re.sub("|".join(renamed), lambda m: renamed[m[0]], name): tensor for name, tensor in tensors.items()}


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("kind", ["model.safetensors", BIN])
def test_shards_in_half_precision_with_old_names_are_the_same_weights(folder: Path, good: Path, kind: str) -> None:
    """Two files with their index; pickles are of either format of PyTorch."""
    tensors = with_old_names({name: tensor.half() for name, tensor in take_tensors(folder).items()})
    files = {f"0-{kind}": sorted(tensors)[::2], f"1-{kind}": sorted(tensors)[1::2]}
    for is_zip, (file, names) in enumerate(files.items()):
        part = {name: tensors[name] for name in names}
        if kind == BIN:
            torch.save(part, folder / file, _use_new_zipfile_serialization=bool(is_zip))
        else:
            safetensors_torch.save_file(part, folder / file)
    index = {name: file for file, names in files.items() for name in names}
    write_json(folder / f"{kind}.index.json", {"weight_map": index})
    expected = task_model.load(opened(good)).model.state_dict()
    found = task_model.load(opened(folder)).model.state_dict()
    assert all(torch.equal(found[name], tensor.half().float()) for name, tensor in expected.items())


def test_safetensors_are_taken_before_pickles(folder: Path) -> None:
    """A pickle beside them is not even opened."""
    (folder / BIN).write_bytes(b"whatever")
    assert [file.name for file in opened(folder).encoder.weights.files] == ["model.safetensors"]
    task_model.load(opened(folder))


def test_the_reader_of_pickles_is_confined(tmp_path: Path) -> None:
    """It opens neither file nor socket, starts with no more memory than it needs, and still reads weights."""
    words = f"""
import io, socket, torch
from bertserve.export.checkpoint import unpickle
stream = io.BytesIO()
torch.save({{"a": torch.ones(3)}}, stream)
stream.seek(0)
unpickle._warm_up()
unpickle._confine(1000)
failed = []
for act in (socket.socket, lambda: open({str(tmp_path / "file")!r}, "w"), lambda: torch.zeros(1 << 28)):
    try:
        act()
    except (OSError, RuntimeError, MemoryError) as error:
        failed.append(type(error).__name__)
print(failed, unpickle.convert(stream, io.BytesIO()))
"""
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['OSError', 'OSError', 'RuntimeError'] {'names': ['a']}"


def saved(content: object, *, is_zip: bool = True) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream, _use_new_zipfile_serialization=is_zip)
    return stream.getvalue()


PICKLES: dict[str, tuple[Callable[[], bytes], str]] = {
    "runs-a-command": (lambda: saved({"a": Runs()}), "wanted posix.system"),
    "runs-a-command-in-the-old-format": (lambda: saved({"a": Runs()}, is_zip=False), "wanted posix.system"),
    "opens-a-connection": (lambda: saved({"a": Calls()}), "wanted socket.create_connection"),
    "a-whole-module": (lambda: saved({"a": torch.nn.Linear(1, 1)}), "wanted torch.nn.modules.linear.Linear"),
    "a-plain-pickle": (lambda: pickle.dumps(Runs()), "is damaged, truncated or not PyTorch weights"),
    "cut": (lambda: saved({"a": torch.ones(2)})[:-40], "is damaged, truncated or not PyTorch weights"),
    "cut-in-the-old-format": (
        lambda: saved({"a": torch.ones(2)}, is_zip=False)[:-4],
        "is damaged, truncated or not PyTorch weights",
    ),
    "empty": (lambda: b"", "is damaged, truncated or not PyTorch weights: it is empty"),
    "text": (lambda: b"version https://git-lfs.github.com/spec/v1\n", "is damaged, truncated or not PyTorch weights"),
    "a-list": (lambda: saved([1, 2]), "has list, not a dict of tensors"),
    "a-number": (lambda: saved({"a": 3}), "has int under 'a', not a tensor under a name"),
    "sparse": (lambda: saved({"a": torch.eye(2).to_sparse()}), "in layout torch.sparse_coo"),
    "complex": (lambda: saved({"a": torch.ones(2, dtype=torch.complex64)}), "has 'a' as torch.complex64"),
}


@pytest.mark.parametrize("name", PICKLES)
def test_what_is_no_weight_file_is_refused(name: str) -> None:
    """Half a sentence says what the file is or asks for; nothing of it runs."""
    content, sentence = PICKLES[name]
    answer = unpickle.convert(io.BytesIO(content()), io.BytesIO())
    assert sentence in (f"wanted {answer['wanted']}" if "wanted" in answer else answer["refused"])


def test_tensors_that_lie_otherwise_in_memory_are_written_as_they_are_meant() -> None:
    """Transposed, shared and parameters: safetensors get each as it reads."""
    whole = torch.arange(6.0).reshape(2, 3)
    tensors = {"turned": whole.t(), "part": whole[1], "trained": torch.nn.Parameter(whole), "none": torch.zeros(0, 3)}
    out = io.BytesIO()
    assert unpickle.convert(io.BytesIO(saved(tensors)), out) == {"names": list(tensors)}
    found = safetensors_torch.load(out.getvalue())
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
