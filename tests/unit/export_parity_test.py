from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from export import corpus, graph, optimize, parity
from export.checkpoint import open_checkpoint
from export.recipe import LIMITS
from export.source import find
from serving.bundle import digest
from serving.manifest import Invariance, Parity
from serving.records import EncodedText
from tests.support.checkpoints import write_checkpoint
from tests.support.specs import model_spec

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray


def text(length: int) -> EncodedText:
    """A text of so many tokens."""
    return EncodedText(array("i", [2, *range(10, 8 + length), 3]))


def parity_of(**figures: float) -> Parity:
    """Perfect figures but for the given ones."""
    good = {"max_abs_difference": 0.0, "cosine_mean": 1.0, "cosine_p01": 1.0, "cosine_min": 1.0}
    return Parity(texts=1, **{**good, **figures})


def test_cosine() -> None:
    """Rows are compared by direction; a vector of zeros is like nothing."""
    left = np.array([[1, 0], [1, 1], [0, 0]], np.float32)
    right = np.array([[9, 0], [-2, -2], [1, 1]], np.float32)
    np.testing.assert_allclose(parity.cosine(left, right), [1, -1, 0], atol=1e-12)


def test_every_text_is_run_in_every_plan() -> None:
    """Alone, padded and mixed, each text is there once; padding is to the bucket, mixing over all lengths."""
    texts = [text(length) for length in [*range(3, 60), 64, 64, 90, 100]]
    for plan in (parity._alone(texts), parity._padded(texts, 100), parity._mixed(texts)):
        assert sorted(index for indices, _ in plan for index in indices) == list(range(len(texts)))
    for indices, neighbours in parity._padded(texts, 100):
        longest = max(len(texts[index].ids) for index in indices)
        assert [len(neighbour.ids) for neighbour in neighbours] == [next(b for b in (16, 32, 64, 100) if b >= longest)]
        assert len(indices) + len(neighbours) <= 8
    for indices, _ in parity._mixed(texts):
        assert max(len(texts[i].ids) for i in indices) > 2 * min(len(texts[i].ids) for i in indices)


@pytest.mark.parametrize(
    ("precision", "figures", "words"),
    [
        ("fp32", {"max_abs_difference": 2e-4}, "0.0002, allowed 0.0001"),
        ("fp32", {"max_abs_difference": math.nan}, "nan, allowed 0.0001"),
        ("int8", {"cosine_mean": 0.98}, "0.9800, at least 0.99"),
        ("int8", {"cosine_min": 0.94}, "0.9400, at least 0.95"),
        ("int8", {"cosine_mean": math.nan}, "nan, at least 0.99"),
    ],
)
def test_a_broken_limit_is_named_with_its_figure(precision: str, figures: dict[str, float], words: str) -> None:
    """The sentence gives what was found and what is allowed; a figure that is not a number fails."""
    failure = parity._failure(parity_of(**figures), LIMITS[precision])
    assert failure is not None
    assert words in failure


def test_figures_at_the_limit_pass() -> None:
    """The limits themselves are allowed, and what a precision is not held to does not count."""
    assert parity._failure(parity_of(max_abs_difference=1e-4, cosine_mean=0.0), LIMITS["fp32"]) is None
    assert parity._failure(parity_of(max_abs_difference=9, cosine_mean=0.99, cosine_min=0.95), LIMITS["int8"]) is None


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
    assert parity._is_invariant(Invariance(8, difference, cosine), LIMITS[precision]) is expected


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[EncodedText], NDArray[np.float32]]:
    """A fused graph, texts, and PyTorch's answers to them."""
    folder = tmp_path_factory.mktemp("parity")
    checkpoint = open_checkpoint(find(str(write_checkpoint(folder / "small"))), None, [].append)
    embedder = graph.load(checkpoint)
    graph.write(embedder, folder / "raw.onnx")
    optimize.fuse(folder / "raw.onnx", folder / "model.onnx", layers=2, heads=4, hidden_size=32)
    texts = checkpoint.vocabulary.encode(corpus.read()[:40], 64)
    return folder / "model.onnx", texts, graph.answers(embedder, texts, threads=2, count=lambda _done, _total: None)


def verdict(path: Path, texts: list[EncodedText], reference: NDArray[np.float32]) -> parity.Verdict:
    """Compares an artifact under the limits of fp32."""
    spec = model_spec(
        path.name, size=32, path=str(path), sha256=digest(path), vocab_size=200, max_length=64, special_ids={"pad": 0}
    )
    return parity.verify(spec, texts, reference, LIMITS["fp32"], threads=1, count=lambda _done, _total: None)


def test_a_faithful_artifact_passes(small: tuple[Path, list[EncodedText], NDArray[np.float32]]) -> None:
    """The fused graph answers as PyTorch does, alone, padded and batched."""
    found = verdict(*small)
    assert found.failure is None
    assert found.batch_invariant
    assert 0 < found.parity.max_abs_difference < 1e-5
    assert found.parity.texts == found.invariance.texts == 40


def test_a_damaged_artifact_fails(small: tuple[Path, list[EncodedText], NDArray[np.float32]], tmp_path: Path) -> None:
    """One number of one weight, changed by a little, is found."""
    path, texts, reference = small
    model = onnx.load(path)
    weight = next(t for t in model.graph.initializer if t.name.endswith("layer.1.output.LayerNorm.bias"))
    values = numpy_helper.to_array(weight).copy()
    values[3] += 3e-4
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))
    onnx.save(model, tmp_path / "damaged.onnx")
    failure = verdict(tmp_path / "damaged.onnx", texts, reference).failure
    assert failure is not None
    assert failure.startswith("largest difference from PyTorch 0.0003, allowed 0.0001")


def test_numbers_that_are_not_finite_fail(
    small: tuple[Path, list[EncodedText], NDArray[np.float32]], tmp_path: Path
) -> None:
    """An artifact that answers NaN passes nothing."""
    path, texts, reference = small
    model = onnx.load(path)
    weight = next(t for t in model.graph.initializer if t.name.endswith("layer.1.output.LayerNorm.bias"))
    weight.CopyFrom(numpy_helper.from_array(np.full(32, np.nan, np.float32), weight.name))
    onnx.save(model, tmp_path / "nan.onnx")
    found = verdict(tmp_path / "nan.onnx", texts, reference)
    assert found.failure is not None
    assert not found.batch_invariant


def test_the_corpus_is_large_and_varied() -> None:
    """At least 256 texts, with pairs, from one word to hundreds."""
    texts = corpus.read()
    assert len(texts) >= 256
    assert any(isinstance(entry, tuple) for entry in texts)
    lengths = sorted(len(entry.split()) for entry in texts if isinstance(entry, str))
    assert lengths[0] <= 2
    assert lengths[-1] >= 200
