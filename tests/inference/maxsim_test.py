"""MaxSim of long queries: the score of Sentence Transformers, in little memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from bertserve.serving.tasks.maxsim import maxsim


@pytest.mark.parametrize("tokens", [1, 256, 257, 2048])
def test_a_query_of_any_length_has_the_score_of_the_library(tokens: int) -> None:
    """Without all products of its vectors at once, which would take 8 MB for the longest one here."""
    from sentence_transformers import util  # noqa: PLC0415  slow to import

    random = np.random.default_rng(tokens)
    query, text = (random.standard_normal((count, 8), np.float32) for count in (tokens, 1024))
    tracemalloc.start()
    found = maxsim(query, text)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == pytest.approx(float(util.maxsim([query], [text])[0, 0]), rel=1e-5)
    assert peak < 3 << 20
