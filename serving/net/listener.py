"""A port: opens, keeps time for its connections, and waits for the last of them."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

from serving.net.acceptor import Acceptor

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable

    from serving.net.connection import Port
    from serving.net.connection_limiter import Closable, ConnectionLimiter
    from serving.security.tls import Tls

_TICK_S = 1.0


class Listener:
    """One port and its connections."""

    def __init__(
        self,
        opened: socket.socket,
        ports: Iterable[Port[Any]],
        connection: Callable[[], asyncio.Protocol],
        protocol: str,
        tls: Tls | None,
        *,
        limiter: ConnectionLimiter | None = None,
        refusal: bytes = b"",
        plain: bytes = b"",
    ) -> None:
        """Prepares; nothing is accepted before `start`. The listening socket is owned from here on.

        Args:
            opened: The listening socket.
            ports: What its connections share: one of each protocol that is spoken on it.
            connection: Makes a connection.
            protocol: As ALPN names it.
            tls: What connections are secured with.
            limiter: How many connections there may be.
            refusal: What a connection beyond those is told, without TLS.
            plain: What a client is told that sends a request where it should begin TLS.
        """
        self._ports = tuple(ports)
        self._acceptor = Acceptor(opened, connection, tls, protocol, limiter=limiter, refusal=refusal, plain=plain)
        if limiter is not None:
            limiter.follow(self._closable)
        self._clock: asyncio.TimerHandle | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        return self._acceptor.address

    @property
    def connections(self) -> int:
        """How many are open."""
        return sum([len(port.connections) for port in self._ports])

    async def start(self) -> None:
        """Accepts connections."""
        self._tick()
        await self._acceptor.start()

    async def renew(self) -> None:
        """Other certificates, as `Acceptor.renew`."""
        await self._acceptor.renew()

    async def emptied(self, limit: float = math.inf) -> None:
        """Waits until the last connection is gone, or until a time of the loop's clock."""
        loop = asyncio.get_running_loop()
        while not self.is_empty and loop.time() < limit:  # noqa: ASYNC110  once in a lifetime
            await asyncio.sleep(0.01)

    @property
    def is_empty(self) -> bool:
        return not (self.connections or self._acceptor.opening)

    def stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()

    def _closable(self) -> Iterable[Closable]:
        return [connection for port in self._ports for connection in port.connections]

    def _tick(self) -> None:
        self._clock = asyncio.get_running_loop().call_later(_TICK_S, self._tick)
        for port in self._ports:
            port.tick(_TICK_S)
