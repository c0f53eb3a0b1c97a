from __future__ import annotations

import pytest

from bertserve.serving.net.connection_limiter import PeerDebts, peer_of

CREDIT, PER_S = 30_000, 30_000


class Debts(PeerDebts):
    """Those of a server whose time the test says."""

    def __init__(self) -> None:
        self.now = 100.0
        super().__init__(CREDIT, PER_S, lambda: self.now)


@pytest.mark.parametrize(
    ("address", "peer"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_what_counts_as_one_peer(address: str, peer: str) -> None:
    """An address, or the network of 64 bits that one owner of IPv6 has."""
    assert peer_of(address) == peer


def test_a_peer_that_comes_back_brings_no_fresh_credit() -> None:
    """It begins with what is left, though never with less than half, and gets it back with time."""
    debts = Debts()
    assert debts.begin("a") == (CREDIT, 0.0)
    debts.charge("a", 12_000)
    assert debts.begin("a") == (18_000, 0.0)
    debts.charge("a", 18_000)
    assert debts.begin("a") == (CREDIT // 2, 0.0)
    assert debts.begin("b") == (CREDIT, 0.0)
    debts.now += 0.75
    assert debts.begin("a") == (22_500, 0.0)
    debts.now += 0.25
    assert debts.begin("a") == (CREDIT, 0.0)


def test_a_peer_that_goes_on_waits() -> None:
    """For as long as its debt exceeds one credit, at most a second; ten seconds after it stops it is as any other."""
    debts = Debts()
    debts.charge("a", CREDIT)
    debts.charge("a", 15_000)
    assert debts.begin("a") == (CREDIT // 2, 0.5)
    for _ in range(1000):
        debts.charge("a", CREDIT)
    assert debts.begin("a") == (CREDIT // 2, 1.0)
    debts.now += 10
    assert debts.begin("a") == (CREDIT, 0.0)


def test_what_is_remembered_is_bounded() -> None:
    """Nothing of peers that used little up, and of the others the last 4,096."""
    debts = Debts()
    for _ in range(1000):
        debts.charge("modest", CREDIT // 20)
    assert debts.begin("modest") == (CREDIT, 0.0)
    for number in range(4097):
        debts.charge(str(number), CREDIT)
    assert debts.begin("0") == (CREDIT, 0.0)
    assert debts.begin("1") == (CREDIT // 2, 0.0)
