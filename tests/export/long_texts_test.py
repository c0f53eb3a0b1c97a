"""Texts longer than a model was trained with: the exported graph rotates, biases and counts as the model does."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from bertserve.export.graph import architectures, task_model
from bertserve.serving.records import EncodedText
from tests.support import own_forms
from tests.support.checkpoints import HEADS, PUBLISHED, vocabulary, write_task_checkpoint
from tests.support.exports import answers_together, fused, ignore, opened
from tests.support.references import OF_OWN_FORMS, of_transformers

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from bertserve.export.checkpoint.reader import Checkpoint


LENGTHS = (3, 23, 24, 25, 60, 130)
"""Shorter and longer than NomicBERT's trained length, and than the span of DeBERTa's distances."""


PUBLISHED_LENGTHS = (3, 63, 64, 65, 66, 128, 129, 300)
"""Around the windows and the distances of well-known models; 512 tokens would take five times as long."""


def texts(lengths: Sequence[int] = LENGTHS) -> list[EncodedText]:
    """Random tokens, the longest text last."""
    generator = np.random.default_rng(3)
    return [EncodedText(array("i", generator.integers(5, len(vocabulary()), length))) for length in lengths]


def write(folder: Path, model_type: str, task: str, positions: int = 256) -> Path:
    """A checkpoint that takes so many tokens; NomicBERT's in its first form."""
    settings = {"max_relative_positions": 24} if model_type == "deberta" else {}
    write_task_checkpoint(folder, model_type, task, max_position_embeddings=positions, **settings)
    if model_type == "nomic_bert":
        own_forms.to_first_nomic_bert(folder)
    return folder


SLOW = {"ernie-3.0-base-zh", "megatron-bert-uncased-345m", "camembert-base", "data2vec-text-base", "roberta-base"}
FORMS = ("jina_bert", "bert with distances", "bert with distances of queries", "new", "nomic_bert", "deberta")


def own_answer(folder: Path, model_type: str, ids: list[int]) -> NDArray[np.float32]:
    form = "nomic_bert in its first form" if model_type == "nomic_bert" else model_type
    answer = OF_OWN_FORMS.get(form, of_transformers)(folder, "Model", ids, None)
    found: NDArray[np.float32] = answer.last_hidden_state[0].numpy()
    return found


@pytest.mark.parametrize("model_type", FORMS)
def test_long_and_padded_texts_are_each_text_alone(tmp_path: Path, model_type: str) -> None:
    """One batch of 3 to 130 tokens, padded to the longest, is each text by itself, and so is PyTorch's own answer."""
    folder = write(tmp_path / "small", model_type, "embed_tokens")
    checkpoint = opened(folder, "embed_tokens")
    assert checkpoint.max_length == 256
    check(folder, model_type, checkpoint, texts())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in PUBLISHED]
)
def test_published_settings_are_those_of_the_library(tmp_path: Path, name: str) -> None:
    """Texts around the windows, buckets and trained lengths of each family's best-known checkpoint."""
    model_type, settings = PUBLISHED[name]
    folder = write_task_checkpoint(tmp_path / "small", model_type, "embed_tokens", **settings)
    if model_type == "nomic_bert":
        own_forms.to_first_nomic_bert(folder)
    check(folder, model_type, opened(folder, "embed_tokens"), texts(PUBLISHED_LENGTHS))


def check(folder: Path, model_type: str, checkpoint: Checkpoint, asked: Sequence[EncodedText]) -> None:
    """Holds PyTorch's answers to each text alone, and the graph's to all of them, against the library's."""
    model = task_model.load(checkpoint)
    own = task_model.answers(model, asked, threads=1, count=ignore)
    together = answers_together(checkpoint, fused(checkpoint, folder.parent, model), asked)
    for text, (row,), (traced,) in zip(asked, own, together, strict=True):
        right = own_answer(folder, model_type, list(text.ids))
        np.testing.assert_allclose(row, right, atol=2e-5)
        np.testing.assert_allclose(traced, right, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["jina_bert", "new", "nomic_bert"])
def test_8192_tokens_are_taken(tmp_path: Path, model_type: str) -> None:
    """The longest text that these models are known for."""
    folder = write(tmp_path / "small", model_type, "embed_tokens", 8192)
    checkpoint = opened(folder, "embed_tokens")
    ids = np.random.default_rng(3).integers(5, len(vocabulary()), 8192).tolist()
    path = fused(checkpoint, tmp_path)
    ((row,),) = answers_together(checkpoint, path, [EncodedText(array("i", ids))])
    right = own_answer(folder, model_type, ids)
    # The last bit of a rotation's frequency is 0.0005 of the angle's unit at the last place.
    np.testing.assert_allclose(row, right, atol=1e-3)


@pytest.mark.parametrize("task", ["classify", "fill_mask"])
def test_nomic_berts_first_form_answers_as_its_later_one(tmp_path: Path, task: str) -> None:
    """Its settings and heads are those of Transformers under other names; a head without biases has zeros."""
    folder = write(tmp_path / "small", "nomic_bert", task)
    checkpoint = opened(folder)
    assert (checkpoint.task, checkpoint.encoder.activation, checkpoint.max_length) == (task, "silu", 256)
    model = task_model.load(checkpoint).model
    for text in texts()[:2]:
        ids = torch.tensor([list(text.ids)])
        with torch.inference_mode():
            found = model(input_ids=ids, attention_mask=torch.ones_like(ids))
        right = own_forms.first_nomic_bert(folder, HEADS[task], list(text.ids), None)
        np.testing.assert_allclose(found.logits, right.logits, atol=1e-5)


@pytest.mark.parametrize("heads", own_forms.SLOPES)
def test_slopes_are_those_of_alibi(heads: int) -> None:
    """For a power of two and for other counts, to the list of ALiBi's authors."""
    assert architectures.slopes(heads) == pytest.approx(own_forms.SLOPES[heads], rel=1e-12)
