from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertserve.serving.scheduling.cost import (
    BUCKETS,
    MAX_FACTOR,
    MAX_OVERHEAD_US,
    MAX_SHAPE,
    MIN_FACTOR,
    MIN_SHAPE,
    Correction,
    CostPoint,
    CostTable,
    ModelCosts,
    bucket_for,
    is_worthwhile,
)
from tests.support.costs import constant, model_costs, per_token

POINTS = [(8, 1, 400.0), (8, 2, 500.0), (8, 4, 800.0), (16, 1, 600.0), (64, 1, 2400.0)]

points = st.lists(
    st.tuples(st.integers(1, 2000), st.integers(1, 64), st.floats(0, 1e7, allow_nan=False, allow_subnormal=False)),
    min_size=1,
    max_size=12,
)


@pytest.mark.parametrize(
    ("tokens", "batch", "us"),
    [
        *POINTS,
        # Between points the cost is linear, in length and in size.
        *[(12, 1, 500.0), (32, 1, 1200.0), (8, 3, 650.0)],
        # Half way between the two lengths for that size, of which one is in proportion to its last.
        (12, 3, (650.0 + 3 * 600.0) / 2),
        # Beyond the last point it grows in proportion.
        *[(128, 1, 4800.0), (8, 8, 1600.0), (128, 2, 9600.0)],
        # What a run costs at least, a text of one token costs too.
        (1, 1, 400.0),
    ],
)
def test_what_a_batch_costs(tokens: int, batch: int, us: float) -> None:
    assert CostTable(POINTS).batch_us(tokens, batch) == pytest.approx(us)


def test_the_order_of_points_does_not_matter() -> None:
    """Warm-up may report them as it likes."""
    assert CostTable(reversed(POINTS)).batch_us(40, 3) == CostTable(POINTS).batch_us(40, 3)


def test_a_noisy_measurement_never_makes_more_work_cheaper() -> None:
    """A point above a later one was disturbed, and counts as that one."""
    table = CostTable([(8, 1, 900.0), (8, 2, 700.0), (16, 1, 500.0), (32, 1, 1000.0)])
    assert table.batch_us(8, 1) == 500.0
    assert table.batch_us(8, 2) == 700.0
    assert table.batch_us(32, 1) == 1000.0


@given(
    points, st.tuples(st.integers(1, 5000), st.integers(1, 200)), st.tuples(st.integers(1, 5000), st.integers(1, 200))
)
@settings(max_examples=500)
def test_the_cost_never_falls(
    measured: list[tuple[int, int, float]], one: tuple[int, int], other: tuple[int, int]
) -> None:
    """Whatever was measured, also twice, the longer or larger batch costs at least as much."""
    table = CostTable(measured)
    lengths, sizes = sorted((one[0], other[0])), sorted((one[1], other[1]))
    assert table.batch_us(lengths[0], sizes[0]) <= table.batch_us(lengths[1], sizes[1]) * (1 + 1e-9)


@pytest.mark.parametrize("measured", [[], [(0, 1, 1.0)], [(-1, 1, 1.0)], [(8, 0, 1.0)], [(8, 1, -1.0)]])
def test_points_that_cannot_be_are_refused(measured: list[tuple[int, int, float]]) -> None:
    """No points, no length, no text, a negative time."""
    with pytest.raises(ValueError, match="cost"):
        CostTable(measured)


@pytest.mark.parametrize(
    ("small_us", "small", "large_us", "large", "pays"),
    [
        (100.0, 1, 189.0, 2, True),
        (100.0, 1, 191.0, 2, False),
        (100.0, 4, 146.0, 6, True),
        (100.0, 4, 147.0, 6, False),
        (100.0, 1, 360.0, 4, True),
        (100.0, 1, 362.0, 4, False),
    ],
)
def test_a_larger_batch_pays_by_a_twentieth_a_doubling(
    small_us: float, small: int, large_us: float, large: int, *, pays: bool
) -> None:
    """And in proportion for less than a doubling."""
    assert is_worthwhile(small_us, small, large_us, large) is pays


def test_batches_grow_as_far_as_they_pay() -> None:
    """On a T4 at 128 tokens up to 4: 1.76, 2.50, 4.17 and 8.36 ms for 1, 2, 4 and 8 texts."""
    table = CostTable([(128, 1, 1760), (128, 2, 2500), (128, 4, 4170), (128, 8, 8360)])
    assert table.worthwhile(128, 64) == 4
    assert table.worthwhile(128, 3) == 2


