"""The tasks' metrics by cases computed by hand, and the files that they are read from."""

from __future__ import annotations

import json
import math
from array import array
from typing import TYPE_CHECKING

import numpy as np
import pytest

from bertserve.export.errors import ExportError
from bertserve.export.tasks import EXPORTS, metrics
from bertserve.export.tasks.answer import best_span
from bertserve.export.tasks.decisions import DecisionComparator, order_agreement
from bertserve.serving.records import EncodedText, Row
from bertserve.serving.tasks import TASKS
from bertserve.serving.tasks.parts import Labels, Problem
from tests.support.checkpoints import write_checkpoint
from tests.support.exports import opened

if TYPE_CHECKING:
    from pathlib import Path

    from bertserve.export.checkpoint.vocabulary import Vocabulary


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ([1, 2, 3], [10, 20, 30], 100),
        ([1, 2, 3], [9, 8, 7], -100),
        # Ranks 1, 2.5, 2.5, 4 and 1, 2, 3, 4: covariance 4.5, variances 4.5 and 5.
        ([3, 5, 5, 9], [1, 2, 3, 4], 100 * 4.5 / math.sqrt(4.5 * 5)),
        # A model that answers the same to everything keeps no limit.
        ([1, 1, 1], [1, 2, 3], math.nan),
    ],
)
def test_spearman(left: list[float], right: list[float], expected: float) -> None:
    """Correlation of ranks; equal values share the mean of theirs."""
    assert metrics.spearman(left, right) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("found", "wanted", "exact", "f1"),
    [
        ("The Eiffel Tower!", ["eiffel tower"], 100, 100),
        ("in 1889", ["1889", "in the year 1889"], 0, 80),  # 2 of 2 and 2 of 3 words
        ("Paris", ["London"], 0, 0),
        ("", ["London"], 0, 0),
        ("a b b", ["b b c"], 0, 80),  # the article goes: 2 shared words of 2 and 3
    ],
)
def test_answers_are_compared_as_squad_does(found: str, wanted: list[str], exact: float, f1: float) -> None:
    """Case, articles and punctuation do not count; the best of several right answers does."""
    assert metrics.answers([found], [wanted]) == pytest.approx((exact, f1))


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        (["O", "B-x", "I-x", "O"], {(1, 2, "x")}),
        (["B-x", "B-x"], {(0, 0, "x"), (1, 1, "x")}),
        (["I-x", "I-y", "I-y"], {(0, 0, "x"), (1, 2, "y")}),
        (["B-x", "O", "I-x"], {(0, 0, "x"), (2, 2, "x")}),
        (["B-creative-work", "I-creative-work"], {(0, 1, "creative-work")}),
        ([], set()),
    ],
)
def test_entities(tags: list[str], expected: set[tuple[int, int, str]]) -> None:
    """An entity goes from its B- to its last I- of the same type; a stray I- begins one."""
    assert metrics.entities(tags) == expected


def test_entity_f1() -> None:
    """One of two entities found, and one that is none: precision and recall one half."""
    assert metrics.entity_f1([["B-x", "O", "B-y"]], [["B-x", "O", "B-x"]]) == pytest.approx(50)
    assert metrics.entity_f1([["O"]], [["O"]]) == 0


@pytest.mark.parametrize(
    ("start", "end", "longest", "expected"),
    [
        ([0, 5, 0], [0, 0, 5], 30, (1, 2)),
        ([0, 0, 5], [5, 0, 1], 30, (2, 2)),
        ([5, 0, 0], [0, 1, 5], 2, (0, 1)),
        ([], [], 30, (0, 0)),
    ],
)
def test_the_best_span(start: list[float], end: list[float], longest: int, expected: tuple[int, int]) -> None:
    """It ends where it starts or later, and is not longer than allowed."""
    assert best_span(np.array(start, np.float32), np.array(end, np.float32), longest) == expected


def test_the_order_of_scores() -> None:
    """Only scores that differ clearly have an order: here two of three pairs do, one of which is turned round."""
    wanted = np.array([0.0, 10.0, 10.1])
    assert order_agreement(np.array([1.0, 2.0, 0.0]), wanted) == 0.5
    assert order_agreement(np.array([0.0, 3.0, 2.0]), wanted) == 1


def text(*ids: int) -> EncodedText:
    return EncodedText(array("i", ids))


def comparator(task: str, problem: Problem = "single_label") -> DecisionComparator:
    """A comparator of three labels; 1 pads, 2 separates, 0 begins, 4 masks."""
    ids = {"pad": 1, "cls": 0, "sep": 2, "mask": 4}
    outputs = TASKS[task].graph_outputs(hidden_size=2, labels=3, candidates=2, active=3)
    return EXPORTS[task].comparator(outputs, ids, problem)


def floats(*values: object) -> np.ndarray:
    return np.array(values, np.float32)


