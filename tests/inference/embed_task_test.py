from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from bertserve.serving.inference.tokenizer import TextTokenizer
from bertserve.serving.models.bundle import open_bundle
from bertserve.serving.records import EncodedChunk
from bertserve.serving.tasks import chunks, embed
from bertserve.serving.tasks.base import Work
from bertserve.serving.tasks.chunks import ChunkOptions
from bertserve.serving.tasks.embed import EmbedOptions
from tests.support.specs import parts

if TYPE_CHECKING:
    from pathlib import Path

pooled_outputs = arrays.arrays(
    np.float32,
    st.tuples(st.integers(1, 5), st.integers(1, 12)),
    elements=st.floats(-1e3, 1e3, width=32, allow_subnormal=False),
)


def rows(pooled: np.ndarray) -> list[tuple[np.ndarray]]:
    return [(row,) for row in pooled]


@given(pooled_outputs, st.booleans(), st.integers(1, 12))
@settings(derandomize=True, max_examples=300, deadline=None)
def test_the_answer_is_what_plain_numpy_says(pooled: np.ndarray, normalize: bool, dimensions: int) -> None:  # noqa: FBT001  drawn
    """Cut first, then scaled, in float32, with rows that lie one after another in memory."""
    cut = min(dimensions, pooled.shape[1])
    expected = pooled[:, :cut].astype(np.float64)
    if normalize:
        expected = expected / np.maximum(np.linalg.norm(expected, axis=1, keepdims=True), 1e-12)
    found = embed.finish(rows(pooled), EmbedOptions(normalize, cut), normalize=True)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert found.dtype == np.float32
    assert found.flags.c_contiguous


@given(pooled_outputs)
@settings(derandomize=True, max_examples=50, deadline=None)
def test_the_engines_rows_are_not_changed(pooled: np.ndarray) -> None:
    """They may be views of what other requests are answered from."""
    before = pooled.copy()
    embed.finish(rows(pooled), EmbedOptions(normalize=True, dimensions=1), normalize=True)
    np.testing.assert_array_equal(pooled, before)


@pytest.mark.parametrize("normalize", [False, True])
def test_chunks_are_scaled_as_the_model_scales_texts(models: Path, normalize: bool) -> None:  # noqa: FBT001  drawn
    """Where a request does not say: a chunk's vector is that of the chunk asked alone."""
    bundle = open_bundle(models / "minilm" / "1")
    text = EncodedChunk(ids=array("i", [101, 102]), source=0, start=0, end=1)
    work = Work(
        inputs=[("", "a")],
        options=ChunkOptions(),
        texts=[text],
        rows=rows(np.array([[3.0, 4.0]], np.float32)),
        manifest=msgspec.structs.replace(bundle.manifest, **parts("embed", normalize=normalize)),
        tokenizer=TextTokenizer.open(bundle.path, bundle.manifest),
    )
    ((chunk,),) = chunks.WAY.finish(work)
    np.testing.assert_allclose(chunk.embedding, [0.6, 0.8] if normalize else [3.0, 4.0], rtol=1e-6)
