from __future__ import annotations

import math
from array import array
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from bertserve.export import build
from bertserve.export.graph import editor, task_model
from bertserve.export.proof import parity
from bertserve.export.proof.engine import open_engine
from bertserve.export.recipe import Recipe
from bertserve.export.tasks import EXPORTS, decisions
from bertserve.export.texts import corpus
from bertserve.serving.models.manifest import Accuracy, Invariance, Parity
from bertserve.serving.records import EncodedText
from tests.support.checkpoints import write_checkpoint
from tests.support.exports import fused, ignore, opened


def text(length: int) -> EncodedText:
    return EncodedText(array("i", [2, *range(10, 8 + length), 3]))


def parity_of(**figures: float | None) -> Parity:
    """Perfect figures but for the given ones."""
    good = {"max_abs_difference": 0.0, "cosine_mean": 1.0, "cosine_p01": 1.0, "cosine_min": 1.0}
    return Parity(texts=1, **{**good, **figures})


def broken(precision: str, task: str = "embed", **figures: float | None) -> dict[str, str]:
    return parity.broken_limits(parity_of(**figures), EXPORTS[task].limits[precision])


@pytest.mark.parametrize(
    ("left", "right", "expected"), [([1, 0], [9, 0], 1), ([1, 1], [-2, -2], -1), ([0, 0], [1, 1], 0)]
)
def test_cosine(left: list[float], right: list[float], expected: float) -> None:
    """Vectors are compared by direction; a vector of zeros is like nothing."""
    assert decisions.cosine(np.array(left, float), np.array(right, float)) == pytest.approx(expected)


def test_every_text_is_run_in_company() -> None:
    """Each probe is there once, padded to its bucket by a neighbour, beside others of other lengths."""
    texts = [text(length) for length in [*range(3, 60), 64, 64, 90, 100]]
    plan = parity._in_company(texts, 100)
    assert sorted(index for indices, _ in plan for index in indices) == list(range(len(texts)))
    for indices, neighbours in plan:
        longest = max(len(texts[index].ids) for index in indices)
        assert [len(neighbour.ids) for neighbour in neighbours] == [next(b for b in (16, 32, 64, 100) if b >= longest)]
        assert len(indices) + len(neighbours) <= 8
        assert longest > min(len(texts[index].ids) for index in indices)


def test_long_texts_are_cut_and_some_stay_whole() -> None:
    """Company is proven on every text, the long ones cut with their last token kept, and on each bucket's longest."""
    texts = [text(length) for length in (5, 30, 16, 17, 70, 100)]
    probes = parity._probes(texts, 100)
    assert [len(probe.ids) for probe in probes.texts] == [5, 16, 16, 16, 16, 16, 30, 100]
    assert {probe.ids[-1] for probe in probes.texts} == {3}
    assert probes.rows(["a", "b", "c", "d", "e", "f"], ["B", "D", "E", "F"]) == ["a", "B", "c", "D", "E", "F", "b", "f"]


@pytest.mark.parametrize(
    ("precision", "task", "figures", "name", "words"),
    [
        ("fp32", "embed", {"max_abs_difference": 2e-4}, "max_abs_difference", "0.0002, allowed 0.0001"),
        ("fp32", "tag", {"max_abs_difference": math.nan}, "max_abs_difference", "nan, allowed 0.0001"),
        ("fp32", "tag", {"agreement": 0.9}, "agreement", "0.9000, at least 0.999"),
        ("fp16", "embed", {"cosine_min": 0.9998}, "cosine_min", "0.9998, at least 0.9999"),
        ("int8", "embed", {"cosine_mean": 0.98}, "cosine_mean", "0.9800, at least 0.99"),
        ("int8", "embed", {"cosine_min": 0.94}, "cosine_min", "0.9400, at least 0.95"),
        ("int8", "answer", {"cosine_mean": math.nan}, "cosine_mean", "nan, at least 0.98"),
        ("int8", "classify", {"agreement": 0.94}, "agreement", "0.9400, at least 0.95"),
    ],
)
def test_a_broken_limit_is_named_with_its_figure(
    precision: str, task: str, figures: dict[str, float], name: str, words: str
) -> None:
    """The sentence gives what was found and what is allowed; a figure that is not a number fails."""
    found = broken(precision, task, **figures)
    assert list(found) == [name]
    assert words in found[name]


def test_figures_move_as_those_of_the_sample_did() -> None:
    """What 16 texts lost is lost of the whole; the worst text of both counts, and what is not a number stays so."""
    proven = parity_of(cosine_mean=0.9915, cosine_p01=0.98, cosine_min=0.96, agreement=0.97, max_abs_difference=0.2)
    before = parity_of(cosine_mean=0.995, cosine_p01=0.99, cosine_min=0.99, agreement=1.0, max_abs_difference=0.1)
    now = parity_of(cosine_mean=0.993, cosine_p01=0.98, cosine_min=0.94, agreement=0.9375, max_abs_difference=0.3)
    found = parity.elsewhere(proven, before, now)
    assert found.cosine_mean == pytest.approx(0.9895)
    assert found.agreement == pytest.approx(0.9075)
    assert (found.cosine_min, found.max_abs_difference) == (0.94, 0.3)
    assert set(parity.broken_limits(found, EXPORTS["embed"].limits["int8"])) == {
        "cosine_mean",
        "cosine_p01",
        "cosine_min",
    }
    assert set(parity.broken_limits(found, EXPORTS["classify"].limits["int8"])) == {"agreement"}
    lost = parity.elsewhere(proven, before, parity_of(cosine_mean=math.nan, cosine_min=math.nan, agreement=None))
    assert set(parity.broken_limits(lost, EXPORTS["embed"].limits["int8"])) == {"cosine_mean", "cosine_min"}


