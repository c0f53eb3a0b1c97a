"""Calls without a network: bytes in, bytes out, however they are cut."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, cast

import pytest
from google.protobuf.wrappers_pb2 import BytesValue
from h2.errors import ErrorCodes
from hpack import Encoder
from hyperframe.frame import GoAwayFrame, PingFrame
from hypothesis import given
from hypothesis import strategies as st

from bertserve.loadtest.generator import frames as wire
from bertserve.loadtest.generator.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    frame,
    prefixed,
    reset,
    window_update,
)
from bertserve.serving.grpc.connection import GrpcConnection
from bertserve.serving.net.connection import Port
from bertserve.serving.net.ports import lifetime_s
from bertserve.serving.settings import Settings
from tests.support.grpc_peer import Peer, Wire, call, said, talk
from tests.support.http2 import START, of_type, request_fields, split
from tests.support.virtual_time import virtually

if TYPE_CHECKING:
    from collections.abc import Callable


def exchange(*parts: bytes) -> Peer:
    """What comes of some bytes."""

    async def run() -> Peer:
        peer = Peer()
        await peer.say(*parts)
        return peer

    return asyncio.run(run())


values = st.lists(st.binary(max_size=40), min_size=1, max_size=5)


@given(values, st.lists(st.integers(0, 2000), max_size=12), st.booleans())
def test_calls_however_the_bytes_are_cut(asked: list[bytes], cuts: list[int], huffman: bool) -> None:  # noqa: FBT001
    """Any cutting of the stream gives the same answers, one for each call."""
    encoder = Encoder()
    data = START + b"".join(call(encoder, 2 * place + 1, value) for place, value in enumerate(asked))
    if huffman:
        data += frame(HEADERS, END_HEADERS | END_STREAM, 99, encoder.encode(request_fields("/nothing"), huffman=True))
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    peer = exchange(*[data[start:stop] for start, stop in itertools.pairwise(places)])
    replies = peer.replies()
    assert [BytesValue.FromString(replies[2 * at + 1].message).value for at in range(len(asked))] == asked
    assert all(replies[2 * at + 1].status == 0 for at in range(len(asked)))


@given(st.binary(max_size=200))
def test_any_bytes_at_the_start(data: bytes) -> None:
    """Bytes that are not HTTP/2 close the connection without a word."""
    peer = exchange(data)
    if not wire.PREFACE.startswith(data[:24]):
        assert peer.wire.closed
        assert peer.wire.written == b""


@pytest.mark.parametrize(
    ("given_timeout", "seconds"),
    [("1H", "3600"), ("2M", "120"), ("3S", "3"), ("4000m", "4"), ("5000000u", "5"), (None, "")],
)
def test_timeouts(given_timeout: str | None, seconds: str) -> None:
    """Every unit of `grpc-timeout` reaches the method; without it there is no deadline."""
    peer = exchange(START, call(Encoder(), 1, b"", grpc_timeout=given_timeout))
    assert peer.replies()[1].fields["x-deadline"] == seconds


def test_an_error_of_the_table() -> None:
    """Its code, its message percent-encoded, its reason and when to try again, in one block."""
    peer = exchange(START, call(Encoder(), 1, b"refuse"))
    reply = peer.replies()[1]
    assert reply.status == 8
    assert reply.fields["grpc-message"] == "too much: 100%25 %E2%80%94 %C3%BCnd%0A"
    assert reply.fields["bertserve-reason"] == "overloaded"
    assert reply.fields["retry-after-ms"] == "1500"
    assert len([arrived for arrived in peer.frames() if arrived.stream_id == 1]) == 1
    assert [error.reason for error in peer.errors] == ["overloaded"]


def test_a_bug_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    """INTERNAL, without a word of what happened, which the log has."""
    reply = exchange(START, call(Encoder(), 1, b"fail")).replies()[1]
    assert reply.status == 13
    assert "secret" not in reply.fields["grpc-message"]
    assert "a secret" in caplog.text


@virtually
async def test_an_answer_is_one_write() -> None:
    """Headers, message and trailers leave together."""
    peer = Peer()
    writes: list[bytes] = []
    await peer.say(START)
    write: Callable[[bytes], None] = writes.append
    peer.wire.write = cast("Callable[..., None]", write)  # type: ignore[method-assign]
    await peer.say(call(Encoder(), 1, b"one"))
    (written,) = writes
    assert [arrived.type for arrived in split(written)] == [HEADERS, DATA, HEADERS]


@virtually
async def test_many_calls_at_once_are_begun_a_few_a_turn() -> None:
    """Those of all connections together, so that a call of another client finds few before it."""
    peer = Peer()
    others = [GrpcConnection(peer.calls) for _ in range(3)]
    for connection in others:
        connection.connection_made(Wire())
    connections, encoder = [peer.connection, *others], Encoder()
    calls = START + b"".join(call(encoder, number, b"one") for number in range(1, 401, 2))
    for connection in connections:
        connection.data_received(calls)
    begun = []
    while not begun or begun[-1] < 4 * 400:
        begun.append(sum(connection.h2.last_stream + 1 for connection in connections))
        await asyncio.sleep(0)
    assert begun[0] <= 4 * 2 * 32
    assert all(later - earlier <= 2 * 32 for earlier, later in itertools.pairwise(begun))


@virtually
async def test_a_lost_connection_cancels_its_calls() -> None:
    """Each is counted once."""
    peer = Peer()
    peer.connection.data_received(START + call(Encoder(), 1, b"one"))
    peer.connection.connection_lost(None)
    await peer.say()
    assert [error.reason for error in peer.errors] == ["client_gone"]
    assert peer.replies() == {}


@virtually
async def test_a_bidirectional_call_answers_message_by_message() -> None:
    """Each when it is whole, in their order; the call ends when its client has said all."""
    peer = Peer()
    encoder = Encoder()
    first = talk(encoder, 1, b"one", b"two")
    third = said(b"three")
    await peer.say(START, first, frame(DATA, 0, 1, third[:4]))
    assert not peer.replies()[1].ended
    await peer.say(frame(DATA, END_STREAM, 1, third[4:]))
    reply = peer.replies()[1]
    messages = b"".join(said(value) for value in (b"one", b"two", b"three"))
    assert reply.data == messages
    assert reply.ended


def test_an_error_ends_a_bidirectional_call() -> None:
    """What came before it is answered, what comes behind it is not."""
    encoder = Encoder()
    peer = exchange(START, talk(encoder, 1, b"one", b"refuse", b"three", flags=END_STREAM))
    reply = peer.replies()[1]
    assert reply.data == said(b"one")
    assert reply.ended
    assert [error.reason for error in peer.errors] == ["overloaded"]


def test_a_bidirectional_call_that_ends_inside_a_message() -> None:
    """It is malformed."""
    encoder = Encoder()
    fields = encoder.encode(request_fields("/talk"))
    opened = frame(HEADERS, END_HEADERS, 1, fields) + frame(DATA, END_STREAM, 1, b"\0\0\0\0\5abc")
    peer = exchange(START, opened)
    assert peer.replies()[1].ended
    assert [error.reason for error in peer.errors] == ["malformed_request"]


def test_a_quiet_bidirectional_call_is_not_taken_for_a_slow_one() -> None:
    """Between messages it may last; inside a message it has as long as a body."""

    async def run(rest: bytes) -> list[str]:
        peer = Peer()
        await peer.say(START, talk(Encoder(), 1, b"one"), *([frame(DATA, 0, 1, rest)] if rest else []))
        for _ in range(30):
            peer.connection.tick(1.0)
        return [error.reason for error in peer.errors]

    assert asyncio.run(run(b"")) == []
    assert asyncio.run(run(b"\0\0")) == ["slow_request"]


async def hear(peer: Peer, begun: bytes = b"") -> None:
    """Answers the PINGs behind the first GOAWAY: the first before calls that have `begun`, as gRPC's C core does."""
    for behind in (begun, b""):
        ping = of_type(PingFrame, peer.frames())[-1]
        await peer.say(frame(wire.PING, wire.ACK, 0, ping.opaque_data) + behind)


