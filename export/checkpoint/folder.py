"""Reading the files of a checkpoint folder, with sentences for what is wrong with them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from export.errors import ExportError

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(slots=True, frozen=True)
class Folder:
    """A folder whose files come from outside."""

    path: Path

    def sub(self, relative: str, *, may_be_missing: bool = False) -> Folder:
        """A folder below this one.

        Raises:
            ExportError: It is not below, or not there.
        """
        target = self.path / relative
        if not target.resolve().is_relative_to(self.path.resolve()):
            raise ExportError(f"checkpoint {self.path}: the module path {relative!r} leads outside the folder")
        if not may_be_missing and not target.is_dir():
            raise ExportError(f"checkpoint {self.path}: the folder {relative!r} is missing")
        return Folder(target)

    def has(self, name: str) -> bool:
        """Whether the file is there."""
        return (self.path / name).is_file()

    def json(self, name: str) -> Any:  # noqa: ANN401  any JSON value
        """The content of a JSON file; None when it is not there.

        Raises:
            ExportError: The file is no JSON.
        """
        try:
            return json.loads((self.path / name).read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, RecursionError) as error:
            raise ExportError(f"checkpoint {self.path}: {name} is not JSON: {error}") from error

    def object(self, name: str) -> dict[str, Any]:
        """The content of a JSON file that holds an object; empty when it is not there.

        Raises:
            ExportError: The file holds something else.
        """
        value = self.json(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise ExportError(f"checkpoint {self.path}: {name} must hold a JSON object")
        return value
