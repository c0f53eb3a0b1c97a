"""An export that tests read and none changes."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING

from export.cli.export import main
from serving.models.bundle import Bundle, open_bundle
from tests.support.checkpoints import write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Export:
    """An export of a small checkpoint, and what it printed."""

    checkpoint: Path
    models: Path
    code: int
    out: str
    err: str

    @property
    def bundle(self) -> Bundle:
        """Its first version."""
        return open_bundle(self.models / "small" / "1")


def export_small(folder: Path) -> Export:
    """Exports a small checkpoint with no option but where to."""
    checkpoint, models = write_checkpoint(folder / "small"), folder / "models"
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = main([str(checkpoint), "--out", str(models)])
    return Export(checkpoint, models, code, out.getvalue(), err.getvalue())