@virtually
async def test_a_drain_ends_quiet_bidirectional_calls() -> None:
    """Nobody would else, as client and server wait for one another; what the client sent before it knew is answered."""
    peer = Peer()
    encoder = Encoder()
    await peer.say(START, talk(encoder, 1, b"one"))
    peer.connection.drain()
    assert not peer.replies()[1].ended
    second = frame(DATA, 0, 1, said(b"two"))
    await peer.say(second, talk(encoder, 3, b"three"))
    await hear(peer)
    replies = peer.replies()
    both = b"".join(said(value) for value in (b"one", b"two"))
    assert (replies[1].data, replies[1].ended) == (both, True)
    assert (BytesValue.FromString(replies[3].message).value, replies[3].ended) == (b"three", True)
    assert [error.reason for error in peer.errors] == ["not_ready", "not_ready"]
    assert peer.connection.h2.finished


@virtually
async def test_a_drain_answers_a_client_that_hears_late() -> None:
    """Behind a network or on a machine that stands still for long: what it sent before it heard is answered."""
    peer = Peer()
    peer.calls.ending = True
    await peer.say(START)
    peer.connection.drain()
    for _ in range(600):
        peer.connection.tick(1.0)
    encoder = Encoder()
    await peer.say(call(encoder, 1, b"late"))
    assert BytesValue.FromString(peer.replies()[1].message).value == b"late"
    assert not peer.connection.h2.finished
    await hear(peer, call(encoder, 3, b"behind"))
    assert BytesValue.FromString(peer.replies()[3].message).value == b"behind"
    assert len(of_type(GoAwayFrame, peer.frames())) == 2
    assert peer.connection.h2.finished


