"""The task `fill_mask`: the likeliest tokens for each mask in a text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from serving.errors import InvalidRequest
from serving.inference.tasks.base import Task, check_top_k, texts_of
from serving.records import EncodedText, FilledMask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.inference.tasks.base import Work
    from serving.inference.tokenizer import TextTokenizer
    from serving.models.manifest import Manifest
    from serving.records import FillMaskOptions, Row, TextInput, Truncate

MASK = "[MASK]"
"""How a request may write a mask, whatever the model's own token is."""


def check(options: FillMaskOptions, manifest: Manifest) -> None:
    check_top_k(options.top_k, manifest.candidates)


def encode(
    tokenizer: TextTokenizer, inputs: Sequence[TextInput], _: FillMaskOptions, *, truncate: Truncate
) -> Sequence[EncodedText]:
    if not all(isinstance(value, EncodedText) for value in inputs):
        inputs = [text.replace(MASK, tokenizer.mask_token) for text in texts_of(inputs)]
    encoded = tokenizer.encode(inputs, truncate=truncate)
    for index, text in enumerate(encoded):
        if tokenizer.mask_id not in text.ids:
            where = f" in its first {len(text.ids)} tokens; the rest was cut off" if text.truncated else ""
            raise InvalidRequest(f"input {index} has no {tokenizer.mask_token}{where}")
    return encoded


def finish(text: EncodedText, row: Row, options: FillMaskOptions, tokenizer: TextTokenizer) -> list[list[FilledMask]]:
    """The best tokens for each mask of one text.

    Its row holds `top_ids` and `top_logits`, [masks or more, candidates], and `logsumexp`, [masks or more].
    """
    masks = [position for position, token in enumerate(text.ids) if token == tokenizer.mask_id]
    # With one mask the special tokens only disturb; with several the others must stay visible.
    bare = len(masks) == 1
    answer = []
    for position, ids, logits, total in zip(masks, *row, strict=False):
        filled = list(text.ids)
        best = []
        for token, logit in zip(ids[: options.top_k].tolist(), logits[: options.top_k].tolist(), strict=True):
            filled[position] = token
            score = math.exp(logit - float(total))
            best.append(FilledMask(score, token, tokenizer.decode([token]), tokenizer.decode(filled, bare=bare)))
        answer.append(best)
    return answer


def _finish(work: Work[FillMaskOptions]) -> list[list[list[FilledMask]]]:
    return [finish(text, row, work.options, work.tokenizer) for text, row in zip(work.texts, work.rows, strict=True)]


TASK = Task("fill_mask", _finish, check, encode=encode, token_outputs=True)
