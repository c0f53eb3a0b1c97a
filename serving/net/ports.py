"""The ports, taken before anything slow is imported or loaded."""

from __future__ import annotations

import math
import random
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from serving.errors import StartupError

if TYPE_CHECKING:
    from serving.settings import Settings

BACKLOG = 2048

_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 6))
"""Seconds, seconds, count: a peer that has vanished without a word is found out within two minutes."""

_AGE_SPREAD = 0.1
"""As gRPC's own servers spread theirs (proposal A9)."""


@dataclass(slots=True, frozen=True)
class Ports:
    """The listening sockets."""

    http: socket.socket
    grpc: socket.socket
    metrics: socket.socket

    @classmethod
    def open(cls, settings: Settings) -> Ports:
        """Takes the ports.

        Raises:
            StartupError: One of them cannot be had; the message names it.
        """
        http = bind(settings.host, settings.http_port, "HTTP")
        grpc = bind(settings.host, settings.grpc_port, "gRPC")
        return cls(http, grpc, bind(settings.host, settings.metrics_port, "metrics"))


def bind(host: str, port: int, purpose: str) -> socket.socket:
    """A listening socket; port 0 picks a free one. Raises `StartupError` where the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        opened = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _refusal(host, port, purpose, error) from error
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
        opened.listen(BACKLOG)
    except OSError as error:
        opened.close()
        raise _refusal(host, port, purpose, error) from error
    opened.setblocking(False)
    return opened


def keep_alive(opened: socket.socket) -> None:
    """Probes silent peers; connections inherit that from the socket that accepts them."""
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        opened.setsockopt(socket.IPPROTO_TCP, option, value)


def lifetime_s(settings: Settings) -> float:
    """Seconds for which a new connection is used; infinity means until its client closes it.

    Connections that were opened together, as after a restart, do not end together.
    """
    age_s = settings.max_connection_age_s
    return age_s * random.uniform(1 - _AGE_SPREAD, 1 + _AGE_SPREAD) if age_s else math.inf  # noqa: S311  no secret


def _refusal(host: str, port: int, purpose: str, error: OSError) -> StartupError:
    return StartupError(f"cannot listen on {host}:{port} for {purpose}: {error.strerror or error}")
