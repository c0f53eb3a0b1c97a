"""Costs of a batch in microseconds, by kind of lane, length and size.

They are measured at warm-up and corrected by observed batches. A `CostTable` holds the measurements of one kind of
lane. `ModelCosts` joins a model's tables and answers the questions of scheduling: the cost of a text alone, its share
of the device under load, and the duration of a batch.

Lengths are grouped into sequence buckets, to limit padding.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

LaneKindName = Literal["wide", "narrow"]

BUCKETS = (16, 32, 64, 128, 256, 512)
"""Upper bounds in tokens; beyond, buckets continue by doubling."""

CORRECTION_WEIGHT = 1 / 50
"""Weight of each batch in the correction of its kind of lane, and of its length bucket: a change of the machine is
learned within about a second."""

LONG_WEIGHT = 1 / 500
"""Weight of each batch in the long-term mean and variance: seconds of a busy server."""

MIN_FACTOR, MAX_FACTOR = 0.25, 4.0
MIN_SHAPE, MAX_SHAPE = 0.5, 2.0
MAX_OVERHEAD_US = 20_000.0

_WIDE_MUST_CARRY = 0.8
"""Maximum cost of a text on the wide lane, relative to the narrow ones, for batches to prefer the wide lane. Narrow
lanes also let a short text start sooner, and a warm-up on a busy machine is no reason to give that up."""

MIN_BATCH_GAIN = 0.05
"""Minimum saving per text for which a batch is doubled, as a fraction."""

_KEPT_ANSWERS = 8192

GROUP_TOKENS: Mapping[str, int] = {"openvino": 256}
"""By library: minimum padded tokens that a busy narrow lane gets at once. Up to this size, OpenVINO's batches gain 5%
per doubling (docs/benchmarks/decisions.md); a warm-up on a busy machine often measures less."""


def bucket_index(tokens: int) -> int:
    """The index in `BUCKETS` for an input of this length; `len(BUCKETS)` for longer ones.

    >>> bucket_index(16), bucket_index(17), bucket_index(513)
    (0, 1, 6)
    """
    return bisect_left(BUCKETS, tokens)


def bucket_for(tokens: int) -> int:
    """The smallest bucket that holds an input of this length.

    >>> bucket_for(1), bucket_for(16), bucket_for(17), bucket_for(513)
    (16, 16, 32, 1024)
    """
    at = bucket_index(tokens)
    if at < len(BUCKETS):
        return BUCKETS[at]
    return 1 << (tokens - 1).bit_length()


class CostPoint(msgspec.Struct, frozen=True):
    """One measurement.

    Attributes:
        kind: A narrow lane is measured while all narrow lanes run the same work.
        tokens: Tokens of each text.
        batch: Number of texts.
        us: Median time of a batch, in microseconds.
        spread_us: Interquartile range.
        library: The library for texts of this length, for OpenVINO and engines with several; otherwise empty.
    """

    kind: LaneKindName
    tokens: int
    batch: int
    us: float
    spread_us: float = 0.0
    library: str = ""


class CostTable:
    """Microseconds of a batch; linear between measurements, in proportion beyond them, never decreasing."""

    def __init__(self, points: Iterable[tuple[int, int, float]], padded_to: Sequence[int] = ()) -> None:
        """Takes triples of (tokens, texts, microseconds).

        A batch is padded to the next of the ascending sizes `padded_to`, and its texts to the next measured length; a
        larger batch runs in parts. `padded_to` is empty if batches are not padded.

        Raises:
            ValueError: There is no point, or an impossible one.
        """
        measured: dict[int, dict[int, float]] = {}
        for tokens, batch, us in points:
            if tokens <= 0 or batch <= 0 or us < 0:
                raise ValueError("a cost point needs a positive length, a positive size and a time")
            row = measured.setdefault(tokens, {})
            row[batch] = min(us, row.get(batch, us))
        if not measured:
            raise ValueError("a cost table needs at least one point")
        self.tokens = sorted(measured)
        self.sizes = sorted({1, *(batch for row in measured.values() for batch in row)})
        self._rows: list[list[float]] = []
        # Disturbances only lengthen measurements: if two disagree, the larger work is right.
        ceiling = [math.inf] * len(self.sizes)
        for tokens in reversed(self.tokens):
            sizes, times = zip(*sorted(measured[tokens].items()), strict=True)
            full = [_at(sizes, times, size) for size in self.sizes]
            ceiling = list(map(min, [*accumulate(reversed(full), min)][::-1], ceiling))
            self._rows.insert(0, ceiling)
        self._padded_to = padded_to
        self._answers: dict[tuple[int, int], float] = {}

    @classmethod
    def of(cls, points: Iterable[CostPoint], *, spreads: float = 0.0, padded_to: Sequence[int] = ()) -> CostTable:
        """The table of measurements, each moved by this many of its spreads, to no less than 0."""
        return cls(
            (
                (point.tokens, point.batch, max(min(0.0, point.us), point.us + spreads * point.spread_us))
                for point in points
            ),
            padded_to,
        )

    def batch_us(self, tokens: int, batch: int) -> float:
        """Predicted microseconds of this many texts, padded to this many tokens."""
        answer = self._answers.get((tokens, batch))
        if answer is None:
            if len(self._answers) >= _KEPT_ANSWERS:
                self._answers.clear()
            answer = self._answers[tokens, batch] = self._computed(tokens, batch)
        return answer

    def worthwhile(self, tokens: int, most: int) -> int:
        """The size up to which each doubling lowers the cost per text enough; at most `most`."""
        size, larger = 1, 2
        while larger <= most:
            if is_worthwhile(self.batch_us(tokens, size), size, self.batch_us(tokens, larger), larger):
                size = larger
            larger *= 2
        return size

    def _computed(self, tokens: int, batch: int) -> float:
        if self._padded_to:
            parts, rest = divmod(batch, self._padded_to[-1])
            if parts and rest:
                return self.batch_us(tokens, batch - rest) + self.batch_us(tokens, rest)
            if parts > 1:
                return parts * self.batch_us(tokens, self._padded_to[-1])
            batch = self._padded_to[bisect_left(self._padded_to, batch)]
            tokens = next((length for length in self.tokens if length >= tokens), tokens)
        column = [_at(self.sizes, row, batch) for row in self._rows]
        return _at(self.tokens, column, tokens)


def is_worthwhile(small_us: float, small: int, large_us: float, large: int) -> bool:
    """Whether a text gets cheaper in a larger batch by `MIN_BATCH_GAIN` a doubling; less in proportion for less."""
    doublings = (large - small) / small if large < 2 * small else (large // small).bit_length() - 1
    return large_us * small <= small_us * large * (1 - MIN_BATCH_GAIN) ** doublings


def _at(points: Sequence[int], values: Sequence[float], x: int) -> float:
    """Linear between points, constant before the first, in proportion beyond the last."""
    at = bisect_left(points, x)
    if at == len(points):
        return values[-1] * x / points[-1]
    if at == 0 or points[at] == x:
        return values[at]
    share = (x - points[at - 1]) / (points[at] - points[at - 1])
    return values[at - 1] + share * (values[at] - values[at - 1])


class Correction:
    """Deviation of recent batches of one kind of lane from the warm-up.

    Attributes:
        factor: Of the engine's time; other work on the same cores increases it.
        shapes: Further factor of each bucket, and of longer batches. The warm-up measures each length only for a
            moment, and could be disturbed.
        overhead_us: Time that a batch holds its lane beyond the engine's time: sockets, and delays of the event loop.
        batches: Number of observed batches.
        mean: As `factor`, over many more batches; no decision uses it.
    """

    __slots__ = ("_covariance", "_off", "_variance", "batches", "factor", "mean", "overhead_us", "shapes")

    def __init__(self) -> None:
        self.factor = self.mean = 1.0
        self.shapes = [1.0] * (len(BUCKETS) + 1)
        self.overhead_us = 0.0
        self.batches = 0
        self._off = self._variance = self._covariance = 0.0

    @property
    def spread(self) -> float:
        """The standard deviation of an engine's time relative to its prediction."""
        return math.sqrt(self._variance)

    @property
    def lasting(self) -> float:
        """The share of that variance that the next batch has too: slowdowns last."""
        return min(max(self._covariance / self._variance, 0.0), 1.0) if self._variance > 0 else 0.0

    def at(self, tokens: int) -> float:
        return self.factor * self.shapes[bucket_index(tokens)]

    def observe(self, tokens: int, table_us: float, compute_us: float, occupied_us: float) -> None:
        """Learns from one batch; a single outlier has little effect.

        `table_us` is the warm-up's time, `compute_us` the engine's, `occupied_us` the time that the lane was held.
        """
        self.batches += 1
        if table_us > 0:
            ratio = min(max(compute_us / table_us, MIN_FACTOR), MAX_FACTOR)
            bucket = bucket_index(tokens)
            self._remember(ratio, ratio / (self.factor * self.shapes[bucket]) - 1)
            shape = min(max(ratio / self.factor, MIN_SHAPE), MAX_SHAPE)
            self.shapes[bucket] += CORRECTION_WEIGHT * (shape - self.shapes[bucket])
            self.factor += CORRECTION_WEIGHT * (ratio - self.factor)
        overhead_us = min(max(occupied_us - compute_us, 0.0), MAX_OVERHEAD_US)
        self.overhead_us += CORRECTION_WEIGHT * (overhead_us - self.overhead_us)

    def _remember(self, ratio: float, off: float) -> None:
        weight = max(LONG_WEIGHT, 1 / self.batches)
        self.mean += weight * (ratio - self.mean)
        self._variance += weight * (off * off - self._variance)
        self._covariance += weight * (off * self._off - self._covariance)
        self._off = off


