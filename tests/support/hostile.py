"""A server as a victim of attacks."""

from __future__ import annotations

import contextlib
import resource
from typing import TYPE_CHECKING

from tests.hostile.victim import Victim

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.server import Server

_SOFT_DESCRIPTORS = 1024


def victim_of(server: Server) -> Victim:
    ports = {wire: int(getattr(server, wire).rpartition(":")[2]) for wire in ("http", "grpc")}
    return Victim(server.pid, ports, lambda: server.log.count("\n"))


@contextlib.contextmanager
def few_descriptors() -> Iterator[None]:
    """Processes started in this block have the soft descriptor limit of a login."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(_SOFT_DESCRIPTORS, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
