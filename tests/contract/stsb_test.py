"""The task itself: Spearman's correlation on the test set of STS-B, through the running server."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.support.clients import V2Binary
from tests.support.skips import SHARED, needs_shared

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tests.support.server import Server

DATA = SHARED / "data" / "stsb-test.csv"
PUBLISHED = 82.0
"""Spearman x 100 of the checkpoint itself."""
FP32_TOLERANCE = 0.1
INT8_LOSS = 0.5
_AT_ONCE = 64


def ranks(values: NDArray[np.floating]) -> NDArray[np.floating]:
    """Ranks from 1; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]


def spearman(left: NDArray[np.floating], right: NDArray[np.floating]) -> float:
    """Spearman's rank correlation x 100."""
    return float(100 * np.corrcoef(ranks(left), ranks(right))[0, 1])


def score(server: Server) -> float:
    with DATA.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    texts = sorted({text for row in rows for text in row[:2]}, key=len)
    place = {text: number for number, text in enumerate(texts)}
    with V2Binary(server) as client:
        parts = [
            client.embed(texts[at : at + _AT_ONCE], timeout_ms=60_000).vectors for at in range(0, len(texts), _AT_ONCE)
        ]
    vectors = np.concatenate(parts)
    found = [vectors[place[left]] @ vectors[place[right]] for left, right, _ in rows]
    return spearman(np.array(found), np.array([float(row[2]) for row in rows]))


needs_data = needs_shared(DATA)


def test_spearman_counts_ties() -> None:
    """Equal values share a rank: 1, 2.5, 2.5, 4."""
    np.testing.assert_array_equal(ranks(np.array([3.0, 5.0, 5.0, 9.0])), [1, 2.5, 2.5, 4])
    assert spearman(np.array([1.0, 2, 3]), np.array([9.0, 8, 7])) == pytest.approx(-100)


@pytest.mark.long
@needs_data
def test_stsb_fp32(fp32_server: Server) -> None:
    """Served in fp32 the model scores what its checkpoint scores."""
    assert score(fp32_server) == pytest.approx(PUBLISHED, abs=FP32_TOLERANCE)


@pytest.mark.long
@needs_data
def test_stsb_int8(int8_server: Server) -> None:
    """Served in INT8 it loses at most half a point."""
    assert score(int8_server) >= PUBLISHED - INT8_LOSS
