"""How activations of 8 bits are cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from bertserve.export.precision.equalise import Cut, Seen, choose, eight_bits

if TYPE_CHECKING:
    from numpy.typing import NDArray

CHANNELS = 24
MATRICES = arrays.arrays(
    np.float32,
    arrays.array_shapes(min_dims=2, max_dims=2, max_side=6),
    elements=st.floats(-8, 8, width=32, allow_subnormal=False),
)


def seen(rows: NDArray[np.float32]) -> Seen:
    return Seen(rows.min(axis=0), rows.max(axis=0), rows)


def distance(cut: Cut, rows: NDArray[np.float32], matrix: NDArray[np.float32]) -> float:
    """How far the product in 8 bits lies from the exact one, in shares of its length."""
    values, scale = eight_bits(cut.rows(matrix))
    exact, rounded = rows @ matrix, cut.rounded(rows)
    if cut.repeats is not None:
        rounded = np.repeat(rounded, cut.repeats, axis=1)
    return float(np.linalg.norm(rounded @ (values * scale) - exact) / np.linalg.norm(exact))


def normal(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def test_a_channel_larger_than_the_others_does_not_take_their_steps() -> None:
    """Activations of a transformer have such channels: made alike, the product is five times as close."""
    rows, matrix = normal(200, CHANNELS), normal(CHANNELS, 8)
    rows[:, 3] *= 100
    matrix[3] /= 50
    whole = Cut(np.ones(CHANNELS, np.float32), float(rows.min()), float(rows.max()))
    chosen = choose(seen(rows), matrix)
    assert not chosen.is_even
    assert distance(chosen, rows, matrix) < distance(whole, rows, matrix) / 5


def test_a_channel_that_can_be_repeated_takes_no_steps_of_the_matrix() -> None:
    """Its row, which the factor makes large, is divided among repetitions; a third of what was lost is not."""
    rows, matrix = normal(200, 256), normal(256, 8)
    rows[:, 3] *= 30
    once, often = (choose(seen(rows), matrix, may_repeat=may_repeat) for may_repeat in (False, True))
    assert once.repeats is None
    assert often.repeats[3] == often.repeats.max() > 2
    assert len(often.divisors) == len(often.rows(matrix)) == often.repeats.sum() <= 256 + 16
    assert distance(often, rows, matrix) < distance(once, rows, matrix) * 2 / 3


def test_a_channel_that_was_quiet_keeps_room() -> None:
    """Text may come on which it is not; the others' range is wide enough for a quarter of what they reach."""
    rows, matrix = normal(200, CHANNELS), normal(CHANNELS, 8)
    rows[:, 3] = 0
    chosen = choose(seen(rows), matrix)
    assert chosen.high * chosen.factors[3] > 0.1 * float(np.median(rows.max(axis=0)))


def test_a_lone_outlier_is_cut_off() -> None:
    """One number of one token is worth less than finer steps for all the others."""
    rows = np.abs(normal(400, CHANNELS))
    rows[0] = 12
    # The matrix hardly listens to what all the channels have in common.
    matrix = normal(CHANNELS, 8)
    matrix -= matrix.mean(axis=0)
    assert choose(seen(rows), matrix).high < 12


@pytest.mark.parametrize(
    "rows", [np.zeros((3, CHANNELS), np.float32), np.abs(normal(9, CHANNELS)), -normal(9, CHANNELS)]
)
def test_zero_stays_zero(rows: NDArray[np.float32]) -> None:
    """Padding and cut-off activations are exact, whatever the sign of the others; a tensor of zeros has a range too."""
    chosen = choose(seen(rows), normal(CHANNELS, 8))
    assert chosen.low <= 0 < chosen.high
    assert not chosen.rounded(np.zeros((1, CHANNELS), np.float32)).any()


@given(matrix=MATRICES)
def test_no_number_of_a_matrix_moves_by_more_than_half_a_step(matrix: NDArray[np.float32]) -> None:
    """Each column has a scale of its own; one of zeros is not divided by zero."""
    values, scale = eight_bits(matrix)
    assert (np.abs(values * scale - matrix) <= 0.501 * scale).all()
    assert (np.abs(values.astype(int)) <= 127).all()


def test_real_text_decides_the_same_each_time() -> None:
    """An export that is repeated makes the same file."""
    rows, matrix = normal(50, CHANNELS), normal(CHANNELS, 8)
    first, second = (choose(seen(rows), matrix) for _ in range(2))
    np.testing.assert_array_equal(first.factors, second.factors)
    assert (first.low, first.high) == (second.low, second.high)
