"""Peers: what counts as one, and the work that one has been done for nothing on connections that are over."""

from __future__ import annotations

import ipaddress
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_IPV6_NETWORK = 64
"""Bits of an IPv6 address that name a peer: the rest is its own to choose."""

_MAX_PEERS = 4096
_MIN_SHARE = 2
"""A new connection has half a credit, whatever its peer owes: it may be another client's, with many calls at once."""

_MIN_DEBT_SHARE = 16
"""Less than a sixteenth of it is not remembered."""

_MAX_CREDITS = 10
"""More is not remembered either: a peer that stops is as good as any other 10 s later, or so."""

_MAX_WAIT_S = 1.0


def peer_of(address: str) -> str:
    """What counts as one peer: an IPv4 address, or the network of an IPv6 address."""
    if ":" not in address:
        return address
    parsed = ipaddress.IPv6Address(address.partition("%")[0])
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((parsed, _IPV6_NETWORK), strict=False))


class PeerDebts:
    """What peers have used up of the credit of connections that are over, so that a new one brings no fresh one.

    A debt falls by what a connection is given back in a second. As long as it lasts, new connections begin with so much
    less credit, though never with less than half; beyond one whole credit each of them also waits, for a second at
    most, before it is read.
    """

    def __init__(self, credit: int, credit_per_s: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._credit = credit
        self._per_s = credit_per_s
        self._clock = clock
        self._debts: dict[str, tuple[float, float]] = {}

    def charge(self, peer: str, spent: float) -> None:
        """A connection is over that has used up so much."""
        if spent < self._credit / _MIN_DEBT_SHARE:
            return
        debt = min(_MAX_CREDITS * self._credit, self._owed(peer) + spent)
        self._debts.pop(peer, None)
        if len(self._debts) >= _MAX_PEERS:
            del self._debts[next(iter(self._debts))]
        self._debts[peer] = debt, self._clock()

    def begin(self, peer: str) -> tuple[int, float]:
        """The credit of a new connection, and for how many seconds it waits."""
        debt = self._owed(peer)
        credit = max(self._credit // _MIN_SHARE, self._credit - round(debt))
        return credit, min(_MAX_WAIT_S, max(0.0, debt - self._credit) / self._per_s)

    def _owed(self, peer: str) -> float:
        if peer not in self._debts:
            return 0.0
        debt, since = self._debts[peer]
        return max(0.0, debt - self._per_s * (self._clock() - since))
