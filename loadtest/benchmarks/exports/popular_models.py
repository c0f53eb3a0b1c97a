"""The most popular models of the hub: how the exporter treats each, by its published settings."""

from __future__ import annotations

import functools
import importlib.resources
import json
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bertserve.export.checkpoint.reader import open_checkpoint
from bertserve.export.checkpoint.source import Source
from bertserve.export.errors import ExportError
from bertserve.loadtest.benchmarks.exports.random_checkpoints import write_tokenizer

_TOKENIZER = {"vocab_size": 2000, "pad_token_id": 0}
"""The start of the demo model's vocabulary, which replaces each model's own: only the settings matter here.

It holds the special tokens and single characters. An export opens and tests it in a third of the time that the
whole vocabulary takes.
"""
_ANY_WEIGHTS_BYTES = 1 << 36
"""More than the weights of every model; the file is sparse."""


@dataclass(slots=True, frozen=True)
class Model:
    """A model of the hub.

    Attributes:
        name: Its id on the hub.
        config: The decisive settings of its config.json.
        pooling: The settings of its 1_Pooling/config.json; empty if it has no such file.
        normalize: Whether its modules.json ends in a Normalize.
        task: The `--task` that it needs; empty if its settings imply the task.
        files: Whether its own files were available.
    """

    name: str
    config: dict[str, Any]
    pooling: str = ""
    normalize: bool = False
    task: str | None = None
    files: bool = False


def read() -> list[Model]:
    """The models of `popular_models.jsonl`."""
    lines = (importlib.resources.files("bertserve.loadtest.benchmarks.exports") / "popular_models.jsonl").read_text(
        encoding="utf-8"
    )
    return [Model(**json.loads(line)) for line in lines.splitlines()]


def verdict(model: Model) -> dict[str, str]:
    """The exporter's verdict on a model's settings: `family` and `answers`, or `refused` with its message."""
    with TemporaryDirectory() as name:
        folder = Path(name) / "model"
        _write(folder, model)
        try:
            checkpoint = open_checkpoint(Source(folder, model.name, "model"), None, lambda _: None, model.task)
        except ExportError as error:
            return {"refused": str(error).removeprefix(f"checkpoint {folder}: ")}
    pooled = [*checkpoint.sentence.pooling, *(["normalized"] if checkpoint.sentence.normalize else [])]
    answers = f"`{checkpoint.task}`"
    if checkpoint.task == "embed" and model.pooling:
        answers += f" ({', '.join(pooled)})"
    return {"family": f"`{checkpoint.encoder.family.model_type}`", "answers": answers}


@functools.cache
def verdicts() -> dict[str, dict[str, str]]:
    """Verdicts of all models by name; they depend on the exporter's code alone."""
    return {model.name: verdict(model) for model in read()}


def fp32_bytes(model: Model) -> int:
    """Size of the weights in fp32; 0 if Transformers has no class for the model."""
    # Slow to import, and needed here alone.
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    kind: Any = getattr(transformers, model.config["architectures"][0], None)
    if kind is None or kind.config_class.model_type != model.config["model_type"]:
        return 0
    # A model without allocated memory.
    with torch.device("meta"):
        tensors = kind(kind.config_class(**model.config)).parameters()
    return sum(4 * tensor.numel() for tensor in tensors)


def _write(folder: Path, model: Model) -> None:
    """Writes a folder with the model's settings; the export reads no tensor of its weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model.config | _TOKENIZER))
    with (folder / "model.safetensors").open("wb") as weights:
        weights.truncate(_ANY_WEIGHTS_BYTES)
    write_tokenizer(folder, _TOKENIZER["vocab_size"])
    if model.pooling:
        names = ["Transformer", "Pooling", *(["Normalize"] if model.normalize else [])]
        paths = ["", *(f"{at}_{name}" for at, name in enumerate(names) if at)]
        types = [
            {"type": f"sentence_transformers.x.{name}", "path": path} for name, path in zip(names, paths, strict=True)
        ]
        (folder / "modules.json").write_text(json.dumps(types))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": model.pooling}))
