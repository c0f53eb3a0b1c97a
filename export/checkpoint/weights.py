"""A checkpoint's weight files: safetensors, or pickles that a separate process converts."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from bertserve.export.checkpoint.other_kinds import instead_of_weights
from bertserve.export.errors import ExportError, NoRoomError
from bertserve.serving.engine.children import module_command

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from bertserve.export.checkpoint.folder import Folder

_SAFE, _PICKLED = ".safetensors", ".bin"
_SINGLE = {_SAFE: "model.safetensors", _PICKLED: "pytorch_model.bin"}
"""By kind; the first existing one is used."""

_MATRIX = 2
_LARGEST_HEADER = 100_000_000
"""Maximum bytes of a safetensors header, by its format."""


@dataclass(slots=True, frozen=True)
class Weights:
    """The weight files of a checkpoint.

    Attributes:
        files: Sorted by name.
        index: The file of each tensor, if there are several files.
    """

    folder: Folder
    files: Sequence[Path]
    index: Mapping[str, str] = field(default_factory=dict)

    def matrix_rows(self, name: str) -> int | None:
        """The rows of a matrix; None if it is in no safetensors file."""
        for file in self.files:
            if file.suffix == _SAFE:
                with suppress(SafetensorError), safe_open(file, framework="numpy") as handle:  # others name the damage
                    if name in handle.keys() and len(shape := handle.get_slice(name).get_shape()) == _MATRIX:  # noqa: SIM118  not a mapping
                        return int(shape[0])
        return None

    def check_whole(self) -> None:
        """Raises ExportError if a safetensors file is damaged; reads its header alone."""
        for file in self.files:
            if file.suffix == _SAFE:
                try:
                    with safe_open(file, framework="numpy"):
                        continue
                except SafetensorError as error:
                    raise self.folder.error(f"{file.name} is damaged ({damage(file)}): {error}") from error

    def check(self, held: Mapping[str, Sequence[str]]) -> None:
        """Compares the index with the tensors in each file.

        Raises:
            ExportError: A tensor is not where the index says, or in two files.
        """
        for name, file in self.index.items():
            if name not in held[file]:
                raise self.folder.error(
                    f"the weights index says that {file} has {name}, but it does "
                    "not; the files are from different checkpoints"
                )
        names = [name for file in held.values() for name in file]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise self.folder.error(f"two weight files have {twice}")


def sha256(parts: Iterable[Weights]) -> str:
    """SHA-256 over the files' bytes in order of their names; for a single file its own."""
    digest = hashlib.sha256()
    for file in [file for part in parts for file in part.files]:
        with file.open("rb") as stream:
            hashlib.file_digest(stream, lambda: digest)
    return digest.hexdigest()


def are_in(folder: Folder) -> bool:
    """Whether there are weights in the format of Transformers."""
    return any(folder.has(name) or folder.has(f"{name}.index.json") for name in _SINGLE.values())


def find(folder: Folder) -> Weights:
    """Finds a checkpoint's weight files, safetensors before pickles.

    Raises:
        ExportError: There are none, or some are missing.
    """
    if folder.imported is not None:
        return Weights(folder, folder.imported.files)
    for kind, single in _SINGLE.items():
        if folder.has(single):
            folder.check_whole(single)
            return Weights(folder, [folder.path / single])
        if folder.has(f"{single}.index.json"):
            return _find_shards(folder, kind, f"{single}.index.json")
    raise folder.error(
        f"{_SINGLE[_SAFE]} and {_SINGLE[_PICKLED]} are missing"
        f"{instead_of_weights(folder)}; save the model with Transformers' save_pretrained"
    )


def _find_shards(folder: Folder, kind: str, file: str) -> Weights:
    index = folder.object(file).get("weight_map")
    if not isinstance(index, dict) or not index or not all(_is_plain(name, kind) for name in index.values()):
        raise folder.error(f"{file} must map tensors to {kind} files in the same folder")
    files = [folder.path / name for name in sorted(set(index.values()))]
    if absent := [path.name for path in files if not path.is_file()]:
        raise folder.error(f"{file} names {absent[0]}, which is missing")
    for path in files:
        folder.check_whole(path.name)
    return Weights(folder, files, index)


def _is_plain(name: object, kind: str) -> bool:
    return isinstance(name, str) and "/" not in name and name.endswith(kind)


@contextmanager
def readable(file: Path) -> Iterator[Path]:
    """The file as safetensors, while the block runs.

    Raises:
        ExportError: It is a pickle with other content than weights.
    """
    if file.suffix == _SAFE:
        yield file
        return
    with TemporaryDirectory(prefix="bertserve-weights-") as folder:
        target = Path(folder) / "model.safetensors"
        unpickle(file, target)
        yield target


def unpickle(file: Path, target: Path, *, training: bool = False) -> dict[str, Any]:
    """Writes the tensors of a pickled file as safetensors.

    Args:
        file: The pickle.
        target: The new file.
        training: Whether it is a training state of Megatron-LM, of which the model's tensors are taken.

    Returns:
        The answer of `export.checkpoint.unpickle`.

    Raises:
        ExportError: It is no such file.
    """
    where = f"checkpoint {file.parent}: {file.name}"
    words = [str(file.absolute()), str(target), *(["training"] if training else [])]
    command = module_command("bertserve.export.checkpoint.unpickle", *words)
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode == -signal.SIGKILL:
        raise NoRoomError(f"{where} could not be read: the system killed its reader, probably for lack of memory")
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise ExportError(f"{where} could not be read: its reader exited with {done.returncode} {last[:200]}") from None
    if "wanted" in answer:
        raise ExportError(
            f"{where} calls {answer['wanted']} when it is loaded, which weights do not need; nothing was run"
        )
    if "refused" in answer:
        raise ExportError(f"{where} {answer['refused']}")
    return answer


def damage(file: Path) -> str:
    """What is wrong with a damaged safetensors file, judging by its first bytes."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        header = int.from_bytes(stream.read(8), "little")
        begins = stream.read(1)
    if begins != b"{" or header > _LARGEST_HEADER:
        return f"its {size} bytes are not safetensors; download it again"
    return f"its header does not match its {size} bytes, as after a partial download; download it again"
