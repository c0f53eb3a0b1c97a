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
    if options.targets is not None and len(options.targets) > manifest.candidates:
        raise InvalidRequest(f"{len(options.targets)} `targets`; at most {manifest.candidates} are taken")


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


def finish(
    text: EncodedText, row: Row, options: FillMaskOptions, tokenizer: TextTokenizer, pad: int | None = None
) -> list[list[FilledMask]]:
    """The best tokens for each mask of one text; `pad`, the padding token, is left out of its sequences.

    Its row holds `top_ids` and `top_logits`, [masks or more, candidates], and `logsumexp`, [masks or more].

    Raises:
        InvalidRequest: A target is none of a mask's candidates: the graph has no logit of it.
    """
    masks = [position for position, token in enumerate(text.ids) if token == tokenizer.mask_id]
    # With one mask the special tokens only disturb; with several the others must stay visible.
    bare = len(masks) == 1
    targets = None if options.targets is None else _targets(options.targets, tokenizer)
    answer = []
    for position, ids, logits, total in zip(masks, *row, strict=False):
        filled = list(text.ids)
        best = []
        offered = list(zip(ids.tolist(), logits.tolist(), strict=True))
        if targets is not None:
            offered = [(token, logit) for token, logit in offered if token in targets]
            if len(offered) < len(targets):
                raise InvalidRequest(
                    f"{len(targets) - len(offered)} of {len(targets)} `targets` are not among the {len(ids)} likeliest"
                    " tokens of a mask, which are all that the model answers; send likelier ones"
                )
        for token, logit in offered[: options.top_k]:
            filled[position] = token
            score = math.exp(logit - float(total))
            sequence = tokenizer.decode([one for one in filled if one != pad], bare=bare)
            best.append(FilledMask(score, token, tokenizer.decode([token]), sequence))
        answer.append(best)
    return answer


def _targets(words: Sequence[str], tokenizer: TextTokenizer) -> set[int]:
    targets = {token for word in words if (token := tokenizer.first_id(word)) is not None}
    if not targets:
        raise InvalidRequest("`targets` holds no word of the vocabulary; send at least one")
    return targets


def _finish(work: Work[FillMaskOptions]) -> list[list[list[FilledMask]]]:
    pad = work.manifest.special_ids.get("pad")
    return [
        finish(text, row, work.options, work.tokenizer, pad) for text, row in zip(work.texts, work.rows, strict=True)
    ]


TASK = Task("fill_mask", _finish, check, encode=encode, token_outputs=True)
