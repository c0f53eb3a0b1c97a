"""What a checkpoint's own library answers, and how a graph's answers are held against it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers

from bertserve.export.texts import corpus
from tests.support import own_forms
from tests.support.checkpoints import HEADS
from tests.support.exports import answers_together

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from bertserve.export.checkpoint.reader import Checkpoint
    from bertserve.serving.records import EncodedText

TEXTS: list[corpus.Text] = ["the server", "a text that is not in it", ("of the", "and to a text with more"), "it"]


def of_transformers(folder: Path, head: str, ids: list[int], types: list[int] | None) -> Any:
    """What `AutoModel` and its kin answer."""
    model = getattr(transformers, f"AutoModel{head.removeprefix('Model')}").from_pretrained(folder).eval()
    tensors = {"input_ids": torch.tensor([ids])}
    if types is not None:
        tensors["token_type_ids"] = torch.tensor([types])
    with torch.inference_mode():
        return model(**tensors)


OF_OWN_FORMS: dict[str, Callable[..., Any]] = {
    "new": own_forms.new,
    "nomic_bert in its first form": own_forms.first_nomic_bert,
    **dict.fromkeys(("jina_bert", "jina_bert for code"), own_forms.bert),
    **dict.fromkeys(("bert with distances", "bert with distances of queries"), own_forms.bert),
}
"""Of forms that Transformers does not load, by the name that `write_task_checkpoint` has for them."""


def encoded(checkpoint: Checkpoint, texts: Sequence[corpus.Text] = TEXTS) -> list[EncodedText]:
    """Texts as the task takes them."""
    found = checkpoint.vocabulary.encode(texts, checkpoint.max_length)
    return corpus.with_masks(found, checkpoint.vocabulary.special_ids) if checkpoint.task == "fill_mask" else found


def expected(folder: Path, checkpoint: Checkpoint, text: EncodedText, form: str = "") -> list[np.ndarray]:
    """What the model answers to a text by itself, as the task's graph has it."""
    one_segment = json.loads((folder / "config.json").read_text()).get("type_vocab_size") == 1
    types = None if text.type_ids is None or one_segment else list(text.type_ids)
    answer = OF_OWN_FORMS.get(form, of_transformers)(folder, HEADS[checkpoint.task], list(text.ids), types)
    if checkpoint.task == "embed":
        return [answer.last_hidden_state[0].mean(0).numpy()]
    if checkpoint.task == "embed_tokens":
        return [answer.last_hidden_state[0].numpy()]
    if checkpoint.task == "answer":
        return [answer.start_logits[0].numpy(), answer.end_logits[0].numpy()]
    if checkpoint.task == "embed_sparse":
        return [answer.logits[0].relu().log1p().amax(0).numpy()]
    if checkpoint.task != "fill_mask":
        return [answer.logits[0].numpy()]
    mask = checkpoint.vocabulary.special_ids["mask"]
    logits = answer.logits[0][[token == mask for token in text.ids]]
    best = logits.topk(100)
    return [best.indices.numpy(), best.values.numpy(), logits.logsumexp(-1).numpy()]


def check_answers(folder: Path, checkpoint: Checkpoint, graph: Path, form: str = "") -> None:
    """Holds what a graph answers to a padded batch against the library's answers to each text alone."""
    texts = encoded(checkpoint)
    for answered, text in zip(answers_together(checkpoint, graph, texts), texts, strict=True):
        row = [_dense(*answered)] if checkpoint.task == "embed_sparse" else answered
        for found, right in zip(row, expected(folder, checkpoint, text, form), strict=True):
            np.testing.assert_allclose(found, right, atol=2e-5 * max(1, np.abs(right).max()))


def _dense(indices: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The weights of all words, of which a graph has given every one."""
    return weights[np.argsort(indices)]