def test_each_token_must_point_where_pytorchs_does() -> None:
    """One token that is off shows, however many others are right and however long their vectors are."""
    wanted = floats([100, 0], [0, 100], [1, 0], [50, 50])
    assert comparator("embed_tokens").cosine((wanted,), (wanted * 2,)) == pytest.approx(1)
    found = wanted.copy()
    found[2] = [0, 1]
    assert comparator("embed_tokens").cosine((found,), (wanted,)) == pytest.approx(0)
    assert comparator("tag").cosine((found,), (wanted,)) > 0.99


def test_weights_are_compared_word_by_word() -> None:
    """A word that is missing is 0 in a row with room, and as small as the smallest weight in a full one."""
    sparse = comparator("embed_sparse")
    row, other = (np.array([7, 3, 9], np.int32), floats(3, 1, 0)), (np.array([3, 7, 4], np.int32), floats(2, 1, 0.5))
    found, wanted = sparse.pair(row, row)
    np.testing.assert_array_equal(found, wanted)
    found, wanted = sparse.pair(row, other)
    np.testing.assert_array_equal(found, [1, 0, 3, 0])  # of 3, 4, 7, 9
    np.testing.assert_array_equal(wanted, [1.5, 0, 0.5, 0])
    assert sparse.cosine(row, row) == pytest.approx(1)
    assert sparse.cosine(row, other) == pytest.approx(5 / (10 * 5.25) ** 0.5)


AGREEMENTS: list[tuple[DecisionComparator, Row, Row, EncodedText, float]] = [
    (comparator("classify"), (floats(1, 2, 0),), (floats(0, 9, 8),), text(0, 5, 2), 1),
    (comparator("classify"), (floats(1, 2, 0),), (floats(3, 2, 0),), text(0, 5, 2), 0),
    (comparator("classify", "multi_label"), (floats(1, -2, 3),), (floats(1, 2, 3),), text(0, 5, 2), 2 / 3),
    # The frame's tags are nobody's.
    (comparator("tag"), (np.eye(3, dtype=np.float32),), (np.eye(3, dtype=np.float32)[[1, 1, 0]],), text(0, 5, 2), 1),
    (
        comparator("fill_mask"),
        (np.array([[7, 8], [9, 8]], np.int32), floats([1, 0], [1, 0]), floats(1, 1)),
        (np.array([[7, 9], [8, 9]], np.int32), floats([1, 0], [1, 0]), floats(1, 1)),
        text(0, 4, 4, 2),
        0.5,
    ),
    # Of the words that have a weight; the order does not matter, and what fills the row does not count.
    (
        comparator("embed_sparse"),
        (np.array([8, 7, 3], np.int32), floats(2, 1, 0)),
        (np.array([7, 9, 8], np.int32), floats(2, 1, 0)),
        text(0, 5, 2),
        0.5,
    ),
    (
        comparator("embed_sparse"),
        (np.array([8, 7, 3], np.int32), floats(1, 0, 0)),
        (np.array([7, 9, 8], np.int32), floats(0, 0, 0)),
        text(0, 5, 2),
        1,
    ),
    # The question's logits, however large, are not looked at.
    (
        comparator("answer"),
        (floats(9, 9, 0, 1, 0, 0), floats(0, 0, 0, 0, 1, 0)),
        (floats(0, 0, 0, 1, 0, 0), floats(9, 9, 0, 0, 1, 9)),
        text(0, 5, 2, 6, 7, 2),
        1,
    ),
    # Another span is as good as the best where the wanted logits are apart by no more than a step of fp16.
    (
        comparator("answer"),
        (floats(0, 0, 0, 0, 1, 0), floats(0, 0, 0, 0, 1, 0)),
        (floats(0, 0, 0, 1, 1 - 2**-11, 0), floats(0, 0, 0, 1, 1 - 2**-11, 0)),
        text(0, 5, 2, 6, 7, 2),
        1,
    ),
    (
        comparator("answer"),
        (floats(0, 0, 0, 0, 1, 0), floats(0, 0, 0, 0, 1, 0)),
        (floats(0, 0, 0, 1, 0.99, 0), floats(0, 0, 0, 1, 0.99, 0)),
        text(0, 5, 2, 6, 7, 2),
        0,
    ),
    (
        comparator("answer"),
        (floats(0, 1, 0, 0), floats(0, 1, 0, 0)),
        (floats(0, 1, 0, 0), floats(0, 1, 0, 0)),
        text(0, 5, 2, 2),
        1,
    ),
]


@pytest.mark.parametrize(("reader", "found", "wanted", "of", "expected"), AGREEMENTS)
def test_decisions_are_compared(
    reader: DecisionComparator, found: Row, wanted: Row, of: EncodedText, expected: float
) -> None:
    """What a user of the task would see is what agrees or does not."""
    assert reader.agreement([found], [wanted], [of]) == pytest.approx(expected)


def test_what_padding_added_is_cut_off() -> None:
    """Rows are as long as their texts, and as many as their masks."""
    texts = [text(0, 4, 2), text(0, 4, 4, 5, 2)]
    (short, long) = comparator("tag").rows([np.zeros((2, 5, 3), np.float32)], texts)
    assert (short[0].shape, long[0].shape) == ((3, 3), (5, 3))
    arrays = [np.zeros((2, 2, 2), np.int32), np.zeros((2, 2, 2), np.float32), np.zeros((2, 2), np.float32)]
    rows = comparator("fill_mask").rows(arrays, texts)
    assert [[part.shape for part in row] for row in rows] == [[(1, 2), (1, 2), (1,)], [(2, 2), (2, 2), (2,)]]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    folder = write_checkpoint(tmp_path_factory.mktemp("words") / "small")
    return opened(folder).vocabulary


