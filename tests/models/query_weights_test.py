"""The weights of queries in a bundle: what is no array of a float32 for each token is refused."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np
import pytest

from bertserve.serving.errors import BundleError
from bertserve.serving.models import query_weights
from bertserve.serving.models.manifest import QUERY_WEIGHTS

if TYPE_CHECKING:
    from pathlib import Path

WORDS = 8
WEIGHTS = np.linspace(0, 1, WORDS, dtype=np.float32)


def saved(array: np.ndarray, *, pickles: bool = False) -> bytes:
    made = io.BytesIO()
    np.save(made, array, allow_pickle=pickles)
    return made.getvalue()


def test_the_weights_come_back(tmp_path: Path) -> None:
    """To the last bit, and not tied to the file."""
    query_weights.write(tmp_path, WEIGHTS)
    found = query_weights.read(tmp_path, WORDS)
    (tmp_path / QUERY_WEIGHTS).unlink()
    np.testing.assert_array_equal(found, WEIGHTS)


def zipped() -> bytes:
    made = io.BytesIO()
    np.savez(made, WEIGHTS)
    return made.getvalue()


BAD: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "is not an array"),
    "no-array": (b"weights", "is not an array"),
    "a-pickle": (saved(np.array([{}] * WORDS, object), pickles=True), "is not an array"),
    "several": (zipped(), "must hold float32"),
    "cut-off": (saved(WEIGHTS)[:-4], "is not an array"),
    "a-giant": (
        saved(WEIGHTS).replace(b"(8,)", b"(9999999999999,)").replace(b" " * 12 + b"\n", b"\n"),
        "is not an array",
    ),
    "fewer": (saved(WEIGHTS[1:]), r"must hold float32 \[8\]"),
    "more-axes": (saved(WEIGHTS[None]), "must hold float32"),
    "integers": (saved(WEIGHTS.astype(np.int32)), "must hold float32"),
    "doubles": (saved(WEIGHTS.astype(np.float64)), "must hold float32"),
    "not-finite": (saved(np.full_like(WEIGHTS, np.inf)), "not finite"),
}


@pytest.mark.parametrize("case", BAD)
def test_another_file_is_refused(tmp_path: Path, case: str) -> None:
    """In one sentence, and without memory for what a header promises."""
    content, sentence = BAD[case]
    (tmp_path / QUERY_WEIGHTS).write_bytes(content)
    with pytest.raises(BundleError, match=sentence):
        query_weights.read(tmp_path, WORDS)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="is not an array"):
        query_weights.read(tmp_path, WORDS)
