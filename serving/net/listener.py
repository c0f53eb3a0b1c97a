"""A port: a listening socket, its connections and their common timer."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import socket
import time
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

from bertserve.serving.net.lingering_close import LingeringClose
from bertserve.serving.net.ports import BACKLOG
from bertserve.serving.unawaited import run_guarded, start

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterable, Sequence

    from bertserve.serving.net.connection import Port
    from bertserve.serving.net.connection_limiter import Closable, ConnectionLimiter
    from bertserve.serving.security.tls import Tls

log = logging.getLogger("bertserve.net")

_ACCEPTS = 64
"""Maximum new connections per turn of the loop, so that open connections get their share."""

_REFUSALS = 16
"""Maximum refused connections of a port that stay open to deliver the reason. More are closed at once."""

_LINGER_S = 1.0
"""Seconds for which input of a refused client is discarded, so that the client can read the reason."""

_TICK_S = 1.0
_TELL_S = 10.0
_PAUSE_S = 0.1
_NO_DESCRIPTOR = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class _Accepted(socket.socket):
    """An accepted socket, which releases its slot together with its descriptor.

    asyncio closes the socket of a transport that ends; uvloop detaches it and closes the descriptor itself. The limiter
    may replace the socket until it is a connection: over TLS, until the end of the handshake.
    """

    __slots__ = ("_release", "_since", "opening")

    def __init__(self, opened: socket.socket, release: Callable[[], None]) -> None:
        super().__init__(opened.family, opened.type, opened.proto, opened.detach())
        self._release: Callable[[], None] | None = release
        self._since = time.monotonic()
        self.opening: asyncio.Task[None] | None = None

    def close(self) -> None:
        self._leave()
        super().close()

    def detach(self) -> int:
        self._leave()
        return super().detach()

    @property
    def descriptor(self) -> int:
        return self.fileno()

    def idle_since(self) -> tuple[bool, float] | None:
        is_over = self._release is None or self.opening is None or self.opening.done()
        return None if is_over else (False, self._since)

    def close_if_idle(self) -> None:
        if self.opening is not None:
            self.opening.cancel()

    def _leave(self) -> None:
        release, self._release = self._release, None
        if release is not None:
            release()


class _Refused(asyncio.Protocol):
    """A refused connection. It sends the reason, and closes after the client had time to read it."""

    def __init__(self, all_of_them: set[_Refused], refusal: bytes) -> None:
        self._all = all_of_them
        self._refusal = refusal
        all_of_them.add(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        told = cast("asyncio.Transport", transport)
        told.write(self._refusal)
        self._lingering = LingeringClose(told, quiet_s=_LINGER_S, pace_s=_LINGER_S)

    def data_received(self, data: bytes) -> None:
        self._lingering.received(len(data))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  how it ended does not matter
        self._lingering.cancel()
        self._all.discard(self)


class Listener:
    """One port. It owns the listening socket, and accepts no connections before `start`.

    Args:
        opened: The listening socket; None in a front process, which gets accepted connections (`adopt`).
        ports: State shared by its connections: one for each protocol of the port.
        limiter: Limits its connections.
        refusal: Message to refused connections, without TLS.
        plain: Returns the message to a client that sends plain HTTP to a TLS port; None: no message.
        place: Passes an accepted connection to a front process; returns False if there is none.
    """

    def __init__(
        self,
        opened: socket.socket | None,
        connection: Callable[[], asyncio.Protocol],
        tls: Tls | None,
        protocol: str,
        *,
        ports: Sequence[Port[Any]],
        limiter: ConnectionLimiter,
        refusal: bytes = b"",
        plain: Callable[[], bytes] | None = None,
        place: Callable[[socket.socket, Callable[[], None]], bool] = lambda *_: False,
    ) -> None:
        self._socket = opened
        self._connection = connection
        self._tls = tls
        self._protocol = protocol
        self._ports = ports
        self._limiter = limiter
        self._refusal = refusal if tls is None else b""
        self._plain = plain
        self._context: ssl.SSLContext | None = None
        self._opening: set[_Accepted] = set()
        self._refused: set[_Refused] = set()
        self._accepts = 1
        self._is_open = False
        self._told_at = float("-inf")
        self._place = place
        limiter.follow(self._closable)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listening.getsockname()[:2]
        return host, port

    @property
    def _listening(self) -> socket.socket:
        if self._socket is None:
            raise RuntimeError("a front process has no listening socket")
        return self._socket

    async def start(self) -> None:
        self._context = self._read_context()
        self._is_open = True
        self._tick()
        self._listen()

    async def renew(self) -> None:
        """Reloads the certificates for new connections; open connections continue.

        A used context cannot drop an authority or a session, so a new one replaces it.

        Raises:
            CredentialsError: The files cannot be used; nothing changes.
        """
        self._context = self._read_context()

    @property
    def connections(self) -> int:
        return sum([len(port.connections) for port in self._ports])

    @property
    def is_empty(self) -> bool:
        """Whether no connection is open, opening, or refused and lingering."""
        return not (self.connections or self._opening or self._refused)

    async def emptied(self, limit: float = math.inf) -> None:
        """Waits until it is empty, or until `limit` on the loop's clock."""
        loop = asyncio.get_running_loop()
        while not self.is_empty and loop.time() < limit:  # noqa: ASYNC110  once in a lifetime
            await asyncio.sleep(0.01)

    def close(self) -> None:
        """Accepts the connections in the backlog, then closes the listening socket.

        For their clients these connections are open: they may have sent requests, which a closed port would reset.
        """
        if self._socket is not None:
            if self._is_open:
                asyncio.get_running_loop().remove_reader(self._socket)
                self._accepts = BACKLOG
                run_guarded(self._socket.close, self._accept)
            self._socket.close()
        self._is_open = False

    def _closable(self) -> Iterable[Closable]:
        return chain(self._opening, *[port.connections for port in self._ports])

    def _tick(self) -> None:
        if self._is_open or not self.is_empty:
            asyncio.get_running_loop().call_later(_TICK_S, self._tick)
            for port in self._ports:
                port.tick(_TICK_S)

    def _read_context(self) -> ssl.SSLContext | None:
        return None if self._tls is None else self._tls.context(self._protocol)

    def _listen(self) -> None:
        if self._is_open and self._socket is not None:
            self._socket.setblocking(False)
            asyncio.get_running_loop().add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        """Accepts one connection per turn of the loop, and more per turn while more are waiting."""
        for _ in range(self._accepts):
            try:
                opened, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                self._accepts = 1
                return
            except OSError as error:
                if error.errno not in _NO_DESCRIPTOR:
                    raise
                self._pause(error)
                return
            release = self._limiter.take()
            if release is None:
                self._refuse(opened)
                continue
            if not self._place(opened, release):
                self.adopt(opened, release)
        self._accepts = min(_ACCEPTS, 2 * self._accepts)

    def adopt(self, opened: socket.socket, release: Callable[[], None]) -> None:
        """Opens a connection on an accepted socket; `release` is called together with the end of its descriptor."""
        accepted = _Accepted(opened, release)
        self._opening.add(accepted)
        accepted.opening = start(self._open(accepted))
        accepted.opening.add_done_callback(partial(self._opened, accepted))

    async def _open(self, accepted: _Accepted) -> None:
        """Opens a connection on a socket; over TLS this includes the handshake."""
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
        except OSError:  # the client has gone, or the TLS handshake failed
            accepted.close()

    def _opened(self, accepted: _Accepted, task: asyncio.Task[None]) -> None:
        self._opening.discard(accepted)
        if task.cancelled() or task.exception() is not None:  # perhaps before it started
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
                # Unread data would reset the connection and destroy the message.
                opened.recv(1 << 16)

    async def _tell_refused(self, opened: socket.socket, refused: _Refused) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: refused, opened)
        except OSError:  # the client has gone
            self._refused.discard(refused)
            opened.close()

    def _pause(self, error: OSError) -> None:
        """Pauses accepting while descriptors are short, and closes an idle connection if there is one."""
        loop = asyncio.get_running_loop()
        if loop.time() - self._told_at >= _TELL_S:
            self._told_at = loop.time()
            log.error("cannot accept connections: %s", error.strerror)
        self._limiter.make_room()
        loop.remove_reader(self._listening)
        loop.call_later(_PAUSE_S, self._listen)


async def _speaks_plainly(accepted: socket.socket, wait_s: float) -> bool:
    """Waits for a client's first byte; True if it starts an HTTP method, as no TLS handshake does.

    Raises:
        TimeoutError: No byte arrived in time.
    """
    loop, came = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(accepted, came.set)
    try:
        async with asyncio.timeout(wait_s):
            await came.wait()
    finally:
        loop.remove_reader(accepted)
    return accepted.recv(1, socket.MSG_PEEK).isupper()
