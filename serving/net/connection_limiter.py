"""How many connections there may be at once, which gives its place to a new one, and what each peer has used up."""

from __future__ import annotations

import ipaddress
import logging
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, Protocol

from serving.errors import StartupError
from serving.net.ports import descriptor_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from serving.settings import Settings

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


log = logging.getLogger("bertserve.net")

MAX_PROBE_CONNECTIONS = 64
"""Connections of the metrics port, which nobody else can take."""

_MAX_CONNECTIONS = 10_000

_OWN_FILES = 64
"""Descriptors of the server itself: ports, the loop, files that are read, the caches' locks."""

_REFUSED = 32
"""Refused connections of both ports of HTTP that stay open for a moment; nothing is said on the others."""

_LEAVING = 32
"""Connections that were closed to make room, and whose descriptors are not free yet."""

_ENGINES = 5
"""For each socket of an engine: while another one starts beside two that are there, it has both ends and a copy."""

_ENGINE_SOCKETS = 2
"""Of an engine beside those of its threads: control and the wide lane."""

_IDLE_S = 0.5
"""A connection that is idle for less is between two requests, or about to send its first."""

_LOOK_S = 0.25
"""How often all connections are looked through for idle ones."""

_TELL_S = 10.0


class Closable(Protocol):
    """A connection, as it is asked when there are too many."""

    def idle_since(self) -> tuple[bool, float] | None:
        """Whether it was ever used, and since when (the loop's time) nothing is under way; None where something is."""

    def close_if_idle(self) -> None:
        """Closes it at once, since it is idle."""


class ConnectionLimiter:
    """How many connections there may be at once, on one port or on several together.

    When all places are taken, a new connection takes that of an idle one: first of those that were never used, then of
    those that have been idle the longest. Where none is idle the new one is refused.

    Attributes:
        limit: How many there are.
        refused: New connections that were refused: because all places were taken (`full`), or all of their peer's.
        displaced: Idle connections that were closed for new ones.
    """

    def __init__(self, limit: int, per_peer: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        """`per_peer` bounds the connections from one address (of IPv6: one network of 64 bits); 0: nothing does."""
        self.limit = limit
        self.refused = {"full": 0, "peer": 0}
        self.displaced = 0
        self._per_peer = per_peer
        self._clock = clock
        self._taken = 0
        self._peers: Counter[str] = Counter()
        self._groups: list[Callable[[], Iterable[Closable]]] = []
        self._idle: deque[tuple[tuple[bool, float], Closable]] = deque()
        self._looked_at = self._told_at = float("-inf")

    @classmethod
    def of(cls, settings: Settings, threads: int) -> ConnectionLimiter:
        """The places of a server whose engines have so many threads.

        Raises:
            StartupError: The limit of open files is too low.
        """
        own = MAX_PROBE_CONNECTIONS + _OWN_FILES + _LEAVING + _REFUSED
        own += _ENGINES * (_ENGINE_SOCKETS + threads)
        left, wanted = descriptor_limit() - own, settings.max_connections
        if left < (wanted or 1):
            least = f"{own + (wanted or 1):,}"
            what = f"--max-connections {wanted}" if wanted else "the server"
            raise StartupError(
                f"{what} needs {least} open files, and this process may have {descriptor_limit():,}: raise the hard"
                f" limit (`ulimit -Hn`, systemd's LimitNOFILE=)"
            )
        return cls(wanted or min(left, _MAX_CONNECTIONS), settings.max_connections_per_peer)

    @property
    def taken(self) -> int:
        """Connections whose descriptors are open."""
        return self._taken

    def follow(self, connections: Callable[[], Iterable[Closable]]) -> None:
        self._groups.append(connections)

    def take(self, address: str) -> Callable[[], None] | None:
        """Takes a place for a connection from an address; returns what gives it back, or None where it is refused."""
        peer = ""
        if self._per_peer:
            peer = peer_of(address)
            if self._peers[peer] >= self._per_peer:
                self.refused["peer"] += 1
                self._tell("refused a connection: its address has as many as one may have (--max-connections-per-peer)")
                return None
        if self._taken >= self.limit and (self._taken >= self.limit + _LEAVING or not self.make_room()):
            self.refused["full"] += 1
            self._tell("refused a connection: all places are taken and none is idle (--max-connections)")
            return None
        self._taken += 1
        if self._per_peer:
            self._peers[peer] += 1

        def release() -> None:
            self._taken -= 1
            if self._per_peer:
                self._peers[peer] -= 1
                if not self._peers[peer]:
                    del self._peers[peer]

        return release

    def make_room(self) -> bool:
        """Closes the connection that can best be spared; False where none is idle."""
        now = self._clock()
        if not self._idle and now - self._looked_at >= _LOOK_S:
            self._looked_at = now
            found = [(idle_since, one) for group in self._groups for one in group() if (idle_since := one.idle_since())]
            idle = [pair for pair in found if now - pair[0][1] >= _IDLE_S]
            self._idle.extend(sorted(idle, key=lambda pair: pair[0]))
        while self._idle:
            idle_since, connection = self._idle.popleft()
            if connection.idle_since() != idle_since:
                continue  # it has been used or closed since
            connection.close_if_idle()
            self.displaced += 1
            self._tell("closed an idle connection for a new one: all places are taken (--max-connections)")
            return True
        return False

    def _tell(self, what: str) -> None:
        now = self._clock()
        if now - self._told_at >= _TELL_S:
            self._told_at = now
            log.warning(
                "%s; %d of %d are open, and so far %d were refused and %d closed",
                *(what, self._taken, self.limit, sum(self.refused.values()), self.displaced),
            )