@virtually
async def test_a_drain_refuses_more_calls_after_its_time() -> None:
    """Of a client that has not answered, the calls that are there are ended or answered, and further ones refused."""
    peer = Peer()
    encoder = Encoder()
    await peer.say(START, talk(encoder, 1, b"one"))
    await peer.say(frame(HEADERS, END_HEADERS, 3, encoder.encode(request_fields("/echo"))))
    peer.connection.drain()
    peer.connection.end_drain()
    peer.connection.end_drain()
    assert of_type(GoAwayFrame, peer.frames())[-1].last_stream_id == 3
    await peer.say(call(encoder, 5, b"three"))
    assert peer.replies()[5].reset == ErrorCodes.REFUSED_STREAM
    assert not peer.connection.h2.finished
    await peer.say(frame(DATA, END_STREAM, 3, said(b"two")))
    replies = peer.replies()
    assert BytesValue.FromString(replies[1].message).value == b"one"
    assert (replies[1].status, replies[3].status) == (14, 0)
    assert peer.connection.h2.finished


def test_a_connection_too_old_ends_without_its_clients_answer() -> None:
    """After as long as gRPC's own servers wait for it."""

    async def run() -> int:
        peer = Peer()
        await peer.say(START)
        peer.connection.tick(2 * Settings().max_connection_age_s)
        for second in range(60):
            if peer.connection.h2.finished:
                return second
            peer.connection.tick(1.0)
        return 0

    assert asyncio.run(run()) > 20


@virtually
async def test_a_drain_ends_quiet_calls_of_a_connection_too_old() -> None:
    """Its client knows already that it ends, so nothing is waited for."""
    peer = Peer()
    await peer.say(START, talk(Encoder(), 1, b"one"))
    peer.connection.tick(2 * Settings().max_connection_age_s)
    await hear(peer)
    assert not peer.replies()[1].ended
    peer.connection.drain()
    assert peer.replies()[1].status == 14
    assert peer.connection.h2.finished


@pytest.mark.parametrize("seconds", [0, 4])
@virtually
async def test_a_drain_of_a_connection_that_has_not_begun(seconds: int) -> None:
    """It is welcomed, served and sent away as any other: its client may have begun before it could hear."""
    peer = Peer()
    for _ in range(seconds):
        peer.connection.tick(1.0)
    peer.connection.drain()
    await peer.say(START, call(Encoder(), 1, b"one"))
    await hear(peer)
    kinds = [arrived.type for arrived in peer.frames()]
    assert kinds[0] == wire.SETTINGS
    assert kinds.count(wire.GOAWAY) == 2
    assert peer.replies()[1].status == 0
    assert peer.connection.h2.finished


def test_a_drain_of_a_connection_that_never_begins() -> None:
    """It is closed after the time for headers, as any."""

    async def run() -> int:
        peer = Peer()
        peer.connection.drain()
        for second in range(60):
            if peer.wire.closed:
                return second
            peer.connection.tick(1.0)
        return 0

    assert 5 <= asyncio.run(run()) <= 6


@pytest.mark.parametrize("path", ["/echo", "/talk", "/watch"])
@pytest.mark.parametrize("allowed", ["0n", "1m"])
@virtually
async def test_a_deadline_that_has_passed(path: str, allowed: str) -> None:
    """Every method is DEADLINE_EXCEEDED, those that answer at once and those that last as well."""
    peer = Peer()
    opened = frame(HEADERS, END_HEADERS, 1, Encoder().encode(request_fields(path, grpc_timeout=allowed)))
    peer.connection.data_received(START + opened)
    await asyncio.sleep(0.05)
    await peer.say(frame(DATA, END_STREAM, 1, prefixed(b"")))
    assert peer.replies()[1].status == 4
    assert [error.reason for error in peer.errors] == ["deadline_exceeded"]


