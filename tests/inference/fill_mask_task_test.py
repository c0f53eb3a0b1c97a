"""The task `fill_mask`: from the graph's best tokens to filled texts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from tokenizers import Tokenizer

from bertserve.serving.errors import InvalidRequest
from bertserve.serving.inference.tokenizer import TextTokenizer
from bertserve.serving.tasks import fill_mask
from bertserve.serving.tasks.fill_mask import FillMaskOptions
from tests.support.checkpoints import stripped_tokenizer, vocabulary

if TYPE_CHECKING:
    from bertserve.serving.tasks.fill_mask import FilledMask

IDS = vocabulary()
LENGTH = 12


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer(Tokenizer.from_str(stripped_tokenizer()), LENGTH, len(IDS), IDS["[MASK]"])


def filled(tokenizer: TextTokenizer, text: str, best: list[list[str]], top_k: int = 2) -> list[list[FilledMask]]:
    """The answer where the graph offers these tokens for each mask, with probabilities 1/2, 1/4, ..."""
    (encoded,) = fill_mask.encode(tokenizer, [text], FillMaskOptions(), truncate=True)
    rows = [*best, ["[PAD]"] * len(best[0])]  # a neighbour in the batch had one mask more
    ids = np.array([[IDS[token] for token in row] for row in rows], np.int32)
    totals = np.arange(len(rows), dtype=np.float32) * 100
    logits = totals[:, None] - np.log(2) * np.arange(1, ids.shape[1] + 1, dtype=np.float32)
    return fill_mask.finish(encoded, (ids, logits, totals), FillMaskOptions(top_k), tokenizer, IDS["[PAD]"])


def test_padding_is_not_written(tokenizer: TextTokenizer) -> None:
    """Where it is the best token it is named, and the text is as without it, as in Transformers' pipeline."""
    (first,), _ = filled(tokenizer, "[MASK] is [MASK]", [["[PAD]", "a"], ["on", "in"]], top_k=1)
    assert (first.token_str, first.sequence) == ("[PAD]", "[CLS] is [MASK] [SEP]")


def test_targets(tokenizer: TextTokenizer) -> None:
    """Only they compete, by their first tokens and with their own probabilities; one without a logit is refused."""
    (encoded,) = fill_mask.encode(tokenizer, ["the [MASK]"], FillMaskOptions(), truncate=True)
    ids = np.array([[IDS[token] for token in ("server", "x", "it")]], np.int32)
    row = (ids, -np.log(2) * np.arange(1, 4, dtype=np.float32)[None], np.zeros(1, np.float32))
    options = FillMaskOptions(5, ("it", "xyz"))
    (best,) = fill_mask.finish(encoded, row, options, tokenizer)
    assert [(one.token_str, one.score) for one in best] == [("x", pytest.approx(1 / 4)), ("it", pytest.approx(1 / 8))]
    with pytest.raises(InvalidRequest, match="1 of 2 `targets` are not among the 3 likeliest"):
        fill_mask.finish(encoded, row, FillMaskOptions(5, ("it", "on")), tokenizer)
    with pytest.raises(InvalidRequest, match="no word of `targets`"):
        fill_mask.finish(encoded, row, FillMaskOptions(5, ("",)), tokenizer)


@pytest.mark.parametrize("text", ["", "no mask here", "[mask]"])
def test_a_text_without_a_mask_is_refused(tokenizer: TextTokenizer, text: str) -> None:
    """There is nothing to fill; the refusal names the input and the token."""
    with pytest.raises(InvalidRequest, match=r"input 1 has no \[MASK\]"):
        fill_mask.encode(tokenizer, ["a [MASK]", text], FillMaskOptions(), truncate=True)


def test_a_mask_that_was_cut_off_is_refused(tokenizer: TextTokenizer) -> None:
    """A mask behind what the model reads is no mask; the refusal says why."""
    text = " ".join(["server"] * LENGTH) + " [MASK]"
    with pytest.raises(InvalidRequest, match=rf"input 0 has no \[MASK\] in its first {LENGTH} tokens"):
        fill_mask.encode(tokenizer, [text], FillMaskOptions(), truncate=True)


def test_the_mask_of_another_family() -> None:
    """`[MASK]` means the model's own token, whatever it is called."""
    other = TextTokenizer(
        Tokenizer.from_str(stripped_tokenizer().replace("[MASK]", "<mask>")), 12, len(IDS), IDS["[MASK]"]
    )
    for text in ("the [MASK]", "the <mask>"):
        (encoded,) = fill_mask.encode(other, [text], FillMaskOptions(), truncate=True)
        assert list(encoded.ids).count(IDS["[MASK]"]) == 1
