"""The shared state of an HTTP port's connections: the application and the request limits."""

from __future__ import annotations

from email.utils import formatdate
from typing import TYPE_CHECKING

from bertserve.serving.net.buffers import FREE_BYTES
from bertserve.serving.net.connection import C, Port

if TYPE_CHECKING:
    from bertserve.serving.http.app import App
    from bertserve.serving.net.buffers import BufferBudget
    from bertserve.serving.settings import Settings


class HttpPort(Port[C]):
    """The shared state of a port's connections.

    Attributes:
        hosts: Allowed host names, as `is_known_host` takes them; None for any.
        free_bytes: Bytes of a body that need no buffer space.
        date: The Date header, a whole line.
    """

    def __init__(self, app: App, settings: Settings, budget: BufferBudget, hosts: frozenset[str] | None = None) -> None:
        super().__init__(settings, budget)
        self.app = app
        self.hosts = hosts
        self.free_bytes = min(FREE_BYTES, settings.body_limit_bytes)
        self.date = b""

    def tick(self, seconds: float) -> None:
        """Also renews the Date header."""
        self.date = f"date: {formatdate(usegmt=True)}\r\n".encode()
        super().tick(seconds)
