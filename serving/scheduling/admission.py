"""Admission control: accepts a request, or rejects it with 429 or, before any work, with 504.

Short texts are tokenized first, and the request is admitted by what they cost. A request whose texts wait for the
tokenizer is admitted by an estimate, and its permit is confirmed with the exact lengths. The deadline runs from the
arrival.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Self

from bertserve.serving.errors import BulkOverloaded, DeadlineExceeded, InvalidRequest, NotReady, Overloaded
from bertserve.serving.records import BULK, DEFAULT_PRIORITY, ModelIndex
from bertserve.serving.scheduling.cost import BUCKETS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bertserve.serving.scheduling.load_predictor import Demand, LoadPredictor

_BYTES_PER_TOKEN = 4
"""Bytes per token of English text in WordPiece, roughly; the exact count replaces the estimate."""

_SPECIAL_TOKENS = 2

DEADLINE_COST_FACTOR = 3.0
"""A request without a timeout has at least this multiple of its predicted cost."""

_LATE = "overloaded: the answer would miss the deadline; try again later"

_MAX_BULK_TOKENS = 1 << 19
"""Maximum tokens of bulk work in flight."""

_MIN_RETRY_S = 0.02
"""Minimum time to retry, so that the situation can change."""


@dataclass(slots=True, frozen=True)
class AdmissionLimits:
    """Settings of admission.

    Attributes:
        max_queue_tokens: Maximum tokens in flight, without bulk work.
        default_timeout_ms: Timeout of requests without one; longer if their predicted cost needs it.
        max_timeout_ms: Maximum timeout of requests other than bulk work.
    """

    max_queue_tokens: int
    default_timeout_ms: float = 30_000.0
    max_timeout_ms: float = 60_000.0


class TokenPool:
    """A limit on tokens in flight.

    Attributes:
        capacity: Maximum tokens in flight.
        in_flight: Tokens that are admitted and not answered yet.
        refusals: Number of rejected requests by reason.
    """

    __slots__ = ("capacity", "in_flight", "refusals")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.in_flight = 0
        self.refusals = {"queue_full": 0, "predicted_late": 0, "hopeless": 0, "not_ready": 0}


def estimate_tokens(sizes: Sequence[int], longest: int | None) -> int:
    """Estimated tokens of inputs by their sizes in bytes, including special tokens; not a bound.

    Tokens beyond `longest` of an input are truncated or rejected, and do not count.
    """
    total = sum(sizes)
    if longest is not None and total > (most := _BYTES_PER_TOKEN * (longest - _SPECIAL_TOKENS)):
        total = sum([min(size, most) for size in sizes])
    return total // _BYTES_PER_TOKEN + _SPECIAL_TOKENS * len(sizes)


class Permit:
    """The right to hold tokens until its `with` block ends.

    Attributes:
        deadline: When its answer becomes useless; infinity for bulk work without a timeout.
        shortened: The end of an error message if the deadline is earlier than the client's timeout.
        tokens: Tokens held: the estimate, then the exact count.
        behind_us: Work after the engine of other requests that its own waits for.
        demand: Set when it is confirmed.
        due: When the engine must have its answer: the deadline, less the time of the work after it.
    """

    __slots__ = (
        *("_admission", "_expected_us", "behind_us", "deadline", "demand", "due", "model", "pool", "priority"),
        *("shortened", "tokens"),
    )

    def __init__(self, admission: Admission, model: ModelIndex, priority: int, deadline: float) -> None:
        self._admission = admission
        self._expected_us = 0
        self.pool = admission.bulk if priority == BULK else admission.online
        self.model = model
        self.priority = priority
        self.deadline = self.due = deadline
        self.behind_us = 0.0
        self.shortened = ""
        self.tokens = 0
        self.demand: Demand | None = None

    def reserve(self, tokens: int, now: float) -> None:
        """Corrects the permit to the exact tokens of a request that may not have to queue."""
        self._expect(0)
        self._admission.take(self, tokens, None, now)

    def confirm(self, lengths: Sequence[int], now: float) -> None:
        """Corrects the permit to the exact lengths; if that is rejected, it holds the tokens that it held."""
        admission = self._admission
        if self._expected_us:
            self._expect(0)
        self.demand = admission.predictor.demand(self.model, lengths)
        admission.take(self, sum(lengths), self.demand, now)

    def add_after(self, after_us: float, behind_us: float, deadline: float) -> None:
        """Adds work after the engine to what is confirmed later.

        Args:
            after_us: Its predicted time.
            behind_us: The same for other requests that such work waits for.
            deadline: The request's deadline from now on.
        """
        self.deadline, self.due = deadline, deadline - after_us / 1e6
        self.behind_us = behind_us

    @property
    def after_us(self) -> float:
        return (self.deadline - self.due) * 1e6 if self.due < self.deadline else 0.0

    def _expect(self, us: int) -> None:
        """Sets the work that predictions count while its texts wait for the tokenizer."""
        self._admission.predictor.expected_us += us - self._expected_us
        self._expected_us = us

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Gives back what it holds."""
        if self._expected_us:
            self._expect(0)
        self.pool.in_flight -= self.tokens
        self.tokens = 0


