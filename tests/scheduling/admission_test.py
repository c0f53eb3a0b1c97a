from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.errors import InvalidRequest, Overloaded
from serving.scheduling.admission import Admission, Permit, estimate_tokens


def test_an_estimate_is_a_quarter_of_the_bytes_and_two_tokens_an_input() -> None:
    """As in English prose; the special tokens of each input are counted."""
    assert estimate_tokens(400, 3) == 106


def test_a_permit_holds_its_tokens_until_its_block_ends() -> None:
    """What was taken is given back."""
    admission = Admission(100)
    with admission.acquire(60) as permit:
        assert (admission.in_flight, permit.tokens) == (60, 60)
    assert (admission.in_flight, permit.tokens) == (0, 0)


def test_a_permit_is_given_back_when_its_block_fails() -> None:
    """An error on the way leaves nothing behind."""
    admission = Admission(100)
    with contextlib.suppress(RuntimeError), admission.acquire(60):
        raise RuntimeError
    assert admission.in_flight == 0


def test_the_last_token_is_given_and_not_one_more() -> None:
    """The bound is exact."""
    admission = Admission(100)
    with admission.acquire(60), admission.acquire(40):
        with pytest.raises(Overloaded):
            admission.acquire(1)
        assert admission.in_flight == 100


def test_what_does_not_fit_takes_nothing() -> None:
    """A refusal is all or nothing: smaller requests still fit beside it."""
    admission = Admission(100)
    with admission.acquire(60):
        with pytest.raises(Overloaded):
            admission.acquire(41)
        with admission.acquire(40):
            assert admission.in_flight == 100
    assert admission.in_flight == 0


def test_more_than_the_whole_queue_is_the_clients_fault() -> None:
    """Waiting would not help; so it is no overload."""
    with pytest.raises(InvalidRequest, match=r"101 tokens.* holds 100"):
        Admission(100).acquire(101)


@pytest.mark.parametrize("exact", [5, 60, 100])
def test_the_exact_count_replaces_the_estimate(exact: int) -> None:
    """A permit is resized, not added to."""
    admission = Admission(100)
    with admission.acquire(50) as permit:
        permit.resize(exact)
        assert (admission.in_flight, permit.tokens) == (exact, exact)
    assert admission.in_flight == 0


def test_a_count_that_does_not_fit_keeps_the_estimate_until_the_block_ends() -> None:
    """A failed resize changes nothing, and what was held before is given back."""
    admission = Admission(100)
    with admission.acquire(30), admission.acquire(50) as permit:
        with pytest.raises(Overloaded):
            permit.resize(71)
        assert (admission.in_flight, permit.tokens) == (80, 50)
    assert admission.in_flight == 0


def test_a_count_beyond_the_whole_queue_is_refused_at_resize_too() -> None:
    """An estimate may have been far too low."""
    admission = Admission(100)
    with admission.acquire(1) as permit, pytest.raises(InvalidRequest):
        permit.resize(101)
    assert admission.in_flight == 0


def test_the_refusal_is_made_by_whoever_knows_when_there_will_be_room() -> None:
    """The bound itself knows no times."""
    admission = Admission(10, lambda message: Overloaded(message, retry_after_s=4.2))
    with admission.acquire(10), pytest.raises(Overloaded, match="10 of 10 tokens") as refused:
        admission.acquire(1)
    assert refused.value.retry_after_s == 4.2


steps = st.lists(st.tuples(st.sampled_from(["take", "resize", "free"]), st.integers(0, 12), st.integers(0, 5)))


@given(steps)
@settings(derandomize=True, max_examples=300, deadline=None)
def test_what_is_in_flight_is_what_the_permits_hold(steps: list[tuple[str, int, int]]) -> None:
    """Over any sequence of requests, never more than the capacity and never a token lost."""
    admission = Admission(10)
    held: list[Permit] = []
    for what, tokens, which in steps:
        with contextlib.suppress(Overloaded, InvalidRequest):
            if what == "take":
                held.append(admission.acquire(tokens))
            elif held and what == "resize":
                held[which % len(held)].resize(tokens)
            elif held:
                with held.pop(which % len(held)):
                    pass
        assert admission.in_flight == sum(permit.tokens for permit in held) <= 10
