"""The task `fill_mask`: the most likely tokens for each mask in a text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from bertserve.serving.errors import InvalidRequest
from bertserve.serving.records import EncodedText
from bertserve.serving.tasks import replies
from bertserve.serving.tasks.base import (
    GraphOutput,
    LoadFormat,
    Output,
    Route,
    Task,
    TaskInputs,
    TaskOptions,
    TaskRoute,
    check_top_k,
    floats,
    size_of,
    texts_of,
)
from bertserve.serving.tasks.windows import Options  # noqa: TC001  msgspec reads the annotations

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bertserve.serving.records import Row, TextInput, Truncate
    from bertserve.serving.tasks.base import Facts, Tokenizer, Work


class FilledMask(msgspec.Struct, frozen=True):
    """A token for a mask.

    Attributes:
        score: Its probability over the whole vocabulary.
        token: Its id.
        token_str: Its text.
        sequence: The input with the mask filled, as the tokenizer decodes it.
    """

    score: float
    token: int
    token_str: str
    sequence: str


class FillMaskOptions(TaskOptions[list[list[list[FilledMask]]]], frozen=True):
    """Options whose answer is, for each text and each of its masks, the best `top_k` tokens.

    Attributes:
        targets: Words to choose from: tokens of the vocabulary, or words that begin with one. None means all tokens.
    """

    top_k: int = 5
    targets: tuple[str, ...] | None = None


MASK = "[MASK]"
"""A mask in a request, whatever the model's own mask token is."""


def check(options: FillMaskOptions, manifest: Facts) -> None:
    check_top_k(options.top_k)
    if options.targets is not None and len(set(options.targets)) > (most := size_of(manifest, "top_ids")):
        raise InvalidRequest(f"{len(set(options.targets))} `targets`; the maximum is {most}")


def encode(
    tokenizer: Tokenizer, inputs: Sequence[TextInput], _: FillMaskOptions, *, truncate: Truncate
) -> Sequence[EncodedText]:
    if not all(isinstance(value, EncodedText) for value in inputs):
        inputs = [text.replace(MASK, tokenizer.mask_token) for text in texts_of(inputs)]
    encoded = tokenizer.encode(inputs, truncate=truncate)
    for index, text in enumerate(encoded):
        if tokenizer.mask_id not in text.ids:
            where = f" in its first {len(text.ids)} tokens; the rest was truncated" if text.truncated else ""
            raise InvalidRequest(f"input {index} has no {tokenizer.mask_token}{where}")
    return encoded


def finish(
    text: EncodedText, row: Row, options: FillMaskOptions, tokenizer: Tokenizer, pad: int | None = None
) -> list[list[FilledMask]]:
    """The best tokens for each mask of one text. Its sequences omit `pad`, the padding token.

    The row holds `top_ids` and `top_logits`, [masks or more, candidates], and `logsumexp`, [masks or more].

    Raises:
        InvalidRequest: A target is not among a mask's candidates, so the graph returns no logit for it.
    """
    masks = [position for position, token in enumerate(text.ids) if token == tokenizer.mask_id]
    # With one mask, special tokens are omitted. With several, the other masks must stay visible.
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
                    " tokens of a mask, the only ones scored; send likelier ones"
                )
        for token, logit in offered[: options.top_k]:
            filled[position] = token
            score = math.exp(logit - float(total))
            sequence = tokenizer.decode([one for one in filled if one != pad], bare=bare)
            best.append(FilledMask(score, token, tokenizer.decode([token]), sequence))
        answer.append(best)
    return answer


def _targets(words: Sequence[str], tokenizer: Tokenizer) -> set[int]:
    targets = {token for word in words if (token := tokenizer.first_id(word)) is not None}
    if not targets:
        raise InvalidRequest("no word of `targets` is in the vocabulary; send at least one that is")
    return targets


def _finish(work: Work[FillMaskOptions]) -> list[list[list[FilledMask]]]:
    pad = work.manifest.special_ids.get("pad")
    return [
        finish(text, row, work.options, work.tokenizer, pad) for text, row in zip(work.texts, work.rows, strict=True)
    ]


class FillMaskParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to fill masks.

    Attributes:
        top_k: Maximum tokens for each mask. The model returns a fixed number of candidates, so there may be fewer.
        targets: Words to choose from, by their first tokens. Each must be among the tokens that the model returns.
        truncate: Truncate inputs that are too long; null means the server's default.
    """

    top_k: int = 5
    targets: str | list[str] | None = None
    truncate: bool | None = None


class FillMaskRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Texts with one or more masks, written `[MASK]` or as the model's own token."""

    inputs: str | list[str]
    parameters: FillMaskParameters = FillMaskParameters()
    options: Options | None = None


def _read(message: FillMaskRequest, _: bool) -> TaskInputs:  # noqa: FBT001  see `Route`
    given = message.parameters
    targets = [given.targets] if isinstance(given.targets, str) else given.targets
    options = FillMaskOptions(given.top_k, None if targets is None else tuple(targets))
    return TaskInputs([message.inputs] if isinstance(message.inputs, str) else message.inputs, options, given.truncate)


def _reply(message: FillMaskRequest, answer: list[list[list[FilledMask]]]) -> object:
    results = [masks[0] if len(masks) == 1 else masks for masks in answer]
    return results[0] if isinstance(message.inputs, str) else results


def _filled(facts: Facts) -> int:
    return min(FillMaskOptions().top_k, size_of(facts, "top_ids"))


def _write(answer: Sequence[Sequence[Sequence[FilledMask]]], _: Facts) -> Sequence[Any]:
    for index, masks in enumerate(answer):
        if len(masks) != 1:
            raise InvalidRequest(f"input {index} has {len(masks)} masks; each text must have one")
    scores = floats([[filled.score for filled in best] for (best,) in answer])
    return np.array([[filled.token_str for filled in best] for (best,) in answer], object), scores


def _recorded(options: FillMaskOptions, _: Facts, count: int) -> list[list[list[FilledMask]]]:
    words = [("card", 4003), ("chip", 9090), ("engine", 3194), ("board", 2604), ("unit", 3131)]
    found = [
        FilledMask(round(0.48 / 2**index, 4), number, word, f"a t4 is a graphics {word}.")
        for index, (word, number) in enumerate(words)
    ]
    return [[found[: options.top_k]]] * count


def _item(text: str) -> dict[str, Any]:
    return {"text": text if any(mask in text for mask in (MASK, "<mask>")) else f"{MASK} {text}"}  # never truncated


def _answers(found: Any) -> list[Any]:  # noqa: ANN401  any JSON
    filled = [[(one["token_str"], one["score"]) for one in row] for row in replies.nested(found)]
    for row in filled:
        replies.scored(row)
    return filled[:1]  # a text with several masks is one input


TASK = Task(
    way=TaskRoute(FillMaskOptions, "fill_mask", _finish, check, encode=encode, token_outputs=True),
    # The best tokens of each mask, and the logsumexp over the whole vocabulary: exp(logit - logsumexp) is a
    # probability.
    graph=(
        GraphOutput("top_ids", (-1, "candidates"), "int32"),
        GraphOutput("top_logits", (-1, "candidates")),
        GraphOutput("logsumexp", (-1,)),
    ),
    head="ForMaskedLM",
    path="/fill-mask",
    example={"inputs": "A T4 is a graphics [MASK].", "parameters": {"top_k": 3}},
    route=Route(
        FillMaskRequest,
        list[FilledMask | list[FilledMask | list[FilledMask]]],
        _read,
        _reply,
        "The likeliest tokens for each mask in a text.",
    ),
    # For the single mask of each text.
    outputs=(
        Output("token", "BYTES", lambda facts: (_filled(facts),)),
        Output("score", "FP32", lambda facts: (_filled(facts),)),
    ),
    write=_write,
    asked=lambda facts: FillMaskOptions(_filled(facts)),
    recorded=_recorded,
    column=lambda _, __: ("masks", [[FilledMask]]),
    summary=lambda facts: f"{size_of(facts, 'top_ids')} words for each mask",
    load=LoadFormat(
        item=_item,
        answers=_answers,
        row=lambda tokens, scores: list(zip(tokens, scores, strict=True)),
        check=replies.scored,
    ),
)
