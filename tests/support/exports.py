"""An export that tests read and none changes, and how a graph answers before it is one."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING

from export import build
from export.checkpoint.reader import open_checkpoint
from export.checkpoint.source import find
from export.cli.export import main
from export.graph import draft, task_model
from export.proof import parity
from export.proof.engine import open_engine
from serving.models.bundle import Bundle, open_bundle
from tests.support.checkpoints import write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from export.checkpoint.reader import Checkpoint
    from serving.models.manifest import Target
    from serving.records import EncodedText, Row


@dataclass(frozen=True)
class Export:
    checkpoint: Path
    models: Path
    code: int
    out: str
    err: str

    @property
    def bundle(self) -> Bundle:
        return open_bundle(self.models / "small" / "1")


ORT = ("--precision", "fp32", "--precision", "int8")
"""What is made by default where OpenVINO is not installed."""


def export_small(folder: Path) -> Export:
    checkpoint, models = write_checkpoint(folder / "small"), folder / "models"
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = main([str(checkpoint), "--out", str(models), *ORT])
    return Export(checkpoint, models, code, out.getvalue(), err.getvalue())


def opened(folder: Path, task: str | None = None) -> Checkpoint:
    return open_checkpoint(find(str(folder)), None, [].append, task)


def answers_together(
    checkpoint: Checkpoint, path: Path, texts: Sequence[EncodedText], target: Target = "cpu"
) -> list[Row]:
    judge = build.judge_of(checkpoint)
    whole = path.with_name(f"whole.{path.name}")
    draft.copy(path, whole)
    engine = open_engine(task_model.spec_of(checkpoint, whole), target, 1)
    plan = [(list(range(len(texts))), [])]
    return parity._run(engine, judge, texts, plan, parity._Ticks(lambda _done, _total: None, 1))