@pytest.mark.parametrize(
    ("tokens", "batch", "as_tokens", "as_batch"),
    [(128, 5, 128, 8), (128, 3, 128, 4), (128, 9, 128, 16), (20, 1, 128, 1), (20, 6, 128, 8), (16, 2, 16, 2)],
)
def test_a_padded_batch_costs_what_it_is_padded_to(tokens: int, batch: int, as_tokens: int, as_batch: int) -> None:
    """On a GPU: the next captured size, whether that was measured or not, and the next length."""
    points = [(16, 1, 900), (16, 2, 950), (128, 1, 1760), (128, 2, 2500), (128, 4, 4170), (128, 8, 8360)]
    padded, plain = CostTable(points, padded_to=(1, 2, 4, 8, 16, 32)), CostTable(points)
    assert padded.batch_us(tokens, batch) == plain.batch_us(as_tokens, as_batch)


def test_what_is_larger_than_the_largest_size_costs_its_parts() -> None:
    """70 texts are 32, 32, and 6 that are padded to 8."""
    padded = CostTable([(128, 1, 1000), (128, 32, 8000)], padded_to=(1, 2, 4, 8, 16, 32))
    assert padded.batch_us(128, 70) == 2 * 8000 + padded.batch_us(128, 8)
    assert padded.batch_us(128, 64) == 2 * 8000


def test_five_texts_are_no_batch_where_eight_cost_as_much() -> None:
    """The fifth would double the time of the four before it; seven are worth it where a batch costs little more."""
    sizes = (1, 2, 4, 8, 16, 32)
    for times, five, seven in (((1760, 2500, 4170, 8360), False, False), ((1440, 1450, 1500, 1700), True, True)):
        table = CostTable([(16, size, us) for size, us in zip(sizes, times, strict=False)], padded_to=sizes)
        for larger, pays in ((5, five), (7, seven)):
            assert is_worthwhile(table.batch_us(16, 4), 4, table.batch_us(16, larger), larger) is pays


@pytest.mark.parametrize(
    ("costs", "asked", "expected"),
    [
        # A text alone takes what the wide lane takes, and on a busy device what a narrow one does.
        (model_costs(per_token(10), per_token(18)), ("batch_us", 0, 64, 1), 640),
        (model_costs(per_token(10), per_token(18)), ("least_us", 64), 640),
        (model_costs(per_token(10), per_token(18)), ("one_us", 64), (640, 640, 18 * 64, 9 * 64)),
        # Under load it takes its share: of two narrow lanes side by side, each with as many as pay or its group; or of
        # a batch on the wide one. Texts that are not batched gain nothing from a table of batches.
        (model_costs(per_token(10), per_token(16)), ("share_us", 64), 512),
        (model_costs(per_token(10, 90), per_token(10, 90), group_tokens=32), ("share_us", 8), (90 + 1280) / 16 / 2),
        (model_costs(constant(640)), ("share_us", 64), 640 / 16),
        (model_costs(constant(640), batched=False), ("share_us", 64), 640),
        # The wide lane is preferred where it carries a quarter more: on the narrow ones a text waits for fewer others.
        (model_costs(per_token(10), per_token(20)), ("prefers_wide", 64), False),
        (model_costs(per_token(10), per_token(24.9)), ("prefers_wide", 64), False),
        (model_costs(per_token(10), per_token(25.1)), ("prefers_wide", 64), True),
        (model_costs(per_token(10)), ("prefers_wide", 64), True),
        # Without a narrow measurement, as for a model that is held once, every lane costs what the wide one does.
        (ModelCosts([CostPoint("wide", 8, 1, 100.0)], narrow_lanes=2), ("batch_us", 1, 8, 1), 100),
        (ModelCosts([CostPoint("wide", 8, 1, 100.0)], narrow_lanes=2), ("prefers_wide", 8), True),
    ],
)
def test_what_a_text_costs(costs: ModelCosts, asked: tuple[Any, ...], expected: float | tuple[float, ...]) -> None:
    """Alone, beside others, and on which lane, by the table of a model."""
    method, *arguments = asked
    assert getattr(costs, method)(*arguments) == expected


def test_costs_follow_what_is_observed_slowly() -> None:
    """One odd batch changes a fiftieth, and for its own lengths another; many of them all of it."""
    costs = model_costs(per_token(10), per_token(20))
    costs.observe(0, 64, 1, 1280.0, 1280.0)
    assert costs.batch_us(0, 65, 1) == pytest.approx(650 * 1.02)
    assert costs.batch_us(0, 64, 1) == pytest.approx(640 * 1.02**2)
    assert costs.one_us(64)[2] == 20 * 64
    for _ in range(1000):
        costs.observe(0, 64, 1, 1280.0, 1780.0)
    assert costs.batch_us(0, 64, 1) == pytest.approx(1280 + 500, rel=1e-3)
    assert costs.least_us(64) == 640


