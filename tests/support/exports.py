"""An export that tests read and none changes, and how a graph answers before it is one."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bertserve.export import build
from bertserve.export.checkpoint.reader import open_checkpoint
from bertserve.export.checkpoint.source import find
from bertserve.export.cli.export import main
from bertserve.export.graph import editor, optimize, task_model
from bertserve.export.proof import parity
from bertserve.export.proof.engine import open_engine
from bertserve.export.texts import corpus
from bertserve.serving.models.bundle import Bundle, open_bundle
from bertserve.serving.models.verified_dir import versions
from tests.support.checkpoints import write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bertserve.export.checkpoint.reader import Checkpoint
    from bertserve.export.texts.corpus import Text
    from bertserve.serving.models.manifest import Target
    from bertserve.serving.records import EncodedText, Row

all_texts, all_probes = corpus.read, corpus.probes


def few_texts() -> list[Text]:
    """Some, where it is not tested how an artifact compares with PyTorch."""
    return all_texts()[::8]


def few_probes() -> list[Text]:
    """Some short ones, where it is not tested what each text of `export/texts/probes.jsonl` tells."""
    return [text for text in all_probes() if len(str(text)) < 200][::5]


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


def opened(folder: Path, task: str | None = None, max_length: int | None = None, **more: Any) -> Checkpoint:
    return open_checkpoint(find(str(folder)), max_length, more.pop("notice", [].append), task, **more)


def ignore(_done: int, _total: int) -> None:
    """Takes no notice of progress."""


def fused(checkpoint: Checkpoint, folder: Path, model: task_model.TaskModel | None = None) -> Path:
    """A checkpoint's graph after the fusions; beside it lies `raw.onnx`, as it was before them."""
    task_model.write(model or task_model.load(checkpoint), folder / "raw.onnx")
    optimize.fuse(folder / "raw.onnx", folder / "fused.onnx", optimize.shape_of(checkpoint))
    return folder / "fused.onnx"


def exported(folder: Path, *words: str) -> Bundle:
    """The newest bundle in `models` beside a checkpoint, after an export with these words."""
    assert main([str(folder), "--out", str(folder.with_name("models")), *words]) == 0
    made = folder.with_name("models") / folder.name
    return open_bundle(made / str(versions(made)[-1]))


def answers_together(
    checkpoint: Checkpoint, path: Path, texts: Sequence[EncodedText], target: Target = "cpu"
) -> list[Row]:
    comparator = build.comparator_of(checkpoint)
    whole = path.with_name(f"whole.{path.name}")
    editor.copy(path, whole)
    engine = open_engine(task_model.spec_of(checkpoint, whole), target, 1)
    plan = [(list(range(len(texts))), [])]
    return parity._run(engine, comparator, texts, plan, parity._Ticks(lambda _done, _total: None, 1))
