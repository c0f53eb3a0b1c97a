"""The budget of bytes that connections share."""

from __future__ import annotations

from bertserve.serving.net.buffers import BufferBudget
from bertserve.serving.settings import Settings


def test_a_share_takes_within_the_budget_and_its_own_part() -> None:
    """What goes beyond either is refused, counted, and changes nothing."""
    budget = BufferBudget(100, 60)
    first, second = budget.share(), budget.share()
    assert first.take(60)
    assert not first.take(1)
    assert not second.take(41)
    assert second.take(40)
    assert (budget.used, first.held, second.held, budget.refusals) == (100, 60, 40, 2)


def test_one_connection_may_hold_half() -> None:
    """Of 64 MiB by default, and of what `--buffer-limit-mb` says."""
    for words, limit in (([], 64 << 20), (["--buffer-limit-mb", "16"], 16 << 20)):
        budget = BufferBudget.of(Settings.load(words, {}))
        first = budget.share()
        assert (budget.limit_bytes, first.take(limit // 2), first.take(1)) == (limit, True, False)
        assert budget.share().take(limit // 2)


def test_what_is_given_back_can_be_taken_again() -> None:
    """No more is given back than is held, and the end of a connection gives back all."""
    budget = BufferBudget(100, 100)
    share = budget.share()
    assert share.take(100)
    share.give(30)
    assert budget.share().take(30)
    share.close()
    share.give(70)
    assert (budget.used, share.held) == (30, 0)


def test_what_is_made_already_is_let_through_once() -> None:
    """A reply larger than the budget can be sent, and nothing beside it."""
    budget = BufferBudget(100, 50)
    share = budget.share()
    assert share.take_made(500)
    assert not budget.share().take_made(1)
    assert not budget.share().take(1)
    share.close()
    assert budget.used == 0