def test_the_same_answers_keep_the_limits_wherever_the_sample_lies() -> None:
    """An artifact near its limits whose 16 texts are worse than the others, and one whose proof has no sample."""
    proven, sample = parity_of(cosine_mean=0.9901, cosine_min=0.951), parity_of(cosine_mean=0.98, cosine_min=0.951)
    for before in (sample, None):
        assert parity.broken_limits(parity.elsewhere(proven, before, sample), EXPORTS["embed"].limits["int8"]) == {}


def test_figures_at_the_limit_pass() -> None:
    """The limits themselves are allowed; what a precision is not held to, and what is not measured, does not count."""
    assert broken("fp32", max_abs_difference=1e-4, cosine_mean=0.0) == {}
    assert broken("int8", max_abs_difference=9, cosine_mean=0.99, cosine_p01=0.975, cosine_min=0.95) == {}
    assert broken("fp16", "rerank", cosine_mean=None, cosine_p01=None, cosine_min=None) == {}


@pytest.mark.parametrize(("artifact", "breaks"), [(81.6, False), (81.4, True), (math.nan, True), (90.0, False)])
def test_points_lost_are_limited(artifact: float, *, breaks: bool) -> None:
    """The task's own metric may fall by half a point in INT8; rising is no fault, and no number is none."""
    figure = Accuracy("spearman", "file.csv", 100, 82.0, artifact)
    assert bool(parity.broken_accuracy([figure], EXPORTS["embed"].limits["int8"])) is breaks


@pytest.mark.parametrize(
    ("limits", "form", "expected"),
    [
        ({}, "int8", 0.95),
        ({"cosine_min": 0.5}, "int8", 0.5),
        ({"cosine_min": 0.5, "int8.cosine_min": 0.6}, "int8", 0.6),
        ({"int8.cosine_min": 0.6}, "int8-openvino", 0.95),
    ],
)
def test_limits_are_set_by_the_recipe(limits: dict[str, float], form: str, expected: float) -> None:
    """For every artifact, or for one of them, which wins."""
    assert Recipe("x", Path(), limits=limits).limits_of(form, "embed").cosine_min == expected


@pytest.mark.parametrize(
    ("precision", "difference", "cosine", "expected"),
    [
        ("fp32", 1e-4, 0.5, True),
        ("fp32", 1.1e-4, 1.0, False),
        ("fp32", math.nan, 1.0, False),
        ("int8", 0.5, 0.999, True),
        ("int8", 0.0, 0.9989, False),
    ],
)
def test_batch_invariance(precision: str, difference: float, cosine: float, *, expected: bool) -> None:
    """fp32 is judged by the largest difference, INT8 by the least cosine."""
    assert parity._is_invariant(Invariance(8, difference, cosine), EXPORTS["embed"].limits[precision]) is expected


class Small:
    """A fused graph, texts, and PyTorch's answers to them."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint = opened(write_checkpoint(folder / "small"))
        model = task_model.load(self.checkpoint)
        self.path = folder / "model.onnx"
        editor.copy(fused(self.checkpoint, folder, model), self.path)
        texts = corpus.read()[:40]
        encoded = self.checkpoint.vocabulary.encode(texts, 64)
        rows = task_model.answers(model, encoded, threads=2, count=ignore)
        self.reference = parity.Reference(texts, encoded, rows)

    def verdict(self, path: Path) -> parity.Verdict:
        """Compares an artifact under the limits of fp32."""
        spec = task_model.spec_of(self.checkpoint, path)
        return parity.verify(
            open_engine(spec, "cpu", 1),
            build.comparator_of(self.checkpoint),
            self.reference,
            {"embed": EXPORTS["embed"].limits["fp32"]},
            max_length=64,
            count=ignore,
        )


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return Small(tmp_path_factory.mktemp("parity"))


def test_a_faithful_artifact_passes(small: Small) -> None:
    """The fused graph answers as PyTorch does, alone, padded and batched."""
    found = small.verdict(small.path)
    assert found.broken == {}
    assert found.parity.agreement is None
    assert found.parity.worst
    assert found.batch_invariant
    assert 0 < found.parity.max_abs_difference < 1e-5
    assert found.parity.texts == found.invariance.texts == 40


@pytest.mark.parametrize(
    ("amount", "sentence", "invariant"),
    [
        pytest.param(3e-4, "largest difference from PyTorch 0.0003, allowed 0.0001", True, id="a-little"),
        pytest.param(math.nan, "largest difference from PyTorch nan, allowed 0.0001", False, id="nan"),
    ],
)
def test_a_damaged_artifact_fails(
    small: Small, tmp_path: Path, amount: float, sentence: str, *, invariant: bool
) -> None:
    """One number of one weight, changed by a little or into none, is found."""
    model = onnx.load(small.path)
    weight = next(t for t in model.graph.initializer if t.name.endswith("layer.1.output.LayerNorm.bias"))
    values = numpy_helper.to_array(weight).copy()
    values[3] += amount
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))
    onnx.save(model, tmp_path / "damaged.onnx")
    found = small.verdict(tmp_path / "damaged.onnx")
    assert found.broken["max_abs_difference"].startswith(sentence)
    assert found.batch_invariant is invariant


def test_the_corpus_is_large_and_varied() -> None:
    """At least 256 texts, with pairs, from one word to hundreds."""
    texts = corpus.read()
    assert len(texts) >= 256
    assert any(isinstance(entry, tuple) for entry in texts)
    lengths = sorted(len(entry.split()) for entry in texts if isinstance(entry, str))
    assert lengths[0] <= 2
    assert lengths[-1] >= 200
