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
        aim: The resource under attack: `memory`, `loop` (the event loop) or `connections`.
        line: `Line` for HTTP, `H2Line` for gRPC.
        does: The life of one connection.
        connections: Concurrent connections; each begins again when it ends.
        hurry: Speed-up in a short test, for requests of several megabytes.
    """

    aim: str
    line: type[Line]
    does: Callable[[Any], None]
    connections: int = CONNECTIONS
    hurry: float = 1.0

    @property
    def wire(self) -> str:
        """`http` or `grpc`."""
        return "grpc" if self.line is H2Line else "http"


ATTACKS = {
    "HTTP: refused bodies of 4 MB": Attack("memory", Line, http.refused_bodies, hurry=8.0),
    "HTTP: gzip bombs of 4 KB": Attack("memory", Line, http.gzip_bombs),
    "HTTP: clients that leave after 1.9 MB": Attack("memory", Line, http.leaving, hurry=8.0),
    "HTTP: half-sent bodies": Attack("memory", Line, http.half_bodies, MANY_CONNECTIONS),
    "HTTP: pipelines that are never read": Attack("memory", Line, http.unread_replies),
    "HTTP: JSON bodies of 2 MB": Attack("loop", Line, http.large_bodies, hurry=3.0),
    "HTTP: refusals in pipelines": Attack("loop", Line, http.refused_ahead),
    "HTTP: chunks of one byte": Attack("loop", Line, http.tiny_chunks),
    "HTTP: 95 header lines": Attack("loop", Line, http.many_headers),
    "HTTP: slow headers": Attack("connections", Line, http.slow_headers),
    "HTTP: slow bodies": Attack("connections", Line, http.slow_bodies),
    "HTTP: idle connections": Attack("connections", Line, http.idle_connections),
    "gRPC: cancelled calls of 2 MB": Attack("memory", H2Line, grpc.cancelled_calls, hurry=8.0),
    "gRPC: refused calls of 4 MB": Attack("memory", H2Line, grpc.refused_calls, hurry=8.0),
    "gRPC: refused messages of ModelStreamInfer": Attack("memory", H2Line, grpc.refused_messages, hurry=8.0),
    "gRPC: gzip bombs of 4 KB": Attack("memory", H2Line, grpc.gzip_bombs),
    "gRPC: half-sent messages": Attack("memory", H2Line, grpc.half_messages, MANY_CONNECTIONS),
    "gRPC: replies without a window": Attack("memory", H2Line, grpc.closed_windows),
    "gRPC: replies that are never read": Attack("memory", H2Line, grpc.unread_replies),
    "gRPC: WINDOW_UPDATE beside blocked streams": Attack("loop", H2Line, grpc.window_updates),
    "gRPC: WINDOW_UPDATE of open windows": Attack("loop", H2Line, grpc.open_windows),
    "gRPC: windows of one byte": Attack("loop", H2Line, grpc.one_byte_grants),
    "gRPC: PRIORITY": Attack("loop", H2Line, grpc.priorities),
    "gRPC: acknowledged SETTINGS": Attack("loop", H2Line, grpc.acknowledgements),
    "gRPC: empty SETTINGS": Attack("loop", H2Line, grpc.empty_settings),
    "gRPC: 2,730 settings in a frame": Attack("loop", H2Line, grpc.many_settings),
    "gRPC: unknown frames": Attack("loop", H2Line, grpc.unknown_frames),
    "gRPC: PING": Attack("loop", H2Line, grpc.pings),
    "gRPC: answers to no PING": Attack("loop", H2Line, grpc.ping_answers),
    "gRPC: empty DATA": Attack("loop", H2Line, grpc.empty_data),
    "gRPC: DATA of one byte": Attack("loop", H2Line, grpc.one_byte_data),
    "gRPC: references to a dynamic field": Attack("loop", H2Line, grpc.references),
    "gRPC: references to a static field": Attack("loop", H2Line, grpc.static_references),
    "gRPC: 15 KB of headers in Huffman's code": Attack("loop", H2Line, grpc.huffman),
    "gRPC: 1 KB of headers in Huffman's code": Attack("loop", H2Line, grpc.huffman_in_calls),
    "gRPC: 15 KB of distinct headers": Attack("loop", H2Line, grpc.distinct_headers),
    "gRPC: headers that fill the table": Attack("loop", H2Line, grpc.indexed_headers),
    "gRPC: CONTINUATION": Attack("loop", H2Line, grpc.continuations),
    "gRPC: rapid reset": Attack("loop", H2Line, grpc.rapid_resets),
    "gRPC: calls to no method": Attack("loop", H2Line, grpc.refused_streams),
    "gRPC: slow headers": Attack("connections", H2Line, grpc.slow_frames),
}
"""Attacks by name; each function documents its own."""
