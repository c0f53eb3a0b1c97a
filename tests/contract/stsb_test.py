"""The task itself: Spearman's correlation on the test set of STS-B, through the running server."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.support.clients import V2Binary
from tests.support.skips import SHARED, needs_shared

if TYPE_CHECKING:
    from tests.support.server import Server

DATA = SHARED / "data" / "stsb-test.csv"
PUBLISHED = 82.0
"""Spearman x 100 of the checkpoint itself."""
FP32_TOLERANCE = 0.1
INT8_LOSS = 0.5
_AT_ONCE = 64


def score(server: Server) -> float:
    """Spearman's rank correlation x 100."""
    from scipy.stats import spearmanr  # noqa: PLC0415  slow to import

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
    return 100 * float(spearmanr(found, [float(row[2]) for row in rows]).statistic)


needs_data = needs_shared(DATA)


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
