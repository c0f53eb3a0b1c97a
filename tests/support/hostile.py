"""A server as a victim of attacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.hostile.victim import Victim

if TYPE_CHECKING:
    from tests.support.server import Server


def victim_of(server: Server) -> Victim:
    ports = {wire: int(getattr(server, wire).rpartition(":")[2]) for wire in ("http", "grpc")}
    return Victim(server.pid, ports, lambda: server.log.count("\n"))
