"""Reads the files of a checkpoint folder, with clear errors."""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from bertserve.export.errors import ExportError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from bertserve.export.checkpoint.safetensors_file import Tensor

_POINTER = b"version https://git-lfs.github.com/spec/"
"""The beginning of git-lfs pointers."""

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""Halves of pairs of surrogates, as JSON writes them; anything else that is no text is not UTF-8."""


@dataclass(slots=True, frozen=True)
class Imported:
    """The content of a folder with another layout, in the form of Transformers.

    Attributes:
        stated: The content of JSON files by name.
        tensors: Opens them, under the names of Transformers.
    """

    stated: Mapping[str, dict[str, Any]]
    files: Sequence[Path]
    tensors: Callable[[], AbstractContextManager[Mapping[str, Tensor]]]


@dataclass(slots=True, frozen=True)
class Folder:
    """A checkpoint folder, which is untrusted.

    Attributes:
        imported: Its content, if it has another layout than Transformers'.
    """

    path: Path
    imported: Imported | None = field(default=None, repr=False)

    def sub(self, relative: str, *, may_be_missing: bool = False) -> Folder:
        """A folder below this one.

        Raises:
            ExportError: It is not below this one, or does not exist.
        """
        target = self.path / relative
        try:
            inside = target.resolve().is_relative_to(self.path.resolve())
        except (OSError, RuntimeError, ValueError) as error:  # a name too long, links in a circle, a byte 0
            raise self.error(f"the module path {relative!r} is no path: {error}") from error
        if not inside:
            raise self.error(f"the module path {relative!r} leads outside the folder")
        if not may_be_missing and not target.is_dir():
            raise self.error(f"the folder {relative!r} is missing")
        return Folder(target)

    def error(self, sentence: str) -> ExportError:
        """An error that begins with the checkpoint's name."""
        return ExportError(f"checkpoint {self.path}: {sentence}")

    def has(self, name: str) -> bool:
        return (self.path / name).is_file()

    def json(self, name: str) -> Any:  # noqa: ANN401  any JSON value
        """The content of a JSON file; None if it does not exist.

        Raises:
            ExportError: The file is not valid JSON.
        """
        if self.imported is not None and name in self.imported.stated:
            return self.imported.stated[name]
        try:
            content = (self.path / name).read_bytes()
            value = json.loads(content.decode(json.detect_encoding(content)))
            place = _surrogate_in(value) if _SURROGATE.search(content) else None
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, RecursionError) as error:
            self.check_whole(name)
            raise self.error(f"{name} is not JSON: {error}") from error
        if place is not None:
            raise self.error(f"{place or 'the text'} in {name} has half of a surrogate pair")
        return value

    def object(self, name: str) -> dict[str, Any]:
        """The object in a JSON file; empty if the file does not exist.

        Raises:
            ExportError: The file holds no object.
        """
        value = self.json(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.error(f"{name} must be a JSON object")
        return value

    def check_whole(self, name: str) -> None:
        """Rejects git-lfs pointers.

        Raises:
            ExportError: The file is a pointer.
        """
        with (self.path / name).open("rb") as stream:
            if stream.read(len(_POINTER)) == _POINTER:
                raise self.error(f"{name} is a Git LFS pointer, not the file itself; run `git lfs pull` in that folder")

    @contextmanager
    def saved(self) -> Iterator[Path]:
        """The folder as other libraries read it, while the block runs, with the files that its layout implies."""
        if self.imported is None:
            yield self.path
            return
        with TemporaryDirectory(prefix="bertserve-layout-") as made:
            for path in self.path.iterdir():
                if path.is_file() and path.name not in self.imported.stated:
                    (Path(made) / path.name).symlink_to(path.resolve())
            for name, content in self.imported.stated.items():
                (Path(made) / name).write_text(json.dumps(content), encoding="utf-8")
            yield Path(made)


def _surrogate_in(value: object, place: str = "") -> str | None:
    """The place of half of a surrogate pair, which is no text; None if there is none."""
    if isinstance(value, str):
        return place if any("\ud800" <= letter <= "\udfff" for letter in value) else None
    if isinstance(value, list):
        members: Iterable[tuple[object, object]] = enumerate(value)
    elif isinstance(value, dict):
        members = value.items()
        if any(_surrogate_in(key) is not None for key in value):
            return f"a key of {place}" if place else "a key"
    else:
        return None
    found = (_surrogate_in(member, f"{place}.{key}" if place else str(key)) for key, member in members)
    return next((each for each in found if each is not None), None)
