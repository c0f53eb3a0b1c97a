"""Zero-shot classification: the task `classify` with a request's own labels.

The model is one for natural language inference (NLI). Each label becomes a sentence, and the model decides whether the
text entails it. The formula is that of Transformers' pipeline: a softmax of the entailment logits over the labels. If
labels are independent, it is a softmax of contradiction and entailment for each label.
"""

from __future__ import annotations

from string import Formatter
from typing import TYPE_CHECKING

import numpy as np

from bertserve.serving.errors import EmptyInput, InvalidRequest, WrongTask
from bertserve.serving.tasks.base import CHARACTERS_PER_TOKEN, TaskOptions, TaskRoute, softmax, texts_of
from bertserve.serving.tasks.classify import LabelScore
from bertserve.serving.tasks.parts import present
from bertserve.serving.tasks.prompts import Prepared, prompted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bertserve.serving.records import EncodedText, Row, TextInput, Truncate
    from bertserve.serving.tasks.base import Facts, Tokenizer, Work


class ZeroShotOptions(TaskOptions[list[list[LabelScore]]], frozen=True):
    """Options whose answer is, for each text, the request's own labels, most likely first. The model is one for NLI.

    Attributes:
        template: A sentence with `{}` in place of a label, as `str.format` reads it. The model decides whether the text
            entails it.
        multi_label: Labels are independent of each other; otherwise their scores add up to 1.
    """

    labels: tuple[str, ...]
    template: str = "This example is {}."
    multi_label: bool = False


_FIELDS = ("", "0")
_HYPOTHESIS = "`hypothesis_template` with a label of `candidate_labels`"


def check(options: ZeroShotOptions, manifest: Facts) -> None:
    if not options.labels:
        raise EmptyInput("`candidate_labels` is empty; send at least one")
    _check_template(options, CHARACTERS_PER_TOKEN * manifest.max_length)
    if _entailment(present(manifest.labels).names) is None:
        raise WrongTask(
            "the model has no label `entailment`; `candidate_labels` need a natural language inference (NLI) model"
        )


def _check_template(options: ZeroShotOptions, most: int) -> None:
    """Rejects what `str.format` rejects, what reads more of a label than its text, and hypotheses that are too long."""
    template = options.template
    size = len(template)
    if size <= most:
        try:
            fields = [part[1:] for part in Formatter().parse(template) if part[1] is not None]
            # Attributes, indexes, conversions and formats may take any amount of memory.
            allowed = all(name in _FIELDS and not spec and conversion is None for name, spec, conversion in fields)
            size += len(fields) * max(map(len, options.labels))
            # Transformers compares with the first label, too.
            allowed = allowed and (size > most or template.format(options.labels[0]) != template)
        except (ValueError, IndexError):
            allowed = False
        if not allowed:
            raise InvalidRequest(
                "`hypothesis_template` must contain {} once, or {0}, for the label; write {{ and }} for other braces"
            )
    if size > most:
        raise InvalidRequest(f"{_HYPOTHESIS} has {size} characters; at most {most} are read: shorten it")


def _entailment(labels: Sequence[str]) -> int | None:
    return next((index for index, label in enumerate(labels) if label.lower().startswith("entail")), None)


def prepare(
    inputs: Sequence[TextInput],
    options: ZeroShotOptions,
    facts: Facts,
    prompt_name: str | None,
    input_type: str | None,
) -> Prepared[ZeroShotOptions]:
    """Pairs of each text with each label's sentence, as the model reads them."""
    texts = texts_of(prompted(inputs, facts, prompt_name, input_type))
    hypotheses = [options.template.format(label) for label in options.labels]
    return Prepared([(text, hypothesis) for text in texts for hypothesis in hypotheses], options)


def encode(
    tokenizer: Tokenizer, inputs: Sequence[TextInput], _: ZeroShotOptions, *, truncate: Truncate
) -> Sequence[EncodedText]:
    return tokenizer.encode(inputs, truncate=truncate, whole=_HYPOTHESIS)


def finish(rows: Sequence[Row], options: ZeroShotOptions, labels: Sequence[str]) -> list[list[LabelScore]]:
    """The answer from the `logits`, float32 [classes], of each text with each label."""
    logits = np.stack([row[0] for row in rows]).astype(np.float64).reshape(-1, len(options.labels), len(labels))
    entailment = _entailment(labels) or 0
    if options.multi_label or len(options.labels) == 1:
        contradiction = -1 if entailment == 0 else 0
        scores = softmax(logits[..., [contradiction, entailment]])[..., 1]
    else:
        scores = softmax(logits[..., entailment])
    order = np.argsort(-scores, axis=1, kind="stable").tolist()
    return [
        [LabelScore(options.labels[index], float(row[index])) for index in best]
        for row, best in zip(scores, order, strict=True)
    ]


def _finish(work: Work[ZeroShotOptions]) -> list[list[LabelScore]]:
    return finish(work.rows, work.options, present(work.manifest.labels).names)


WAY = TaskRoute(ZeroShotOptions, "classify", _finish, check, prepare=prepare, encode=encode)
