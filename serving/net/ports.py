"""The ports, taken before anything slow is imported or loaded."""

from __future__ import annotations

import errno
import math
import random
import resource
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from serving.errors import StartupError

if TYPE_CHECKING:
    from serving.settings import Settings

BACKLOG = 2048

_ALL = "::"
"""Every address, of IPv6 and of IPv4; of IPv4 alone where the system has no IPv6. So images and manifests need no other
address for clusters of either family, or of both."""

_ALL_IPV4 = "0.0.0.0"  # noqa: S104  asked for by name
_NO_IPV6 = {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL}

_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 6))
"""Seconds, seconds, count: a peer that has vanished without a word is found out within two minutes."""

_AGE_SPREAD = 0.1
"""As gRPC's own servers spread theirs (proposal A9)."""

_MAX_DESCRIPTORS = 65_536
"""More are never asked for: some libraries close every number up to the limit in the processes that they start."""


PURPOSES = {"http_port": "HTTP", "grpc_port": "gRPC", "metrics_port": "metrics", "agent_port": "agent checks"}
"""Settings that name a port, and what it is for."""


@dataclass(slots=True, frozen=True)
class Ports:
    http: socket.socket
    grpc: socket.socket
    metrics: socket.socket
    agent: socket.socket | None

    @classmethod
    def open(cls, settings: Settings) -> Ports:
        """Takes the ports.

        Raises:
            StartupError: One of them cannot be had; the message names it.
        """
        http, grpc, metrics = [open_port(settings, name) for name in ("http_port", "grpc_port", "metrics_port")]
        return cls(http, grpc, metrics, None if settings.agent_port is None else open_port(settings, "agent_port"))

    def close(self) -> None:
        for port in (self.http, self.grpc, self.metrics, self.agent):
            if port is not None:
                port.close()


def open_port(settings: Settings, name: str) -> socket.socket:
    """The listening socket of a setting that names a port; raises `StartupError` as `bind`."""
    flag = "--" + name.replace("_", "-")
    return bind(settings.host, getattr(settings, name), f"{PURPOSES[name]} ({flag})")


def bind(host: str, port: int, purpose: str) -> socket.socket:
    """A listening socket; port 0 picks a free one. Raises `StartupError` where the address cannot be had."""
    try:
        return _listening(host, port)
    except OSError as error:
        if host == _ALL and error.errno in _NO_IPV6:
            return bind(_ALL_IPV4, port, purpose)
        place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        raise StartupError(f"cannot listen on {place} for {purpose}: {error.strerror or error}") from error


def _listening(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    opened = socket.socket(family, kind, protocol)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if host == _ALL:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # whatever net.ipv6.bindv6only says
        opened.bind(address)
        opened.listen(BACKLOG)
    except OSError:
        opened.close()
        raise
    opened.setblocking(False)
    return opened


def descriptor_limit() -> int:
    """Files that this process may have open; an unlimited number counts as the most that are asked for."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def raise_descriptor_limit() -> None:
    """Raises the soft limit of open files to the hard one, as far as it makes sense; engine processes inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft not in {resource.RLIM_INFINITY, wanted} and soft < wanted:
        with suppress(OSError, ValueError):  # some sandboxes forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


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
