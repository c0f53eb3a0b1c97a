"""What is compared, and the names under which samples are kept."""

from __future__ import annotations

from string import ascii_letters

LENGTHS = (8, 32, 128)
CONNECTIONS = (1, 8, 32)
PROTOCOLS = ("HTTP", "gRPC")

OPTIONS = ("served", "default")
"""`served` copies the session options of the server's engine; `default` is what ONNX Runtime does by itself."""

WIDE, NARROW = "wide", "narrow"
BATCHED = (f"{WIDE}8", f"{NARROW}2", f"{NARROW}8")
"""Batches tried, by kind of session and size, where the artifact allows the server to batch."""

_RAW = "raw "


def ways(*, batch_invariant: bool) -> tuple[str, ...]:
    """How texts are brought to the cores of a raw engine.

    `wide`: one after the other on one session that uses all cores; `narrow`: in parallel on one
    single-threaded session a core; `wide8`, `narrow8`: eight at a time.
    """
    return (WIDE, NARROW, *(BATCHED if batch_invariant else ()))


def batch_size(way: str) -> int:
    """Texts at a time."""
    return int(way.lstrip(ascii_letters) or 1)


def raw_subject(way: str, options: str) -> str:
    """The name of a raw engine."""
    return f"{_RAW}{way} {options}"


def server_subject(protocol: str, connections: int) -> str:
    """The name of the server under so many connections of a protocol."""
    return f"{protocol} {connections}"


def is_raw(subject: str) -> bool:
    """Whether a raw engine is meant, which the server only waits for."""
    return subject.startswith(_RAW)
