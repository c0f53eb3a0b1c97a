from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertserve.serving.errors import DeadlineExceeded, InvalidRequest, Overloaded
from bertserve.serving.records import DEFAULT_PRIORITY, ModelIndex
from bertserve.serving.scheduling.admission import Admission, AdmissionLimits, Permit, estimate_tokens
from bertserve.serving.scheduling.batcher import Policy
from bertserve.serving.scheduling.load_predictor import LoadPredictor
from tests.support.costs import constant, model_costs

FIRST = ModelIndex(0)


def bound(capacity: int) -> Admission:
    """An admission of so many tokens, where nothing runs and every batch takes 10 ms."""
    predictor = LoadPredictor(Policy(max_batch_tokens=256, batch_invariant=[True], narrow=[False]))
    predictor.costs = [model_costs(constant(10_000))]
    return Admission(predictor, AdmissionLimits(capacity, 1000.0, 5000.0), jitter=lambda: 0.0)


def admit(
    admission: Admission, size: int = 40, inputs: int = 1, timeout_ms: float | None = None, longest: int | None = 512
) -> Permit:
    return admission.admit(
        *(FIRST, [size // inputs] * inputs),
        longest=longest,
        arrival=7.0,
        timeout_ms=timeout_ms,
        priority=DEFAULT_PRIORITY,
        now=7.1,
    )


@pytest.mark.parametrize(
    ("timeout_ms", "inputs", "deadline"), [(500.0, 1, 7.5), (None, 1, 8.0), (1e9, 1, 12.0), (None, 100, 10.0)]
)
def test_a_deadline_is_set_once(timeout_ms: float | None, inputs: int, deadline: float) -> None:
    """From the arrival: the client's own, the default, at most the longest, and more than the default by its cost."""
    with admit(bound(10_000), 40 * inputs, inputs, timeout_ms) as permit:
        assert permit.deadline == pytest.approx(deadline)
        permit.confirm([8] * inputs, 7.1)
        assert permit.deadline == pytest.approx(deadline)


def test_a_deadline_that_has_passed_lets_nothing_in() -> None:
    """Neither at the door nor when the lengths are known."""
    admission = bound(1000)
    with pytest.raises(DeadlineExceeded, match="deadline passed"):
        admit(admission, timeout_ms=100.0)
    with admit(admission, timeout_ms=200.0) as permit, pytest.raises(DeadlineExceeded, match="deadline passed"):
        permit.confirm([8], 7.2)
    assert admission.online.in_flight == 0
    assert not any(admission.online.refusals.values())


def test_what_will_be_cut_off_is_not_counted() -> None:
    """A text takes no more tokens than the model, unless it is read in windows."""
    admission = bound(10_000)
    with admit(admission, 20_000) as permit:
        assert permit.tokens == 512
    with admit(admission, 20_000, longest=None) as permit:
        assert permit.tokens == 5002


def test_one_long_text_does_not_count_for_the_short_ones_beside_it() -> None:
    """It is cut, and they are as short as they are; so neither queue nor deadline is asked for more."""
    sizes = [16_000, *[40] * 31]
    assert estimate_tokens(sizes, 512) == 512 + 31 * 12
    admission = bound(1000)
    permit = admission.admit(FIRST, sizes, longest=512, arrival=7.0, timeout_ms=None, priority=2, now=7.0)
    with permit:
        assert permit.tokens == 512 + 31 * 12


@given(st.lists(st.integers(0, 1 << 20), min_size=1, max_size=300), st.integers(8, 8192), st.integers(16, 1 << 20))
@settings(max_examples=300)
def test_an_idle_server_never_asks_to_come_back_later(sizes: list[int], longest: int, capacity: int) -> None:
    """What is refused there would be refused for ever: it is told so, and nothing that the model would cut counts."""
    admission = bound(capacity)
    tokens = estimate_tokens(sizes, longest)
    assert tokens <= sum(min(longest, size // 4 + 3) for size in sizes)
    assert tokens <= longest * len(sizes)
    with pytest.raises(InvalidRequest, match="fewer per request") if tokens > capacity else contextlib.nullcontext():
        admission.admit(FIRST, sizes, longest=longest, arrival=0.0, timeout_ms=None, priority=2, now=0.0)
        assert admission.online.in_flight == tokens


def test_an_estimate_is_a_quarter_of_the_bytes_and_two_tokens_an_input() -> None:
    """As in English prose; the special tokens of each input are counted."""
    assert estimate_tokens([100, 200, 100], None) == 106


def test_a_permit_is_given_back_when_its_block_fails() -> None:
    admission = bound(100)
    with contextlib.suppress(RuntimeError), admission.reserve(60, 0.0):
        raise RuntimeError
    assert admission.online.in_flight == 0


def test_more_than_the_whole_queue_is_the_clients_fault() -> None:
    """Waiting would not help; so it is no overload."""
    with pytest.raises(InvalidRequest, match=r"101 tokens.* maximum is 100"):
        bound(100).reserve(101, 0.0)


@given(st.lists(st.tuples(st.sampled_from(["take", "resize", "free"]), st.integers(0, 12), st.integers(0, 5))))
@settings(max_examples=300)
def test_what_is_in_flight_is_what_the_permits_hold(steps: list[tuple[str, int, int]]) -> None:
    """The bound is exact, a count replaces an estimate, and what does not fit changes nothing."""
    admission = bound(10)
    held: list[Permit] = []
    for what, tokens, which in steps:
        place = which % len(held) if held else 0
        if what == "free":
            if held:
                with held.pop(place):
                    pass
        elif what == "take" or held:
            others = admission.online.in_flight - (held[place].tokens if what == "resize" else 0)
            refusal = InvalidRequest if tokens > 10 else Overloaded if others + tokens > 10 else None
            with pytest.raises(refusal) if refusal else contextlib.nullcontext():
                if what == "take":
                    held.append(admission.reserve(tokens, 0.0))
                else:
                    held[place].confirm([tokens], 0.0)
            assert admission.online.in_flight == others + tokens or refusal
        assert admission.online.in_flight == sum(permit.tokens for permit in held) <= 10
