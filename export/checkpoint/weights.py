"""A checkpoint's weight files: safetensors only."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from export.errors import ExportError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from export.checkpoint.folder import Folder

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLED = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(slots=True, frozen=True)
class Weights:
    """The weight files of a checkpoint."""

    folder: Folder
    files: Sequence[Path]

    def sha256(self) -> str:
        """SHA-256 over the files' bytes in the order of their names; of a single file its own."""
        digest = hashlib.sha256()
        for file in self.files:
            with file.open("rb") as stream:
                hashlib.file_digest(stream, lambda: digest)
        return digest.hexdigest()


def find(folder: Folder) -> Weights:
    """Finds a checkpoint's weight files.

    Raises:
        ExportError: There are none, some are missing, or there are only pickled ones, which run code when
            they are loaded.
    """
    names = [] if folder.has(_SINGLE) else _listed(folder)
    files = [folder.path / name for name in names or [_SINGLE]]
    absent = [file.name for file in files if not file.is_file()]
    if not absent:
        return Weights(folder, files)
    pickled = sorted(path.name for pattern in _PICKLED for path in folder.path.glob(pattern))
    if pickled and not names:
        raise ExportError(
            f"checkpoint {folder.path}: has only pickled weights ({pickled[0]}), which can run code when loaded; "
            f"save it as {_SINGLE}"
        )
    raise ExportError(f"checkpoint {folder.path}: {absent[0]} is missing")


def _listed(folder: Folder) -> list[str]:
    index = folder.object(_INDEX)
    names = index.get("weight_map", {}) if index else {}
    if not isinstance(names, dict) or not all(_is_plain(name) for name in names.values()):
        raise ExportError(f"checkpoint {folder.path}: {_INDEX} must name .safetensors files beside it")
    return sorted(set(names.values()))


def _is_plain(name: object) -> bool:
    return isinstance(name, str) and "/" not in name and name.endswith(".safetensors")