class _Share(msgspec.Struct, frozen=True):
    """What the warm-up tells of texts of a length.

    Attributes:
        us: Microseconds of the device for each text, batched with others.
        batch: The size of that batch.
        wide: Whether the wide lane has it.
        alone_us: Time of one text on the wide lane.
        busy_us: Time of one text on the lane that has the batch.
        bucket: Index of their bucket.
    """

    us: float
    batch: int
    wide: bool
    alone_us: float
    busy_us: float
    bucket: int


class ModelCosts:
    """Costs of a model's texts on the lanes of one device slot.

    Attributes:
        wide: Costs of the wide lane.
        narrow: Costs of each narrow lane while all work; None if the model runs on none.
        bucketed_us: The most that one text within `BUCKETS` costs on the wide lane, before corrections.
        corrections: By kind of lane, the wide one first.
    """

    def __init__(
        self,
        points: Sequence[CostPoint],
        *,
        narrow_lanes: int = 0,
        batched: bool = True,
        max_batch_tokens: int = 1024,
        group_tokens: int = 0,
        padded_to: Sequence[int] = (),
    ) -> None:
        """Builds the tables from measurements, at least one of them of the wide lane.

        `batched` says whether texts may be computed together. See `Policy` for the limits, `CostTable` for `padded_to`.
        Buckets whose points name a library have at least its `GROUP_TOKENS`.
        """
        self.points = points
        wide = [point for point in points if point.kind == "wide"]
        narrow = [point for point in points if point.kind == "narrow"] if narrow_lanes else []
        self.wide = CostTable.of(wide, padded_to=padded_to)
        self.narrow = CostTable.of(narrow, padded_to=padded_to) if narrow else None
        self.bucketed_us = self.wide.batch_us(BUCKETS[-1], 1)
        # The wide lane at its slowest and the narrow ones at their fastest; see `_carries_more`.
        self._slow_wide = CostTable.of(wide, spreads=0.5, padded_to=padded_to)
        self._quick_narrow = CostTable.of(narrow, spreads=-0.5, padded_to=padded_to) if narrow else None
        self.corrections = (Correction(), Correction())
        self._narrow_lanes = narrow_lanes
        self._batched = batched
        self._max_batch_tokens = max_batch_tokens
        least = {bucket_index(point.tokens): GROUP_TOKENS.get(point.library, 0) for point in points if batched}
        groups = [max(group_tokens, least.get(bucket, 0)) for bucket in range(len(BUCKETS) + 1)]
        self._group_tokens = [min(tokens, max_batch_tokens) for tokens in groups]
        self._shares: dict[int, _Share] = {}

    def batch_us(self, lane: int, tokens: int, batch: int) -> float:
        """Predicted microseconds that a batch holds its lane; lane 0 is the wide one."""
        correction = self.corrections[lane > 0]
        table = self.narrow if lane and self.narrow else self.wide
        return table.batch_us(tokens, batch) * correction.at(tokens) + correction.overhead_us

    def least_us(self, tokens: int) -> float:
        """Predicted microseconds of one text on an idle device, without the present slowdown: the minimum."""
        return self.wide.batch_us(tokens, 1) * min(1.0, self.corrections[0].at(tokens))

    def share_us(self, tokens: int) -> float:
        """Predicted microseconds of the whole device that a text takes while others wait, batched with them."""
        share = self._share(tokens)
        correction = self.corrections[not share.wide]
        overhead_us = correction.overhead_us / (share.batch if share.wide else share.batch * self._narrow_lanes)
        return share.us * correction.at(tokens) + overhead_us

    def least_share_us(self, tokens: int) -> float:
        """The same without the present slowdown."""
        share = self._share(tokens)
        return share.us * min(1.0, self.corrections[not share.wide].at(tokens))

    def one_us(self, tokens: int) -> tuple[float, float, float, float]:
        """`least_us`, the time of a text alone, of its batch while others wait, and `share_us`; faster than each."""
        share, correction = self._share(tokens), self.corrections[0]
        factor = correction.factor * correction.shapes[share.bucket]
        alone_us = share.alone_us * factor + correction.overhead_us
        least_us = share.alone_us * factor if factor < 1 else share.alone_us
        if share.wide:
            return least_us, alone_us, alone_us, share.us * factor + correction.overhead_us / share.batch
        correction = self.corrections[1]
        factor = correction.factor * correction.shapes[share.bucket]
        work_us = share.us * factor + correction.overhead_us / (share.batch * self._narrow_lanes)
        return least_us, alone_us, share.busy_us * factor + correction.overhead_us, work_us

    def prefers_wide(self, tokens: int) -> bool:
        """Whether batches on the wide lane have clearly more throughput for such texts than the narrow lanes."""
        return self._share(tokens).wide

    def group_tokens(self, tokens: int) -> int:
        """Padded tokens of such texts that a narrow lane gets at once regardless of the gain."""
        return self._group_tokens[bucket_index(tokens)]

    def group(self, tokens: int) -> int:
        """The number of such texts that a lane gets at once while enough of them wait."""
        return self._share(tokens).batch

    def inherit(self, before: ModelCosts) -> None:
        """Takes over the corrections of the model that it replaces on the same device."""
        self.corrections = copy.deepcopy(before.corrections)

    def observe(self, lane: int, tokens: int, batch: int, compute_us: float, occupied_us: float) -> None:
        table = self.narrow if lane and self.narrow else self.wide
        self.corrections[lane > 0].observe(tokens, table.batch_us(tokens, batch), compute_us, occupied_us)

    def _share(self, tokens: int) -> _Share:
        """What the warm-up tells of such texts.

        Uses the warm-up alone: only the lane in use is corrected, so corrections would make the choice oscillate.
        """
        answer = self._shares.get(tokens)
        if answer is None:
            if len(self._shares) >= _KEPT_ANSWERS:
                self._shares.clear()
            answer = self._shares[tokens] = self._computed_share(tokens)
        return answer

    def _computed_share(self, tokens: int) -> _Share:
        tokens = max(1, tokens)
        alone_us, bucket = self.wide.batch_us(tokens, 1), bucket_index(tokens)
        most = max(1, self._max_batch_tokens // tokens) if self._batched else 1
        size = self.wide.worthwhile(tokens, most)
        wide = self.wide.batch_us(tokens, size) / size
        if self.narrow is None:
            return _Share(wide, size, True, alone_us, alone_us, bucket)
        group = max(1, self.group_tokens(tokens) // tokens, self.narrow.worthwhile(tokens, most))
        if self._carries_more(tokens, size, group):
            return _Share(wide, size, True, alone_us, alone_us, bucket)
        narrow = self.narrow.batch_us(tokens, group) / group / self._narrow_lanes
        return _Share(narrow, group, False, alone_us, self.narrow.batch_us(tokens, 1), bucket)

    def _carries_more(self, tokens: int, size: int, group: int) -> bool:
        """Whether the wide lane has more throughput, even if the warm-up was disturbed.

        On a busy machine spreads are as large as the times themselves, and prove nothing.
        """
        if self._quick_narrow is None:
            return True
        narrow = self._quick_narrow.batch_us(tokens, group) / group / self._narrow_lanes
        return self._slow_wide.batch_us(tokens, size) / size < narrow * _WIDE_MUST_CARRY