FILES: list[tuple[str, str, str, list[tuple], dict[str, float]]] = [
    (
        "embed",
        "pairs.csv",
        '"it, is",the,1\nthe,server,2\n',
        [(floats(1, 0),), (floats(1, 1),), (floats(0, 1),)],
        # Both pairs have the same cosine, so there is no order.
        {"spearman": math.nan},
    ),
    ("rerank", "pairs.tsv", 'a "b\tc\t1\nd\te\t2\n', [(floats(5),), (floats(6),)], {"spearman": 100}),
    ("classify", "t.tsv", "it\tgood\nthe\t0\n", [(floats(0, 0, 1),), (floats(0, 1, 0),)], {"accuracy": 50}),
    ("classify", "t.tsv", "it\tis\tgood\n", [(floats(0, 0, 1),)], {"accuracy": 100}),
    (
        "tag",
        "t.conll",
        "the\tO\nserver's\tB-x,B-y\n\nit\tO\n",
        # [CLS] the server ' s [SEP]; the first token of a word carries its tag.
        [(np.eye(3, dtype=np.float32)[[0, 0, 2, 0, 0, 0]],), (np.eye(3, dtype=np.float32)[[0, 0, 0]],)],
        {"entity_f1": 100},
    ),
    (
        "fill_mask",
        "t.tsv",
        "the [MASK] is\tserver\n",
        [(np.array([[150, 3]], np.int32), floats([1, 0]), floats(1))],
        {"accuracy": 0},
    ),
    (
        "answer",
        "q.json",
        json.dumps(
            {
                "data": [
                    {
                        "paragraphs": [
                            {
                                "context": "The server is it.",
                                "qas": [{"question": "What", "answers": [{"text": "server is"}]}],
                            }
                        ]
                    }
                ]
            }
        ),
        # [CLS] w ##h ##a ##t [SEP] the server is it . [SEP]
        [(floats(*[9] * 6, 0, 5, 0, 0, 0, 0), floats(*[9] * 6, 0, 0, 5, 0, 0, 9))],
        {"exact_match": 100, "f1": 100},
    ),
]


@pytest.mark.parametrize(("task", "name", "content", "rows", "expected"), FILES)
def test_a_file_of_labelled_text_is_scored(
    tmp_path: Path,
    vocabulary: Vocabulary,
    task: str,
    name: str,
    content: str,
    rows: list[Row],
    expected: dict[str, float],
) -> None:
    """Each task's file is read in its usual format, run, and judged by the task's own metric."""
    (tmp_path / name).write_text(content)
    labels = ("O", "B-y", "B-x") if task == "tag" else ("bad", "fair", "good")
    examples = EXPORTS[task].reader(task, vocabulary, 64, Labels(labels)).read(tmp_path / name)
    assert len(examples.texts) == len(rows)
    assert examples.score(rows) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("task", "name", "content", "sentence"),
    [
        ("classify", "t.tsv", "it\tsplendid\n", "no label 'splendid'"),
        ("classify", "t.tsv", "it\t7\n", "no label '7'"),
        ("classify", "t.tsv", "", "has no examples"),
        ("embed", "t.csv", "it,is\n", "not labeled texts for the task embed"),
        ("embed", "t.csv", "it,is,much\n", "not labeled texts"),
        ("tag", "t.conll", "it\tB-thing\n", "no tag 'B-thing'"),
        ("answer", "t.json", "[]", "not labeled texts"),
        ("answer", "t.json", "{", "not labeled texts"),
        ("fill_mask", "t.tsv", "the server\tis\n", "must have exactly one mask token"),
        # The system's own words.
        ("embed", "absent.csv", None, r"absent\.csv: No such file"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(
    tmp_path: Path, vocabulary: Vocabulary, task: str, name: str, content: str | None, sentence: str
) -> None:
    """Before the export begins its work, in one sentence that names the file."""
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ExportError, match=sentence) as refused:
        EXPORTS[task].reader(task, vocabulary, 64, Labels(("bad", "O", "good"))).read(tmp_path / name)
    assert name in str(refused.value)


def test_words_beyond_the_longest_input_have_no_tag(tmp_path: Path, vocabulary: Vocabulary) -> None:
    """A sentence that is cut counts as tagged O from there on."""
    (tmp_path / "t.conll").write_text("it\tB-x\n" * 9)
    examples = EXPORTS["tag"].reader("tag", vocabulary, 6, Labels(("O", "B-x"))).read(tmp_path / "t.conll")
    assert len(examples.texts[0].ids) == 6
    # Four of nine are found, all of them right.
    assert examples.score([(floats(*[[0, 1]] * 6),)]) == {"entity_f1": pytest.approx(200 * 4 / 13)}
