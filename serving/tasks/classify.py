"""The task `classify`: the classes of a text or a text pair."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from bertserve.serving.tasks import replies, windows
from bertserve.serving.tasks.base import (
    GraphOutput,
    LoadFormat,
    Output,
    Task,
    TaskOptions,
    TaskRoute,
    check_top_k,
    floats,
    go_on,
    sigmoid,
    size_of,
    softmax,
    with_checks,
)
from bertserve.serving.tasks.parts import present
from bertserve.serving.tasks.windows import Windows  # noqa: TC001  msgspec reads the annotations

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from numpy.typing import NDArray

    from bertserve.serving.records import EncodedText, Row, TextInput
    from bertserve.serving.tasks.base import Check, Facts, Work
    from bertserve.serving.tasks.parts import Labels


_ROWS = 16
"""Texts whose classes are sorted at once."""


class LabelScore(msgspec.Struct, frozen=True):
    """A class and its probability, or its raw score."""

    label: str
    score: float


class ClassifyOptions(TaskOptions[list[list[LabelScore]]], frozen=True):
    """Options whose answer is, for each input, its classes.

    Attributes:
        function: `none` returns the logits. None means the model's own function: `softmax`, or `sigmoid` if classes are
            independent or there is only one; `none` for a regression.
        top_k: Maximum classes; None means all.
        windows: None truncates texts that are too long. Otherwise each window is scored by itself.
        ranked: Whether the best class comes first. Otherwise they have the order of the model's labels, two of which
            may have the same name.
    """

    function: Literal["softmax", "sigmoid", "none"] | None = None
    top_k: int | None = None
    windows: Windows | None = None
    ranked: bool = True


_FUNCTIONS: Mapping[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    "softmax": softmax,
    "sigmoid": sigmoid,
    "none": np.asarray,
}


def check(options: ClassifyOptions, manifest: Facts) -> None:
    check_top_k(options.top_k)
    windows.check(options, manifest)


def finish(
    rows: Sequence[Row],
    options: ClassifyOptions,
    labels: Labels,
    texts: Sequence[EncodedText] = (),
    check: Check = go_on,
) -> list[list[LabelScore]]:
    """The answer from the `logits`, float32 [classes], of each of the `texts`: inputs, or windows of inputs.

    Returns:
        For each input, its classes, best first or in the model's order. Of equal scores, the lower index comes first.
        For a regression, its values in the same way.
    """
    logits = np.stack([row[0] for row in rows]).astype(np.float64)
    names, problem = labels.names, labels.problem
    own = "none" if problem == "regression" else "sigmoid" if problem == "multi_label" or len(names) == 1 else "softmax"
    function = options.function or own
    scores = windows.pool(_FUNCTIONS[function](logits), texts, options)
    ranks = -scores if options.ranked else np.zeros_like(scores)
    order = np.argsort(ranks, axis=1, kind="stable")[:, : options.top_k]
    return [
        [LabelScore(names[index], float(row[index])) for index in best]
        for row, best in with_checks(zip(scores, order.tolist(), strict=True), check, _ROWS)
    ]


def _finish(work: Work[ClassifyOptions]) -> list[list[LabelScore]]:
    return finish(work.rows, work.options, present(work.manifest.labels), work.texts, work.check)


def _write(answer: Sequence[Sequence[LabelScore]], facts: Facts) -> Sequence[Any]:
    scores = floats([[entry.score for entry in classes] for classes in answer])
    return scores, [present(facts.labels).names[best] for best in scores.argmax(1).tolist()]


def _recorded(options: ClassifyOptions, facts: Facts, count: int) -> list[list[LabelScore]]:
    labels = facts.labels.names if facts.labels else ("score",)
    scores = [0.9412 if index == 0 else 0.0588 / (len(labels) - 1) for index in range(len(labels))]
    return [[LabelScore(*pair) for pair in zip(labels, scores, strict=True)][: options.top_k]] * count


def _summary(facts: Facts) -> str:
    labels = present(facts.labels)
    if labels.problem == "regression":
        return f"regression, {len(labels.names)} values"
    return f"{len(labels.names)} labels{', each for itself' if labels.problem == 'multi_label' else ''}"


def _answers(found: Any) -> list[Any]:  # noqa: ANN401  any JSON
    # `/predict` answers one text with a list of its classes, `/classify` with a list of that list.
    return [[(one["label"], one["score"]) for one in row] for row in replies.nested(found)]


def _after(_: Sequence[TextInput], lengths: Sequence[int], __: object, facts: Facts) -> int:
    return len(lengths) * size_of(facts, "logits")


_WAY: TaskRoute[ClassifyOptions, list[list[LabelScore]]] = TaskRoute(
    ClassifyOptions,
    "classify",
    _finish,
    check,
    windows.sizes_bytes,
    encode=windows.encode,
    after=_after,
    windows=windows.asked,
)

TASK = Task(
    way=_WAY,
    graph=(GraphOutput("logits", ("labels",)),),
    part="labels",
    head="ForSequenceClassification",
    texts=(1, 2),
    path="/classify",
    example={"inputs": "What a card!", "parameters": {"top_k": 1}},
    outputs=(Output("scores", "FP32", lambda facts: (size_of(facts, "logits"),)), Output("label", "BYTES")),
    write=_write,
    asked=lambda _: ClassifyOptions(ranked=False),
    recorded=_recorded,
    column=lambda _, __: ("labels", [LabelScore]),
    summary=_summary,
    load=LoadFormat(
        optional=("text_pair",),
        tensors=lambda item: {name: [item[name]] for name in ("text", "text_pair") if name in item},
        answers=_answers,
        row=lambda scores, label: [(label, score) for score in scores],
        check=replies.scored,
    ),
)
