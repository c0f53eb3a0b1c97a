"""The server's ports, opened before slow imports and model loading."""

from __future__ import annotations

import errno
import math
import random
import resource
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bertserve.serving.errors import StartupError

if TYPE_CHECKING:
    from bertserve.serving.settings import Settings

BACKLOG = 2048

_ALL = "::"
"""All addresses, IPv6 and IPv4; IPv4 alone if the system has no IPv6. Images and manifests therefore need no other
address for single-stack or dual-stack clusters."""

_ALL_IPV4 = "0.0.0.0"  # noqa: S104  requested explicitly
_NO_IPV6 = {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL}

_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 6))
"""Idle seconds, interval in seconds, count: a dead peer is detected within two minutes."""

_AGE_SPREAD = 0.1
"""Jitter of the maximum connection age, as a fraction; the same as in gRPC's servers (proposal A9)."""

_MAX_DESCRIPTORS = 65_536
"""Upper bound for the limit of open files: some libraries close every number up to the limit in processes that they
start."""


PURPOSES = {"http_port": "HTTP", "grpc_port": "gRPC", "metrics_port": "metrics"}
"""Settings that name a port, and the port's purpose in messages."""


@dataclass(slots=True, frozen=True)
class Ports:
    http: socket.socket
    grpc: socket.socket
    metrics: socket.socket

    @classmethod
    def open(cls, settings: Settings) -> Ports:
        """Opens the ports.

        Raises:
            StartupError: A port is not available; the message names it.
        """
        return cls(*[open_port(settings, name) for name in PURPOSES])

    def close(self) -> None:
        for port in (self.http, self.grpc, self.metrics):
            port.close()


def open_port(settings: Settings, name: str) -> socket.socket:
    """The listening socket of a port setting. Raises `StartupError` as `bind` does."""
    flag = "--" + name.replace("_", "-")
    return bind(settings.host, getattr(settings, name), f"{PURPOSES[name]} ({flag})")


def bind(host: str, port: int, purpose: str) -> socket.socket:
    """A listening socket; port 0 picks a free port. Raises `StartupError` if the address is not available."""
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
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # overrides net.ipv6.bindv6only
        opened.bind(address)
        opened.listen(BACKLOG)
    except OSError:
        opened.close()
        raise
    opened.setblocking(False)
    return opened


def descriptor_limit() -> int:
    """Maximum open files of this process; unlimited counts as `_MAX_DESCRIPTORS`."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def raise_descriptor_limit() -> None:
    """Raises the soft limit of open files to the hard limit, up to a maximum. Engine processes inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft not in {resource.RLIM_INFINITY, wanted} and soft < wanted:
        with suppress(OSError, ValueError):  # some sandboxes forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def keep_alive(opened: socket.socket) -> None:
    """Enables TCP keepalive; connections inherit it from the listening socket."""
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        opened.setsockopt(socket.IPPROTO_TCP, option, value)


def lifetime_s(settings: Settings) -> float:
    """Maximum age of a new connection, in seconds; infinity: no maximum.

    Jitter keeps connections that opened together, as after a restart, from ending together.
    """
    age_s = settings.max_connection_age_s
    return age_s * random.uniform(1 - _AGE_SPREAD, 1 + _AGE_SPREAD) if age_s else math.inf  # noqa: S311  no secret
