"""Whatever Transformers loads for a body that is taken: its settings, the names of its class, its labels."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers

from export.checkpoint.families import FAMILIES
from export.checkpoint.families.family import FIXED, READ, UNUSED
from export.errors import ExportError
from export.graph import optimize, task_model
from serving.inference.tasks import classify
from serving.records import ClassifyOptions
from tests.support.checkpoints import (
    SPECIAL,
    WORDS,
    edit_json,
    edit_weights,
    write_checkpoint,
    write_json,
    write_task_checkpoint,
)
from tests.support.exports import answers_together, opened

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from export.checkpoint.reader import Checkpoint
    from export.texts import corpus
    from serving.records import EncodedText, Row

TEXTS: list[corpus.Text] = ["the server", "a text that is not in it", ("of the", "and to a text with more"), "it"]
AUTO = {
    "embed_tokens": transformers.AutoModel,
    "classify": transformers.AutoModelForSequenceClassification,
    "fill_mask": transformers.AutoModelForMaskedLM,
}


def served(checkpoint: Checkpoint, folder: Path, texts: list[EncodedText]) -> list[Row]:
    """What the fused graph answers to a padded batch."""
    task_model.write(task_model.load(checkpoint), folder / "raw.onnx")
    optimize.fuse(folder / "raw.onnx", folder / "fused.onnx", optimize.shape_of(checkpoint))
    return answers_together(checkpoint, folder / "fused.onnx", texts)


def expected(folder: Path, task: str, checkpoint: Checkpoint, texts: list[EncodedText]) -> list[np.ndarray]:
    """What `AutoModel` and its kin answer, each text alone, with the segments that the checkpoint knows."""
    model = AUTO[task].from_pretrained(folder).eval()
    answers = []
    for text in texts:
        tensors = {"input_ids": torch.tensor([list(text.ids)])}
        if text.type_ids is not None and checkpoint.segments:
            tensors["token_type_ids"] = torch.tensor([list(text.type_ids)])
        with torch.inference_mode():
            answer = model(**tensors)
        if task == "fill_mask":
            mask = checkpoint.vocabulary.special_ids["mask"]
            answers.append(answer.logits[0][[token == mask for token in text.ids]].topk(100).values.numpy())
        else:
            answers.append((answer.last_hidden_state if task == "embed_tokens" else answer.logits)[0].numpy())
    return answers


def check(folder: Path, task: str) -> Checkpoint:
    """Holds the graph's answers against those of Transformers."""
    checkpoint = opened(folder, task)  # type: ignore[arg-type]
    words = checkpoint.vocabulary.encode(TEXTS, checkpoint.max_length)
    texts = with_masks(words, checkpoint) if task == "fill_mask" else words
    rows = served(checkpoint, folder.parent, texts)
    for row, right in zip(rows, expected(folder, task, checkpoint, texts), strict=True):
        found = row[1] if task == "fill_mask" else row[0]
        assert found.shape == right.shape
        assert np.abs(found - right).max() <= 1e-5 * max(1, np.abs(right).max())
    return checkpoint
