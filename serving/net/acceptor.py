"""A listening socket and the connections it accepts: as many as there are places for, over TLS where that is on."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from collections import Counter, deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

from serving.errors import StartupError
from serving.net.farewell import Farewell
from serving.net.peers import peer_of
from serving.net.ports import BACKLOG, descriptor_limit
from serving.unawaited import guarded, start

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterable

    from serving.security.tls import Tls
    from serving.settings import Settings

log = logging.getLogger("bertserve.net")

PROBE_PLACES = 64
"""Connections of the metrics port, which nobody else can take."""

_MOST_PLACES = 10_000
_OWN_FILES = 64
"""Descriptors of the server itself: ports, the loop, files that are read, the caches' locks."""

_LEAVING = 32
"""Connections that were closed to make room, and whose descriptors are not free yet."""

_ENGINES = 5
"""For each socket of an engine: while another one starts beside two that are there, it has both ends and a copy."""

_ENGINE_SOCKETS = 2
"""Of an engine beside those of its threads: control and the wide lane."""

_ACCEPTS = 64
"""At most so many new connections in one turn of the loop: those that are there must have theirs."""

_IDLE_S = 0.5
"""A connection that is idle for less is between two requests, or about to send its first."""

_REFUSALS = 16
"""Refused connections of a port that stay open until their clients can have read why; further ones close at once."""

_REFUSING_PORTS = 2
"""Those of HTTP; nothing is said on the others, nor over TLS."""

_LINGER_S = 1.0
"""How long what a refused client still sends is read and thrown away, so that it can read the refusal."""

_LOOK_S = 0.25
"""How often all connections are looked through for idle ones."""

_TELL_S = 10.0
_PAUSE_S = 0.1
_NO_DESCRIPTOR = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Closable(Protocol):
    """A connection, as it is asked when there are too many."""

    def idleness(self) -> tuple[bool, float] | None:
        """Whether it was ever used, and since when (the loop's time) nothing is under way; None where something is."""

    def give_way(self) -> None:
        """Closes it at once, since it is idle."""


class Places:
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
    def of(cls, settings: Settings, threads: int) -> Places:
        """The places of a server whose engines have so many threads.

        Raises:
            StartupError: The limit of open files is too low.
        """
        own = PROBE_PLACES + _OWN_FILES + _LEAVING + _REFUSING_PORTS * _REFUSALS
        own += _ENGINES * (_ENGINE_SOCKETS + threads)
        left, wanted = descriptor_limit() - own, settings.max_connections
        if left < (wanted or 1):
            least = f"{own + (wanted or 1):,}"
            what = f"--max-connections {wanted}" if wanted else "the server"
            raise StartupError(
                f"{what} needs {least} open files, and this process may have {descriptor_limit():,}: raise the hard"
                f" limit (`ulimit -Hn`, systemd's LimitNOFILE=)"
            )
        return cls(wanted or min(left, _MOST_PLACES), settings.max_connections_per_peer)

    @property
    def taken(self) -> int:
        """Connections whose descriptors are open."""
        return self._taken

    def follow(self, connections: Callable[[], Iterable[Closable]]) -> None:
        """Learns where to look for idle connections."""
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

        def give_back() -> None:
            self._taken -= 1
            if self._per_peer:
                self._peers[peer] -= 1
                if not self._peers[peer]:
                    del self._peers[peer]

        return give_back

    def make_room(self) -> bool:
        """Closes the connection that can best be spared; False where none is idle."""
        now = self._clock()
        if not self._idle and now - self._looked_at >= _LOOK_S:
            self._looked_at = now
            found = [(idleness, one) for group in self._groups for one in group() if (idleness := one.idleness())]
            idle = [pair for pair in found if now - pair[0][1] >= _IDLE_S]
            self._idle.extend(sorted(idle, key=lambda pair: pair[0]))
        while self._idle:
            idleness, connection = self._idle.popleft()
            if connection.idleness() != idleness:
                continue  # it has been used or closed since
            connection.give_way()
            self.displaced += 1
            self._tell("closed an idle connection for a new one: all places are taken (--max-connections)")
            return True
        return False

    def _tell(self, what: str) -> None:
        """Says it in the log, though not each time."""
        now = self._clock()
        if now - self._told_at >= _TELL_S:
            self._told_at = now
            log.warning(
                "%s; %d of %d are open, and so far %d were refused and %d closed",
                *(what, self._taken, self.limit, sum(self.refused.values()), self.displaced),
            )