@virtually
async def test_a_deadline_that_passes_while_replies_are_sent() -> None:
    """A method that sends replies as long as its client waits ends with the client's deadline."""
    peer = Peer()
    opened = frame(HEADERS, END_HEADERS, 1, Encoder().encode(request_fields("/watch", grpc_timeout="50m")))
    await peer.say(START, opened, frame(DATA, END_STREAM, 1, prefixed(b"")))
    await asyncio.sleep(0.04)
    assert not peer.replies()[1].ended
    await asyncio.sleep(0.02)
    assert peer.replies()[1].data == prefixed(b"")
    assert peer.replies()[1].status == 4


def test_a_reply_that_is_taken_slowly() -> None:
    """It is not ended as long as its client takes something of it; once it takes nothing, it has as long as a body."""

    async def run(taken: int) -> int:
        peer = Peer()
        message = said(bytes(15_000))
        await peer.say(START, talk(Encoder(), 1), *[frame(DATA, 0, 1, message)] * 8, frame(DATA, END_STREAM, 1))
        for second in range(200):
            peer.connection.tick(1.0)
            if peer.replies()[1].reset is not None:
                return second
            if taken:
                await peer.say(*(window_update(at, taken) for at in (0, 1)))
        assert peer.replies()[1].ended
        return 0

    assert asyncio.run(run(1000)) == 0
    assert asyncio.run(run(0)) == Port.body_timeout_s
    assert asyncio.run(run(1)) > 0


@virtually
async def test_a_connection_too_old_lets_bidirectional_calls_go_on() -> None:
    """Its client is told to open another; a call that is there ends with its client, or with the server."""
    peer = Peer()
    encoder = Encoder()
    await peer.say(START, frame(HEADERS, END_HEADERS, 1, encoder.encode(request_fields("/talk"))))
    peer.connection.tick(2 * Settings().max_connection_age_s)
    assert len(of_type(GoAwayFrame, peer.frames())) == 1
    await peer.say(frame(DATA, 0, 1, said(b"still here")))
    assert BytesValue.FromString(peer.replies()[1].message).value == b"still here"
    assert not peer.replies()[1].ended
    peer.connection.drain()
    await hear(peer)
    assert peer.replies()[1].ended


@virtually
async def test_connections_that_never_grow_old() -> None:
    """An age of 0 is none."""
    peer = Peer(Settings(max_connection_age_s=0))
    await peer.say(START)
    peer.connection.tick(1e9)
    assert of_type(GoAwayFrame, peer.frames()) == []


def test_connections_do_not_end_together() -> None:
    """Of those opened at one moment each has a time of its own, a tenth around the setting."""
    ages = [lifetime_s(Settings(max_connection_age_s=100)) for _ in range(200)]
    assert 90 <= min(ages) < 95
    assert 105 < max(ages) <= 110


@virtually
async def test_cancels_leave_a_neighbour_alone() -> None:
    """400 calls a second that are given up, for seconds, and a call beside them is answered."""
    peer = Peer()
    encoder = Encoder()
    neighbour = said(b"neighbour")
    head = encoder.encode(request_fields("/echo"))
    await peer.say(START, frame(HEADERS, END_HEADERS, 1, head))
    for second in range(8):
        for number in range(3 + 800 * second, 803 + 800 * second, 2):
            opened = frame(HEADERS, END_HEADERS, number, encoder.encode(request_fields("/echo")))
            await peer.say(opened + frame(DATA, 0, number, b"\0\0"))
            await peer.say(reset(number))
        peer.connection.tick(1.0)
    await peer.say(frame(DATA, END_STREAM, 1, neighbour))
    assert BytesValue.FromString(peer.replies()[1].message).value == b"neighbour"


@virtually
async def test_many_calls_in_one_read_take_several_turns() -> None:
    """What comes meanwhile waits behind them, and all are answered."""
    peer = Peer()
    encoder = Encoder()
    calls = [call(encoder, number, b"%d" % number) for number in range(1, 401, 2)]
    peer.connection.data_received(START + b"".join(calls[:100]))
    assert len(peer.connection.h2.streams) < 50
    peer.connection.data_received(b"".join(calls[100:150]))
    peer.connection.data_received(b"".join(calls[150:]))
    for _ in range(50):
        await asyncio.sleep(0)
    replies = peer.replies()
    values = [BytesValue.FromString(replies[number].message).value for number in range(1, 401, 2)]
    assert values == [b"%d" % number for number in range(1, 401, 2)]
