"""What a call held is free once it has ended, however it ended: reference counts alone do it, without a collection."""

from __future__ import annotations

import asyncio
import gc
import gzip
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

import pytest
from google.protobuf.wrappers_pb2 import BytesValue
from hpack import Encoder

from bertserve.loadtest.generator.frames import DATA, END_HEADERS, END_STREAM, HEADERS, frame, prefixed, reset
from bertserve.serving.settings import Settings
from tests.support.grpc_peer import Peer, call, said, talk
from tests.support.http2 import START, request_fields
from tests.support.virtual_time import asynchronous
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

RESET = reset(1)


def opened(path: str, data: bytes, flags: int = END_STREAM, **changes: str | None) -> bytes:
    """A call of a path with these bytes."""
    fields = Encoder().encode(request_fields(path, **changes))
    return frame(HEADERS, END_HEADERS, 1, fields) + frame(DATA, flags, 1, data)


def unary(value: bytes, **changes: str | None) -> bytes:
    """A whole call of `echo`."""
    return call(Encoder(), 1, value, **changes)


async def wait_and_leave(peer: Peer, first: bytes) -> None:
    """Lets a method begin, and gives its call up."""
    await peer.say(first)
    assert not peer.replies().get(1)
    await peer.say(RESET)


async def miss_a_deadline(peer: Peer) -> None:
    """Asks for replies without an end, for a millisecond."""
    await peer.say(opened("/watch", prefixed(b""), grpc_timeout="1m"))
    await until(lambda: peer.replies()[1].ended, "the deadline")


async def take_nothing(peer: Peer) -> None:
    """Asks for more than the window takes, and never takes it."""
    message = said(bytes(15_000))
    await peer.say(talk(Encoder(), 1), *[frame(DATA, 0, 1, message)] * 6)
    for _ in range(20):
        peer.connection.tick(1.0)


async def drain(peer: Peer) -> None:
    """Has a call that waits for its client when the server ends."""
    await peer.say(talk(Encoder(), 1, b"one"))
    peer.connection.drain()
    peer.connection.end_drain()


WAYS: dict[str, Callable[[Peer], Awaitable[None]]] = {
    "answered": lambda peer: peer.say(unary(b"one")),
    "refused by the method": lambda peer: peer.say(unary(b"refuse")),
    "failed by a bug": lambda peer: peer.say(unary(b"fail")),
    "no message": lambda peer: peer.say(opened("/echo", prefixed(b"\xff" * 100))),
    "half a message": lambda peer: peer.say(opened("/echo", prefixed(b"abc")[:-1])),
    "two messages": lambda peer: peer.say(opened("/echo", prefixed(b"") * 2)),
    "too large": lambda peer: peer.say(opened("/echo", b"\0\xff\xff\xff\xff")),
    "no such method": lambda peer: peer.say(opened("/nothing", b"")),
    "too late": lambda peer: peer.say(unary(b"one", grpc_timeout="0n")),
    "not compressed as it says": lambda peer: peer.inflated(
        opened("/echo", prefixed(b"abc", compressed=True), grpc_encoding="gzip")
    ),
    "compressed, too large": lambda peer: peer.inflated(
        opened("/echo", prefixed(gzip.compress(bytes(5 << 20)), compressed=True), grpc_encoding="gzip")
    ),
    "unknown compression": lambda peer: peer.say(
        opened("/echo", prefixed(b"abc", compressed=True), grpc_encoding="br")
    ),
    "cancelled before it is whole": lambda peer: peer.say(opened("/echo", prefixed(b"abc")[:-1], 0), RESET),
    "cancelled before it begins": lambda peer: peer.say(unary(b"wait") + RESET),
    "cancelled while it waits": lambda peer: wait_and_leave(peer, unary(b"wait")),
    "cancelled in several replies": lambda peer: peer.say(opened("/watch", prefixed(b"")), RESET),
    "late in several replies": miss_a_deadline,
    "lost while it waits": lambda peer: peer.say(unary(b"wait")),
    "stream, answered": lambda peer: peer.say(talk(Encoder(), 1, b"one", b"two", flags=END_STREAM)),
    "stream, refused": lambda peer: peer.say(talk(Encoder(), 1, b"one", b"refuse", b"three")),
    "stream, failed by a bug": lambda peer: peer.say(talk(Encoder(), 1, b"fail", b"two")),
    "stream, no message": lambda peer: peer.say(opened("/talk", prefixed(b"\xff" * 100), 0)),
    "stream, too large": lambda peer: peer.say(opened("/talk", prefixed(b"") + b"\0\xff\xff\xff\xff", 0)),
    "stream, cancelled": lambda peer: wait_and_leave(peer, talk(Encoder(), 1, b"wait", b"wait", b"two")),
    "stream, lost": lambda peer: peer.say(talk(Encoder(), 1, b"wait", b"one")),
    "stream, its answers not taken": take_nothing,
    "stream, at the server's end": drain,
}


@pytest.fixture
def garbage() -> Iterator[Callable[[], list[object]]]:
    """No collection meanwhile; gives what one would have had to free."""

    def left() -> list[object]:
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        found = [
            thing
            for thing in gc.garbage
            if issubclass(type(thing), asyncio.Task | BaseException | FrameType | TracebackType)
            or type(thing).__module__.startswith("serving.")
        ]
        gc.garbage.clear()
        return found

    gc.collect()
    gc.disable()
    yield left
    gc.enable()


@pytest.mark.parametrize("way", WAYS)
@asynchronous
async def test_a_call_leaves_nothing(way: str, garbage: Callable[[], list[object]]) -> None:
    """Neither message nor call nor error waits for a collection, which hardly ever comes."""
    peer = Peer(Settings(max_connection_age_s=0))
    await peer.say(START)
    await WAYS[way](peer)
    peer.connection.connection_lost(None)
    for _ in range(5):
        await asyncio.sleep(0)
    assert garbage() == []


@asynchronous
async def test_an_idle_connection_keeps_no_message(garbage: Callable[[], list[object]]) -> None:
    """Neither the bytes that were read last nor what they held."""
    peer = Peer()
    await peer.say(START, call(Encoder(), 1, b"one"))
    held = [thing for thing in gc.get_objects() if type(thing) is BytesValue]
    assert held == []
    assert garbage() == []