class _Accepted(socket.socket):
    """An accepted socket, which gives its place back with its descriptor.

    asyncio closes the socket of a transport that ends; uvloop detaches it and closes the descriptor itself. It can be
    closed for another one as long as it is no connection yet: over TLS that is until the end of the handshake.
    """

    __slots__ = ("_give_back", "_since", "opening")

    def __init__(self, opened: socket.socket, give_back: Callable[[], None]) -> None:
        super().__init__(opened.family, opened.type, opened.proto, opened.detach())
        self._give_back: Callable[[], None] | None = give_back
        self._since = time.monotonic()
        self.opening: asyncio.Task[None] | None = None

    def close(self) -> None:
        self._leave()
        super().close()

    def detach(self) -> int:
        self._leave()
        return super().detach()

    def idleness(self) -> tuple[bool, float] | None:
        return None if self.opening is None or self.opening.done() else (False, self._since)

    def give_way(self) -> None:
        if self.opening is not None:
            self.opening.cancel()

    def _leave(self) -> None:
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


class _Refused(asyncio.Protocol):
    """A connection without a place: it is told so, and closed once its client has had the time to read that."""

    def __init__(self, all_of_them: set[_Refused], refusal: bytes) -> None:
        self._all = all_of_them
        self._refusal = refusal
        all_of_them.add(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        told = cast("asyncio.Transport", transport)
        told.write(self._refusal)
        self._farewell = Farewell(told, quiet_s=_LINGER_S, pace_s=_LINGER_S)

    def data_received(self, data: bytes) -> None:
        self._farewell.received(len(data))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  how it ended does not matter
        self._farewell.cancel()
        self._all.discard(self)


class Acceptor:
    """One port; it owns the listening socket, and accepts nothing before `start`.

    Args:
        places: What its connections take places of; without it there is no bound.
        refusal: What a connection for which there is no place is told, without TLS.
        plain: Makes what a client is told that sends a request where it should begin TLS; None: it is told nothing.
    """

    def __init__(
        self,
        opened: socket.socket,
        connection: Callable[[], asyncio.Protocol],
        tls: Tls | None,
        protocol: str,
        *,
        places: Places | None = None,
        refusal: bytes = b"",
        plain: Callable[[], bytes] | None = None,
    ) -> None:
        self._socket = opened
        self._connection = connection
        self._tls = tls
        self._protocol = protocol
        self._places = places
        self._refusal = refusal if tls is None else b""
        self._plain = plain
        self._context: ssl.SSLContext | None = None
        self._opening: set[_Accepted] = set()
        self._refused: set[_Refused] = set()
        self._accepts = 1
        self._told_at = float("-inf")
        if places is not None:
            places.follow(lambda: self._opening)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._socket.getsockname()[:2]
        return host, port

    async def start(self) -> None:
        self._context = self._read_context()
        self._socket.setblocking(False)
        self._listen()

    async def renew(self) -> None:
        """Reads the certificates again, for new connections; those that are open go on.

        A used context cannot forget an authority or a session, so a new one takes its place.

        Raises:
            CredentialsError: They cannot be used; nothing changes.
        """
        self._context = self._read_context()

    @property
    def opening(self) -> int:
        """Sockets that have been accepted and are no connections yet, or are refused and still open."""
        return len(self._opening) + len(self._refused)

    def close(self) -> None:
        """Takes the connections that wait to be accepted, and then no more.

        To their clients they have been open for a while: they may have sent a request, which a closed port would reset.
        """
        if self._socket.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._accepts = BACKLOG
            guarded(self._socket.close, self._accept)
            self._socket.close()

    def _read_context(self) -> ssl.SSLContext | None:
        return None if self._tls is None else self._tls.context(self._protocol)

    def _listen(self) -> None:
        if self._socket.fileno() >= 0:
            asyncio.get_running_loop().add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        """Takes one connection in a turn of the loop, and more where more are found to wait."""
        for _ in range(self._accepts):
            try:
                opened, address = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                self._accepts = 1
                return
            except OSError as error:
                if error.errno not in _NO_DESCRIPTOR:
                    raise
                self._pause(error)
                return
            give_back = self._places.take(address[0]) if self._places is not None else _nothing
            if give_back is None:
                self._refuse(opened)
                continue
            accepted = _Accepted(opened, give_back)
            self._opening.add(accepted)
            accepted.opening = start(self._open(accepted))
            accepted.opening.add_done_callback(partial(self._opened, accepted))
        self._accepts = min(_ACCEPTS, 2 * self._accepts)

    async def _open(self, accepted: _Accepted) -> None:
        """Makes a connection of a socket; over TLS that takes as long as the client's handshake."""
        tls = self._tls
        try:
            if tls is not None and self._plain and await _speaks_plainly(accepted, tls.handshake_s):
                if len(self._refused) >= _REFUSALS:
                    accepted.close()
                else:
                    await self._tell_refused(accepted, _Refused(self._refused, self._plain()))
                return
            await asyncio.get_running_loop().connect_accepted_socket(
                self._connection,
                accepted,
                ssl=self._context,
                ssl_handshake_timeout=None if tls is None else tls.handshake_s,
                ssl_shutdown_timeout=None if tls is None else tls.goodbye_s,
            )
        except OSError:  # the client has gone or agrees on no TLS
            accepted.close()

    def _opened(self, accepted: _Accepted, task: asyncio.Task[None]) -> None:
        self._opening.discard(accepted)
        if task.cancelled() or task.exception() is not None:  # perhaps before it began
            accepted.close()

    def _refuse(self, opened: socket.socket) -> None:
        opened.setblocking(False)
        if self._refusal and len(self._refused) < _REFUSALS:
            refused = _Refused(self._refused, self._refusal)
            start(self._tell_refused(opened, refused))
            return
        with opened, suppress(OSError):
            if self._refusal:
                opened.send(self._refusal)
                opened.shutdown(socket.SHUT_WR)
                # What is unread when a socket closes takes back what was sent.
                opened.recv(1 << 16)

    async def _tell_refused(self, opened: socket.socket, refused: _Refused) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: refused, opened)
        except OSError:  # the client has gone
            self._refused.discard(refused)
            opened.close()

    def _pause(self, error: OSError) -> None:
        """Lets new connections wait for a descriptor, which an idle connection gives up if there is one."""
        loop = asyncio.get_running_loop()
        if loop.time() - self._told_at >= _TELL_S:
            self._told_at = loop.time()
            log.error("new connections wait: %s", error.strerror)
        if self._places is not None:
            self._places.make_room()
        loop.remove_reader(self._socket)
        loop.call_later(_PAUSE_S, self._listen)


async def _speaks_plainly(accepted: socket.socket, wait_s: float) -> bool:
    """Waits for a client's first byte: whether it begins the name of a method, as no handshake does.

    Raises:
        TimeoutError: It does not come.
    """
    loop, came = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(accepted, came.set)
    try:
        async with asyncio.timeout(wait_s):
            await came.wait()
    finally:
        loop.remove_reader(accepted)
    return accepted.recv(1, socket.MSG_PEEK).isupper()


def _nothing() -> None:
    """There is no place to give back."""
