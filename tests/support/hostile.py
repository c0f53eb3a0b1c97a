"""A server as a victim of attacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadtest.benchmarks.hostile.victim import Victim

if TYPE_CHECKING:
    from tests.support.server import Server


def victim_of(server: Server) -> Victim:
    http, grpc = (int(address.rpartition(":")[2]) for address in (server.http, server.grpc))
    return Victim.of(server.pid, http, grpc, lambda: server.log.count("\n"))
