"""Limits of open connections, replacement of idle ones, and the credit that each peer has used."""

from __future__ import annotations

import ipaddress
import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

from bertserve.serving.errors import StartupError
from bertserve.serving.net.ports import descriptor_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from bertserve.serving.settings import Settings

_IPV6_NETWORK = 64
"""Prefix length of the IPv6 network that counts as one peer, which chooses the other bits freely."""

_MAX_PEERS = 4096
_MIN_SHARE = 2
"""Divisor of the credit for a new connection's minimum: half a credit, whatever its peer's debt. The connection may
belong to another client with many concurrent calls."""

_MIN_DEBT_SHARE = 16
"""Divisor of the credit for the smallest recorded debt."""

_MAX_CREDITS = 10
"""Maximum recorded debt, in credits. A peer that stops has no debt after about 10 s."""

_MAX_WAIT_S = 1.0


def peer_of(address: str) -> str:
    """The peer of an address: an IPv4 address, or the network of an IPv6 address."""
    if ":" not in address:
        return address
    parsed = ipaddress.IPv6Address(address.partition("%")[0])
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((parsed, _IPV6_NETWORK), strict=False))


class PeerDebts:
    """Credit that peers used on closed connections, so that a new connection does not start with full credit.

    A debt falls at the rate at which a connection regains credit. While it lasts, new connections start with less
    credit, but at least half. If the debt exceeds one credit, they also wait for up to a second before they are read.
    """

    def __init__(self, credit: int, credit_per_s: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._credit = credit
        self._per_s = credit_per_s
        self._clock = clock
        self._debts: dict[str, tuple[float, float]] = {}
        self._listeners: list[Callable[[str, float], None]] = []

    def subscribe(self, listener: Callable[[str, float], None]) -> None:
        """Calls the listener with each charge and its peer."""
        self._listeners.append(listener)

    def charge(self, peer: str, spent: float) -> None:
        """Adds the credit that a closed connection has used."""
        if spent >= self._credit / _MIN_DEBT_SHARE:
            self.add(peer, spent)
            for listener in self._listeners:
                listener(peer, spent)

    def add(self, peer: str, spent: float) -> None:
        """Adds credit that was used, here or in another process."""
        debt = min(_MAX_CREDITS * self._credit, self._owed(peer) + spent)
        self._debts.pop(peer, None)
        if len(self._debts) >= _MAX_PEERS:
            del self._debts[next(iter(self._debts))]
        self._debts[peer] = debt, self._clock()

    def present(self) -> list[tuple[str, float]]:
        """Each peer with its debt."""
        return [(peer, owed) for peer in self._debts if (owed := self._owed(peer))]

    def begin(self, peer: str) -> tuple[int, float]:
        """The credit of a new connection, and the seconds that it must wait."""
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
"""Maximum connections of the metrics port, reserved for it."""

_MAX_CONNECTIONS = 10_000

_OWN_FILES = 64
"""File descriptors of the server itself: ports, event loop, files it reads, cache locks."""

_REFUSED = 32
"""Refused connections of both HTTP ports that stay open for a moment. Other ports send no message to refused
connections."""

_LEAVING = 32
"""Connections that were closed to make room but still hold a descriptor."""

_ENGINES = 5
"""Descriptors per engine socket: one for each of two running engines, and three for one that starts (both ends and a
copy)."""

_ENGINE_SOCKETS = 2
"""Sockets of an engine besides those of its threads: control and the wide lane."""

_IDLE_S = 0.5
"""A connection that has been idle for a shorter time is between two requests, or about to send its first."""

_LOOK_S = 0.25
"""Interval between searches for idle connections."""

_TELL_S = 10.0


class Closable(Protocol):
    """A connection that may be closed to make room."""

    @property
    def descriptor(self) -> int:
        """Descriptor of its socket."""

    def idle_since(self) -> tuple[bool, float] | None:
        """Whether it was ever used, and since when it is idle (the loop's time); None if it is busy."""

    def close_if_idle(self) -> None:
        """Closes it at once, because it is idle."""


class ConnectionLimiter:
    """Limits the open connections of one port, or of several together.

    At the limit, a new connection replaces an idle one: first those that were never used, then the longest idle. If
    none is idle, the new connection is refused.

    Attributes:
        limit: Maximum open connections.
        refused: Refused new connections.
        displaced: Idle connections that were closed for new ones.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self.refused = 0
        self.displaced = 0
        self._clock = clock
        self._taken = 0
        self._groups: list[Callable[[], Iterable[Closable]]] = []
        self._idle: deque[tuple[tuple[bool, float], Closable]] = deque()
        self._looked_at = self._told_at = float("-inf")

    @classmethod
    def of(cls, settings: Settings, threads: int) -> ConnectionLimiter:
        """The limiter of a server whose engines have this number of threads.

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
                f"{what} needs {least} open files, but the limit is {descriptor_limit():,}; raise the hard"
                f" limit (`ulimit -Hn`, systemd's LimitNOFILE=)"
            )
        return cls(wanted or min(left, _MAX_CONNECTIONS))

    @property
    def taken(self) -> int:
        """Connections with an open descriptor."""
        return self._taken

    def follow(self, connections: Callable[[], Iterable[Closable]]) -> None:
        self._groups.append(connections)

    def take(self) -> Callable[[], None] | None:
        """Admits a connection. Returns the function that releases its slot, or None if refused."""
        if self._taken >= self.limit and (self._taken >= self.limit + _LEAVING or not self.make_room()):
            self.refused += 1
            self._tell("rejected a connection: all connections are in use (--max-connections)")
            return None
        self._taken += 1

        def release() -> None:
            self._taken -= 1

        return release

    def make_room(self) -> bool:
        """Closes the best idle connection to replace; False if none is idle."""
        now = self._clock()
        if not self._idle and now - self._looked_at >= _LOOK_S:
            self._looked_at = now
            self._idle.extend(self.idle())
        while self._idle:
            idle_since, connection = self._idle.popleft()
            if connection.idle_since() != idle_since:
                continue  # used or closed in the meantime
            connection.close_if_idle()
            self.displaced += 1
            self._tell("closed an idle connection to make room for a new one (--max-connections)")
            return True
        return False

    def idle(self) -> list[tuple[tuple[bool, float], Closable]]:
        """Idle connections, each since when, the best one to replace first."""
        found = [(idle_since, one) for group in self._groups for one in group() if (idle_since := one.idle_since())]
        return sorted([pair for pair in found if self._clock() - pair[0][1] >= _IDLE_S], key=lambda pair: pair[0])

    def _tell(self, what: str) -> None:
        now = self._clock()
        if now - self._told_at >= _TELL_S:
            self._told_at = now
            log.warning(
                "%s; %d of %d open, %d rejected and %d closed in total",
                *(what, self._taken, self.limit, self.refused, self.displaced),
            )
