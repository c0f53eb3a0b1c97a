"""The tasks `classify` and `rerank`: from logits to classes and scores."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertserve.serving.tasks import classify, rerank
from bertserve.serving.tasks.classify import ClassifyOptions
from bertserve.serving.tasks.parts import Labels, Problem
from bertserve.serving.tasks.rerank import RerankOptions

LABELS = ("calm", "glad", "sad")


def scores(
    values: list[float],
    options: ClassifyOptions | None = None,
    problem: Problem = "single_label",
) -> dict[str, float]:
    row = (np.array(values, np.float32),)
    labels = Labels(LABELS[: len(values)], problem)
    (answer,) = classify.finish([row], options or ClassifyOptions(), labels)
    return {entry.label: entry.score for entry in answer}


@pytest.mark.parametrize("values", [[-100.0, 50.0, 0.0], [1e4, -1e4, 0.0], [-3e38, 3e38, 0.0]])
@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
def test_no_logit_overflows(values: list[float], function: str) -> None:
    """Whatever a model answers, scores lie between 0 and 1 (warnings are errors here)."""
    found = scores(values, ClassifyOptions(function))  # type: ignore[arg-type]
    assert all(0 <= score <= 1 for score in found.values())
    assert next(iter(found)) == LABELS[int(np.argmax(values))]


@pytest.mark.parametrize(
    ("values", "options", "problem", "expected"),
    [
        ([0.0, 0.0, 0.0], None, "multi_label", dict.fromkeys(LABELS, 0.5)),
        ([-3.5], None, "regression", {"calm": -3.5}),
        ([-3.5, 40.0], None, "regression", {"glad": 40.0, "calm": -3.5}),
        ([0.0], None, "single_label", {"calm": 0.5}),
        ([1.0, 3.0, 2.0], ClassifyOptions("none"), "single_label", {"glad": 3.0, "sad": 2.0, "calm": 1.0}),
        ([0.0, 0.0, 0.0], ClassifyOptions("sigmoid"), "single_label", dict.fromkeys(LABELS, 0.5)),
        ([0.0, 0.0, 0.0], ClassifyOptions(top_k=2), "single_label", {"calm": 1 / 3, "glad": 1 / 3}),
    ],
    ids=[
        *("each class of a multi-label model by itself", "one value as it is", "values as they are"),
        *("a single class by a sigmoid", "logits asked for", "a sigmoid asked for", "the best beside all others"),
    ],
)
def test_what_logits_become(
    values: list[float], options: ClassifyOptions | None, problem: Problem, expected: dict[str, float]
) -> None:
    """By the model's kind, unless the request chooses: what it says wins. `top_k` keeps the best of all."""
    found = scores(values, options, problem)
    assert found == pytest.approx(expected)
    assert list(found) == list(expected)


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_rerank_scores_lie_between_0_and_1(logit: float) -> None:
    """The sigmoid of any logit, unless the logit itself is asked for."""
    row = (np.array([logit], np.float32),)
    (score,) = rerank.finish([row], RerankOptions())
    assert 0 <= score <= 1
    if abs(logit) < 500:
        assert score == pytest.approx(1 / (1 + np.exp(-logit)))
    assert rerank.finish([row], RerankOptions(raw_scores=True)) == [logit]
