"""The table of attacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.hostile import grpc_attacks as grpc
from tests.hostile import http_attacks as http
from tests.hostile.lines import H2Line, Line

if TYPE_CHECKING:
    from collections.abc import Callable

MODEL = grpc.MODEL
CONNECTIONS = 8
MANY_CONNECTIONS = 64
BYTES_PER_S = 1e6
"""Maximum rate of one connection."""


@dataclass(slots=True, frozen=True)
class Attack:
    """An attack by a hostile client.

    Attributes:
        line: `Line` for HTTP, `H2Line` for gRPC.
        does: The life of one connection.
        connections: Concurrent connections; each begins again when it ends.
        hurry: Speed-up in a short test, for requests of several megabytes.
    """

    line: type[Line]
    does: Callable[[Any], None]
    connections: int = CONNECTIONS
    hurry: float = 1.0

    @property
    def wire(self) -> str:
        """`http` or `grpc`."""
        return "grpc" if self.line is H2Line else "http"


ATTACKS = {
    # On memory.
    "HTTP: refused bodies of 4 MB": Attack(Line, http.refused_bodies, hurry=8.0),
    "HTTP: gzip bombs of 4 KB": Attack(Line, http.gzip_bombs),
    "HTTP: clients that leave after 1.9 MB": Attack(Line, http.leaving, hurry=8.0),
    "HTTP: half-sent bodies": Attack(Line, http.half_bodies, MANY_CONNECTIONS),
    "HTTP: pipelines that are never read": Attack(Line, http.unread_replies),
    # On the event loop.
    "HTTP: JSON bodies of 2 MB": Attack(Line, http.large_bodies, hurry=3.0),
    "HTTP: refusals in pipelines": Attack(Line, http.refused_ahead),
    "HTTP: chunks of one byte": Attack(Line, http.tiny_chunks),
    "HTTP: 95 header lines": Attack(Line, http.many_headers),
    # On connections.
    "HTTP: slow headers": Attack(Line, http.slow_headers),
    "HTTP: slow bodies": Attack(Line, http.slow_bodies),
    "HTTP: idle connections": Attack(Line, http.idle_connections),
    # On memory.
    "gRPC: cancelled calls of 2 MB": Attack(H2Line, grpc.cancelled_calls, hurry=8.0),
    "gRPC: refused calls of 4 MB": Attack(H2Line, grpc.refused_calls, hurry=8.0),
    "gRPC: refused messages of ModelStreamInfer": Attack(H2Line, grpc.refused_messages, hurry=8.0),
    "gRPC: gzip bombs of 4 KB": Attack(H2Line, grpc.gzip_bombs),
    "gRPC: half-sent messages": Attack(H2Line, grpc.half_messages, MANY_CONNECTIONS),
    "gRPC: replies without a window": Attack(H2Line, grpc.closed_windows),
    "gRPC: replies that are never read": Attack(H2Line, grpc.unread_replies),
    # On the event loop.
    "gRPC: WINDOW_UPDATE beside blocked streams": Attack(H2Line, grpc.window_updates),
    "gRPC: WINDOW_UPDATE of open windows": Attack(H2Line, grpc.open_windows),
    "gRPC: windows of one byte": Attack(H2Line, grpc.one_byte_grants),
    "gRPC: PRIORITY": Attack(H2Line, grpc.priorities),
    "gRPC: acknowledged SETTINGS": Attack(H2Line, grpc.acknowledgements),
    "gRPC: empty SETTINGS": Attack(H2Line, grpc.empty_settings),
    "gRPC: 2,730 settings in a frame": Attack(H2Line, grpc.many_settings),
    "gRPC: unknown frames": Attack(H2Line, grpc.unknown_frames),
    "gRPC: PING": Attack(H2Line, grpc.pings),
    "gRPC: answers to no PING": Attack(H2Line, grpc.ping_answers),
    "gRPC: empty DATA": Attack(H2Line, grpc.empty_data),
    "gRPC: DATA of one byte": Attack(H2Line, grpc.one_byte_data),
    "gRPC: references to a dynamic field": Attack(H2Line, grpc.references),
    "gRPC: references to a static field": Attack(H2Line, grpc.static_references),
    "gRPC: 15 KB of headers in Huffman's code": Attack(H2Line, grpc.huffman),
    "gRPC: 1 KB of headers in Huffman's code": Attack(H2Line, grpc.huffman_in_calls),
    "gRPC: 15 KB of distinct headers": Attack(H2Line, grpc.distinct_headers),
    "gRPC: headers that fill the table": Attack(H2Line, grpc.indexed_headers),
    "gRPC: CONTINUATION": Attack(H2Line, grpc.continuations),
    "gRPC: rapid reset": Attack(H2Line, grpc.rapid_resets),
    "gRPC: calls to no method": Attack(H2Line, grpc.refused_streams),
    # On connections.
    "gRPC: slow headers": Attack(H2Line, grpc.slow_frames),
}
"""Attacks by name; each function documents its own."""
