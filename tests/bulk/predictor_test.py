from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from bertserve.serving.bulk.errors import BatchError
from bertserve.serving.bulk.predictor import BatchPredictor, Model, Predictor
from bertserve.serving.tasks.embed import EmbedOptions

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.tasks import TinyModel

WORDS = ["it", "is", "a", "text", "and", "not", "on", "the", "server"]
TEXTS = [" ".join(WORDS[: 1 + number % len(WORDS)]) for number in range(40)]
PAIRS = [("what is in the text", text) for text in TEXTS]
CLOSE = 1e-5


@pytest.fixture(scope="module")
def predictor(tasks_repository: Path) -> Predictor:
    return Predictor(Model(tasks_repository, "embed", threads=2))


def test_vectors_are_those_of_pytorch(predictor: Predictor, tiny_models: dict[str, TinyModel]) -> None:
    """In the order of the texts, whatever their lengths."""
    tiny = tiny_models["embed"]
    for text, prediction in zip(TEXTS, predictor.predict(TEXTS), strict=True):
        with torch.inference_mode():
            expected = tiny.model(**tiny.tokenizer(text, return_tensors="pt")).last_hidden_state[0, 0]
        np.testing.assert_allclose(prediction.answer, expected / expected.norm(), atol=1e-4)
        assert prediction.tokens == len(tiny.tokenizer(text).input_ids)


def test_the_same_texts_give_the_same_bits(predictor: Predictor) -> None:
    """Lanes take batches as they come; what they answer does not depend on it."""
    first = [each.answer.tobytes() for each in predictor.predict(TEXTS)]
    for _ in range(3):
        assert [each.answer.tobytes() for each in predictor.predict(TEXTS)] == first


@pytest.mark.parametrize("task", ["embed_tokens", "embed_sparse", "classify", "rerank", "answer", "tag", "fill_mask"])
def test_every_task_answers_a_row_as_it_does_alone(task: str, tasks_repository: Path) -> None:
    """Batches change nothing, and Arrow holds each answer."""
    model = Model(tasks_repository, task, threads=2)
    predictor = Predictor(model)
    rows: list[Any] = PAIRS if task in {"rerank", "answer"} else TEXTS
    rows = [f"{row} [MASK]" for row in rows] if task == "fill_mask" else rows
    together = model.column.array([each.answer for each in predictor.predict(rows)])
    alone = model.column.array([predictor.predict([row])[0].answer for row in rows])
    assert together.type == model.column.type
    assert len(together) == len(rows)
    same(together.to_pylist(), alone.to_pylist())


def same(found: Any, expected: Any) -> None:
    """Compares lists, records and numbers; numbers within what float32 allows."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        found, expected = list(found.values()), list(expected.values())
    if isinstance(expected, list):
        for left, right in zip(found, expected, strict=True):
            same(left, right)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-3, abs=CLOSE)
    else:
        assert found == expected


def test_rows_without_an_answer_say_why(predictor: Predictor) -> None:
    found = predictor.predict(["a text", None, 5, "server " * 100, "\ud800"])
    assert [bool(each.reason) for each in found] == [False, True, True, True, True]
    assert [each.reason for each in found[1:3]] == ["null", "not a string but int"]
    assert found[3].reason == "the text has 102 tokens; the model takes 64: shorten it or allow truncation"
    assert found[4].reason == "not valid Unicode"


def test_long_texts_are_cut_where_that_is_asked_for(tasks_repository: Path) -> None:
    """To what the model takes."""
    (found,) = Predictor(Model(tasks_repository, "embed", truncate=True, threads=1)).predict(["server " * 100])
    assert (found.reason, found.tokens) == ("", 64)


def test_a_text_that_breaks_the_engine_costs_no_other(tasks_repository: Path) -> None:
    """A batch that fails is run again text by text, and what is not finite is rejected."""
    word = Model(tasks_repository, "embed").encode("server")[0].ids[1]
    other = Model(tasks_repository, "embed").encode("text")[0].ids[1]
    faults = f"{word}:raise,{other}:nan"
    predictor = Predictor(Model(tasks_repository, "embed", engine="fake", threads=1, fake_faults=faults))
    found = predictor.predict(["it is", "the server", "a text", "and not"])
    assert [each.reason.partition(":")[0] for each in found] == [
        "",
        "the engine failed",
        "the model returned NaN or infinity",
        "",
    ]


def test_ray_gets_columns_with_nulls_for_what_is_rejected(tasks_repository: Path, predictor: Predictor) -> None:
    """`map_batches` hands over tables of Arrow."""
    table = pa.table({"body": ["a text", None, "the server"], "other": [1, 2, 3]})
    found = BatchPredictor("body", models=tasks_repository, task="embed", threads=1)(table)
    assert found.column_names == ["body", "other", "embedding", "error"]
    assert found["error"].to_pylist() == [None, "null", None]
    expected = [each.answer.tolist() for each in predictor.predict(["a text", "the server"])]
    first, none, last = found["embedding"].to_pylist()
    assert none is None
    np.testing.assert_allclose([first, last], expected, atol=CLOSE)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"task": "sing"}, 'unknown task "sing"'),
        ({"model": "none"}, "unknown model"),
        ({"options": {"dimensons": 3}}, 'unknown field "dimensons"; did you mean "dimensions"'),
        ({"options": {"output_dimension": 8}}, "`output_dimension`"),
        ({"options": {"dimensions": "many"}}, "Expected `int"),
        ({"options": {"dimensions": 900}}, "1 to 32"),
        ({"prompt_name": "none"}, "unknown `prompt_name`"),
        ({"engine": "steam"}, "engine"),
    ],
)
def test_what_a_model_cannot_do_is_said(wrong: dict[str, Any], message: str, tasks_repository: Path) -> None:
    with pytest.raises(BatchError, match=message):
        Model(tasks_repository, **({"task": "embed"} | wrong))
    kept = Model(
        tasks_repository, "embed", options={"dimensions": None, "top_k": 3, "truncation": True, "normalize": False}
    )
    assert (kept.options, kept.ignored) == (EmbedOptions(normalize=False), "top_k, truncation")
    with pytest.raises(BatchError, match="reads 1 column of text, not 2"):
        Model(tasks_repository, "embed").check_columns(2)