class Admission:
    """Admits requests: a limit on the tokens in flight, and a prediction for each deadline.

    Attributes:
        online: Tokens of requests with a waiting user.
        bulk: Tokens of bulk work, with a limit of their own: a flood of it rejects nothing else.
    """

    def __init__(
        self,
        predictor: LoadPredictor,
        limits: AdmissionLimits,
        *,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """Starts with nothing in flight.

        `jitter` returns numbers in [0, 1), so that clients that are rejected together do not come back together.
        """
        self.predictor = predictor
        self.online = TokenPool(limits.max_queue_tokens)
        self.bulk = TokenPool(_MAX_BULK_TOKENS)
        self._limits = limits
        self._jitter = jitter

    def admit(
        self,
        model: ModelIndex,
        sizes: Sequence[int],
        *,
        longest: int | None,
        arrival: float,
        timeout_ms: float | None,
        priority: int,
        now: float,
    ) -> Permit:
        """Admits a request by an estimate of its tokens, and sets its deadline.

        Predictions count its work until it is confirmed, except bulk work.

        Args:
            model: The model.
            sizes: Bytes of each input; at least one.
            longest: Maximum tokens of a text; None if longer texts are read in windows.
            arrival: When the request was complete.
            timeout_ms: The client's timeout; None for the default, which for bulk work is no timeout.
            priority: Its class.
            now: The time.

        Raises:
            InvalidRequest: It has more tokens than the server ever holds; splitting it helps.
            Overloaded: There is no room now, or its answer would be late; `retry_after_s` says when to retry.
            NotReady: The engine is restarting, and its answer would be late.
            DeadlineExceeded: The deadline has passed, or even an idle server would be late.
        """
        tokens = estimate_tokens(sizes, longest)
        permit = self.permit(model, tokens, len(sizes), arrival, timeout_ms, priority)
        if priority == BULK:
            self.take(permit, tokens, None, now)
            return permit
        demand = self.predictor.demand(model, _least_lengths(sizes, longest))
        # Under overload nearly everything is rejected: it should not be tokenized first.
        self.take(permit, tokens, demand if self.predictor.crowded else None, now)
        permit._expect(int(demand.work_us))  # noqa: SLF001  the two are one
        return permit

    def permit(
        self, model: ModelIndex, tokens: int, texts: int, arrival: float, timeout_ms: float | None, priority: int
    ) -> Permit:
        """A permit that holds no tokens until it is confirmed; `tokens` may be estimated, the rest is as in `admit`."""
        if priority == BULK:
            return Permit(self, model, priority, inf if timeout_ms is None else arrival + timeout_ms / 1e3)
        if timeout_ms is None:
            costs, timeout_ms = self.predictor.costs[model], self._limits.default_timeout_ms
            # Nearly always the cost does not matter. A table never decreases, so one question tells for short texts.
            if texts > 1 or tokens > BUCKETS[-1] or DEADLINE_COST_FACTOR * costs.bucketed_us / 1e3 > timeout_ms:
                cost_us = costs.wide.batch_us(max(1, tokens // texts), 1) * texts  # roughly
                timeout_ms = max(timeout_ms, DEADLINE_COST_FACTOR * cost_us / 1e3)
        most_ms = self._limits.max_timeout_ms
        permit = Permit(self, model, priority, arrival + min(timeout_ms, most_ms) / 1e3)
        if timeout_ms > most_ms:
            permit.shortened = f"; the maximum timeout is {most_ms:g} ms (--max-timeout-ms)"
        return permit

    def reserve(self, tokens: int, now: float) -> Permit:
        """Admits work without a deadline that does not reach an engine; rejects it as `admit` does."""
        permit = Permit(self, ModelIndex(0), DEFAULT_PRIORITY, inf)
        self.take(permit, tokens, None, now)
        return permit

    def take(self, permit: Permit, tokens: int, demand: Demand | None, now: float) -> None:
        """Sets the tokens that a permit holds, or rejects its request: the only place for both.

        Args:
            permit: The request's permit.
            tokens: Estimated or exact.
            demand: Predicts when it would be answered; None if it need not queue or is not known yet.
            now: The time.
        """
        predictor, deadline, priority, pool = self.predictor, permit.due, permit.priority, permit.pool
        if tokens > pool.capacity:
            raise InvalidRequest(
                f"the request has about {tokens} tokens{_of(priority)}; the maximum is"
                f" {pool.capacity}{_flag(priority)}: send fewer per request"
            )
        if pool.in_flight - permit.tokens + tokens > pool.capacity:
            pool.refusals["queue_full"] += 1
            held = f"{pool.in_flight} of {pool.capacity} tokens{_of(priority)}{_flag(priority)}"
            raise self._overloaded(f"the queue is full: {held}; try again later", priority, now)
        least_us = 0.0 if demand is None else demand.least_us
        if permit.deadline <= now:
            raise DeadlineExceeded("the deadline passed before the request was queued")
        if now + least_us / 1e6 > deadline:
            pool.refusals["hopeless"] += 1
            least_ms = (least_us + permit.after_us) / 1e3
            raise DeadlineExceeded(
                f"the deadline cannot be met: this request takes about {least_ms:.1f} ms on an idle server,"
                f" and {max(0.0, permit.deadline - now) * 1e3:.1f} ms are left{permit.shortened}"
            )
        if permit.behind_us and now + permit.behind_us / 1e6 > deadline:
            pool.refusals["predicted_late"] += 1
            raise self._overloaded(_LATE, priority, now, permit.behind_us / 1e6)
        if (
            demand is not None
            and not predictor.idle
            and not predictor.is_early(demand, priority, deadline, now)
            and predictor.finish_at(demand, priority, deadline, now) > deadline
        ):
            if predictor.back_at is not None:
                pool.refusals["not_ready"] += 1
                late = "the engine is restarting, and the answer would miss the deadline; try again"
                raise NotReady(late, retry_after_s=max(_MIN_RETRY_S, predictor.drain_s(now, priority)))
            pool.refusals["predicted_late"] += 1
            raise self._overloaded(_LATE, priority, now)
        pool.in_flight += tokens - permit.tokens
        permit.tokens = tokens

    def _overloaded(self, message: str, priority: int, now: float, least_s: float = _MIN_RETRY_S) -> Overloaded:
        drain_s = max(least_s, self.predictor.drain_s(now, priority))
        kind = BulkOverloaded if priority == BULK else Overloaded
        return kind(message, retry_after_s=drain_s, jitter=self._jitter())


def _of(priority: int) -> str:
    return " of bulk work" if priority == BULK else ""


def _flag(priority: int) -> str:
    return "" if priority == BULK else " (--max-queue-tokens)"


def _least_lengths(sizes: Sequence[int], longest: int | None) -> list[int]:
    """Minimum lengths of inputs: half of the estimate; few are shorter."""
    lengths = [max(1, estimate_tokens([size], None) // 2) for size in sizes]
    return lengths if longest is None else [min(length, longest) for length in lengths]