def test_a_length_whose_warm_up_was_disturbed_is_corrected_by_itself() -> None:
    """What long texts take says less of short ones than the short ones do."""
    costs = model_costs(per_token(10), per_token(20))
    for _ in range(2000):
        costs.observe(0, 16, 1, 160.0, 160.0)
        costs.observe(0, 256, 1, 1280.0, 1280.0)
    assert costs.batch_us(0, 16, 1) == pytest.approx(160, rel=0.02)
    assert costs.batch_us(0, 256, 1) == pytest.approx(1280, rel=0.02)


def test_a_machine_that_became_faster_is_believed() -> None:
    costs = model_costs(per_token(10))
    for _ in range(1000):
        costs.observe(0, 64, 1, 320.0, 320.0)
    assert costs.least_us(64) == pytest.approx(320, rel=1e-3)
    assert costs.least_share_us(64) == pytest.approx(320, rel=1e-3)


@pytest.mark.parametrize(("in_a_row", "lasting"), [(1, 0.0), (10, 0.8)])
def test_how_much_batches_vary_is_learned_and_how_long_that_lasts(in_a_row: int, lasting: float) -> None:
    """Times a tenth above and below the mean, so many of each in a row."""
    correction = Correction()
    for number in range(6000):
        correction.observe(64, 1000.0, 1100.0 if number // in_a_row % 2 else 900.0, 1200.0)
    assert correction.spread == pytest.approx(0.1, rel=0.15)
    assert correction.lasting == pytest.approx(lasting, abs=0.1)
    assert correction.mean == pytest.approx(1, rel=0.01)


def test_a_model_that_replaces_another_learns_apart_from_it() -> None:
    before, after = model_costs(per_token(10)), model_costs(per_token(10))
    for number in range(500):
        before.observe(0, 64, 1, 1000.0 + number % 2, 1500.0)
    after.inherit(before)
    assert after.batch_us(0, 64, 1) == before.batch_us(0, 64, 1)
    assert after.corrections[0].spread == before.corrections[0].spread > 0
    known = before.batch_us(0, 64, 1)
    after.observe(0, 64, 1, 100.0, 100.0)
    assert before.batch_us(0, 64, 1) == known


@given(st.lists(st.tuples(st.integers(1, 5000), *[st.floats(0, 1e9)] * 3), max_size=200))
@settings(max_examples=200)
def test_a_correction_stays_within_its_bounds(seen: list[tuple[int, float, float, float]]) -> None:
    """Whatever the clock of a machine that stood still makes of a batch."""
    correction = Correction()
    for tokens, table_us, compute_us, occupied_us in seen:
        correction.observe(tokens, table_us, compute_us, occupied_us)
    assert MIN_FACTOR <= correction.factor <= MAX_FACTOR
    assert all(MIN_SHAPE <= shape <= MAX_SHAPE for shape in correction.shapes)
    assert 0 <= correction.overhead_us <= MAX_OVERHEAD_US
    assert 0 <= correction.spread <= MAX_FACTOR / (MIN_FACTOR * MIN_SHAPE)
    assert 0 <= correction.lasting <= 1


def test_the_answers_that_are_kept_are_bounded() -> None:
    """A model of any length does not fill the memory."""
    table = CostTable(POINTS)
    for tokens in range(1, 20_000):
        table.batch_us(tokens, 1)
    assert len(table._answers) <= 8192
    costs = model_costs(per_token(10))
    for tokens in range(1, 20_000):
        costs.share_us(tokens)
    assert len(costs._shares) <= 8192


@pytest.mark.parametrize(
    ("tokens", "bucket"),
    [
        *[(tokens, 16) for tokens in (1, 2, 16)],
        *[pair for bucket in BUCKETS for pair in ((bucket, bucket), (bucket + 1, 2 * bucket))],
        *[(513, 1024), (1024, 1024), (1025, 2048), (8192, 8192), (8193, 16384)],
    ],
)
def test_buckets(tokens: int, bucket: int) -> None:
    """The shortest inputs share one, bounds are inclusive, and beyond the table lengths go on doubling."""
    assert bucket_for(tokens) == bucket


def test_a_bucket_holds_its_input_and_wastes_less_than_half() -> None:
    """Beyond the shortest, padding to the bucket never doubles an input's length."""
    for tokens in range(17, 5000):
        assert tokens <= bucket_for(tokens) < 2 * tokens
