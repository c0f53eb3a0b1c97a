"""Calls without a network: bytes in, bytes out, however they are cut."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, cast

import pytest
from hpack import Encoder
from hypothesis import given
from hypothesis import strategies as st

from serving.grpc.connection import GrpcConnection
from serving.net.ports import lifetime_s
from serving.settings import Settings
from tests.support import http2
from tests.support.grpc_peer import START, Peer, Wire, call, message, opened, talk, value
from tests.support.http2 import DATA, END_HEADERS, END_STREAM, HEADERS, frame, prefixed, request_fields
from tests.support.virtual_time import asynchronous, virtually

if TYPE_CHECKING:
    from collections.abc import Callable


def exchange(*parts: bytes) -> Peer:
    async def run() -> Peer:
        peer = Peer()
        await peer.say(*parts)
        return peer

    return asyncio.run(run())


@given(
    st.lists(st.binary(max_size=40), min_size=1, max_size=5), st.lists(st.integers(0, 2000), max_size=12), st.booleans()
)
def test_calls_however_the_bytes_are_cut(asked: list[bytes], cuts: list[int], huffman: bool) -> None:  # noqa: FBT001
    """Any cutting of the stream gives the same answers, one for each call."""
    encoder = Encoder()
    data = START + b"".join(call(encoder, 2 * place + 1, value) for place, value in enumerate(asked))
    if huffman:
        data += frame(HEADERS, END_HEADERS | END_STREAM, 99, encoder.encode(request_fields("/nothing"), huffman=True))
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    peer = exchange(*[data[start:stop] for start, stop in itertools.pairwise(places)])
    replies = [peer.replies()[2 * at + 1] for at in range(len(asked))]
    assert [(value(reply), reply.status) for reply in replies] == [(one, 0) for one in asked]


@given(st.binary(max_size=200))
def test_any_bytes_at_the_start(data: bytes) -> None:
    """Bytes that are not HTTP/2 close the connection without a word."""
    peer = exchange(data)
    if not http2.PREFACE.startswith(data[:24]):
        assert (peer.wire.closed, peer.wire.written) == (True, b"")


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
    assert len([arrived for arrived in peer.frames() if arrived.stream == 1]) == 1
    assert peer.reasons == ["overloaded"]


def test_a_bug_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    """INTERNAL, without a word of what happened, which the log has."""
    reply = exchange(START, call(Encoder(), 1, b"fail")).replies()[1]
    assert reply.status == 13
    assert "secret" not in reply.fields["grpc-message"]
    assert "a secret" in caplog.text


@asynchronous
async def test_an_answer_is_one_write() -> None:
    """Headers, message and trailers leave together."""
    peer, writes = Peer(), list[bytes]()
    await peer.say(START)
    write: Callable[[bytes], None] = writes.append
    peer.wire.write = cast("Callable[..., None]", write)  # type: ignore[method-assign]
    await peer.say(call(Encoder(), 1, b"one"))
    (written,) = writes
    found, _ = http2.split(written)
    assert [arrived.kind for arrived in found] == [HEADERS, DATA, HEADERS]


@asynchronous
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


@asynchronous
async def test_many_calls_in_one_read_take_several_turns() -> None:
    """What comes meanwhile waits behind them, and all are answered."""
    peer, encoder = Peer(), Encoder()
    calls = {number: call(encoder, number, b"%d" % number) for number in range(1, 401, 2)}
    first, *later = (b"".join(list(calls.values())[start:stop]) for start, stop in ((0, 100), (100, 150), (150, 200)))
    peer.connection.data_received(START + first)
    assert len(peer.connection.h2.streams) < 50
    for data in later:
        peer.connection.data_received(data)
    for _ in range(50):
        await asyncio.sleep(0)
    replies = peer.replies()
    assert [value(replies[number]) for number in calls] == [b"%d" % number for number in calls]


@asynchronous
async def test_a_lost_connection_cancels_its_calls() -> None:
    """Each is counted once."""
    peer = Peer()
    peer.connection.data_received(START + call(Encoder(), 1, b"one"))
    peer.connection.connection_lost(None)
    await peer.say()
    assert peer.reasons == ["client_gone"]
    assert peer.replies() == {}


@asynchronous
async def test_a_bidirectional_call_answers_message_by_message() -> None:
    """Each when it is whole, in their order; the call ends when its client has said all."""
    peer, third = Peer(), message(b"three")
    await peer.say(START, talk(Encoder(), 1, b"one", b"two"), frame(DATA, 0, 1, third[:4]))
    assert not peer.replies()[1].ended
    await peer.say(frame(DATA, END_STREAM, 1, third[4:]))
    reply = peer.replies()[1]
    assert (reply.data, reply.ended) == (message(b"one") + message(b"two") + third, True)


@pytest.mark.parametrize(
    ("said", "answered", "reason"),
    [
        (talk(Encoder(), 1, b"one", b"refuse", b"three", flags=END_STREAM), message(b"one"), "overloaded"),
        (
            opened(Encoder(), 1, "/talk") + frame(DATA, END_STREAM, 1, b"\0\0\0\0\5abc"),
            b"",
            "malformed_request",
        ),
    ],
    ids=["a refusal", "the end inside a message"],
)
def test_an_error_ends_a_bidirectional_call(said: bytes, answered: bytes, reason: str) -> None:
    """What came before it is answered, what comes behind it is not."""
    peer = exchange(START, said)
    reply = peer.replies()[1]
    assert (reply.data, reply.ended, peer.reasons) == (answered, True, [reason])


@pytest.mark.parametrize(("rest", "reasons"), [(b"", []), (b"\0\0", ["slow_request"])], ids=["between", "inside"])
@asynchronous
async def test_a_quiet_bidirectional_call_is_not_taken_for_a_slow_one(rest: bytes, reasons: list[str]) -> None:
    """Between messages it may last; inside a message it has as long as a body."""
    peer = Peer()
    await peer.say(START, talk(Encoder(), 1, b"one"), *([frame(DATA, 0, 1, rest)] if rest else []))
    peer.wait(30)
    assert peer.reasons == reasons


def heard(peer: Peer) -> bytes:
    """The client's answer to the PING behind the first GOAWAY."""
    (ping,) = [arrived for arrived in peer.frames() if arrived.kind == http2.PING]
    return frame(http2.PING, http2.ACK, 0, ping.payload)


@asynchronous
async def test_a_drain_ends_quiet_bidirectional_calls() -> None:
    """Nobody would else, as client and server wait for one another; what the client sent before it knew is answered."""
    peer, encoder = Peer(), Encoder()
    await peer.say(START, talk(encoder, 1, b"one"))
    peer.connection.drain()
    assert not peer.replies()[1].ended
    await peer.say(frame(DATA, 0, 1, message(b"two")), talk(encoder, 3, b"three"))
    await peer.say(heard(peer))
    replies = peer.replies()
    assert (replies[1].data, replies[1].ended) == (message(b"one") + message(b"two"), True)
    assert (replies[3].data, replies[3].ended) == (message(b"three"), True)
    assert peer.reasons == ["not_ready", "not_ready"]
    assert peer.connection.h2.finished


@pytest.mark.parametrize(
    ("welcomed", "seconds"), [(True, 600), (False, 0), (False, 4)], ids=["that hears late", "at once", "before it says"]
)
@asynchronous
async def test_a_drain_answers_a_client_whatever_it_has_heard(welcomed: bool, seconds: int) -> None:  # noqa: FBT001
    """Behind a network, or before it has begun, it is welcomed, served and then sent away: it may have begun before."""
    peer = Peer()
    peer.calls.ending = welcomed
    if welcomed:
        await peer.say(START)
        peer.connection.drain()
        peer.wait(seconds)
    else:
        peer.wait(seconds)
        peer.connection.drain()
        await peer.say(START)
    await peer.say(call(Encoder(), 1, b"late"))
    assert (value(peer.replies()[1]), peer.replies()[1].status) == (b"late", 0)
    assert not peer.connection.h2.finished
    await peer.say(heard(peer))
    assert peer.kinds()[0] == http2.SETTINGS
    assert peer.kinds().count(http2.GOAWAY) == 2
    assert peer.connection.h2.finished


@asynchronous
async def test_a_drain_refuses_more_calls_after_its_time() -> None:
    """Of a client that has not answered, the calls that are there are ended or answered, and further ones refused."""
    peer, encoder = Peer(), Encoder()
    await peer.say(START, talk(encoder, 1, b"one"), opened(encoder, 3, "/echo"))
    peer.connection.drain()
    peer.connection.refuse_more()
    peer.connection.refuse_more()
    last = [arrived for arrived in peer.frames() if arrived.kind == http2.GOAWAY][-1]
    assert last.payload[:4] == (3).to_bytes(4, "big")
    await peer.say(call(encoder, 5, b"three"))
    assert peer.replies()[5].reset == http2.REFUSED_STREAM
    assert not peer.connection.h2.finished
    await peer.say(frame(DATA, END_STREAM, 3, message(b"two")))
    replies = peer.replies()
    assert value(replies[1]) == b"one"
    assert (replies[1].status, replies[3].status) == (14, 0)
    assert peer.connection.h2.finished


@asynchronous
async def test_a_connection_too_old_ends_without_its_clients_answer() -> None:
    """After as long as gRPC's own servers wait for it."""
    peer = Peer()
    await peer.say(START)
    peer.connection.tick(2 * Settings().max_connection_age_s)
    assert 20 < peer.wait(60, lambda: peer.connection.h2.finished) < 60


@asynchronous
async def test_a_drain_of_a_connection_that_never_begins() -> None:
    """It is closed after the time for headers, as any."""
    peer = Peer()
    peer.connection.drain()
    assert 5 <= peer.wait(60, lambda: peer.wire.closed) <= 6


@pytest.mark.parametrize("path", ["/echo", "/talk", "/watch"])
@pytest.mark.parametrize("allowed", ["0n", "1m"])
@virtually
async def test_a_deadline_that_has_passed(path: str, allowed: str) -> None:
    """Every method is DEADLINE_EXCEEDED, those that answer at once and those that last as well."""
    peer = Peer()
    peer.connection.data_received(START + opened(Encoder(), 1, path, grpc_timeout=allowed))
    await asyncio.sleep(0.05)
    await peer.say(frame(DATA, END_STREAM, 1, prefixed(b"")))
    assert (peer.replies()[1].status, peer.reasons) == (4, ["deadline_exceeded"])


@virtually
async def test_a_deadline_that_passes_while_replies_are_sent() -> None:
    """A method that sends replies as long as its client waits ends with the client's deadline."""
    peer = Peer()
    begun = opened(Encoder(), 1, "/watch", grpc_timeout="50m")
    await peer.say(START, begun, frame(DATA, END_STREAM, 1, prefixed(b"")))
    await asyncio.sleep(0.04)
    assert not peer.replies()[1].ended
    await asyncio.sleep(0.02)
    assert (peer.replies()[1].data, peer.replies()[1].status) == (prefixed(b""), 4)


@pytest.mark.parametrize(("taken", "is_reset"), [(1000, False), (1, True), (0, True)])
@asynchronous
async def test_a_reply_that_is_taken_slowly(taken: int, is_reset: bool) -> None:  # noqa: FBT001  a row of the table
    """It is not ended as long as its client takes something of it; once it takes nothing, it has as long as a body."""
    peer = Peer()
    large = frame(DATA, 0, 1, message(bytes(15_000)))
    await peer.say(START, talk(Encoder(), 1), *[large] * 8, frame(DATA, END_STREAM, 1))
    seconds = -1
    while seconds < 200 and peer.replies()[1].reset is None:
        peer.connection.tick(1.0)
        seconds += 1
        if taken and peer.replies()[1].reset is None:
            await peer.say(*(frame(http2.WINDOW_UPDATE, 0, at, taken.to_bytes(4, "big")) for at in (0, 1)))
    reply = peer.replies()[1]
    assert (reply.reset is not None, reply.ended) == (is_reset, not is_reset)
    assert taken or seconds == Settings().body_timeout_s


@asynchronous
async def test_a_connection_too_old_lets_bidirectional_calls_go_on() -> None:
    """Its client is told to open another; a call that is there ends with its client, or with the server."""
    peer = Peer()
    await peer.say(START, opened(Encoder(), 1, "/talk"))
    peer.connection.tick(2 * Settings().max_connection_age_s)
    assert peer.kinds().count(http2.GOAWAY) == 1
    await peer.say(frame(DATA, 0, 1, message(b"still here")))
    assert (value(peer.replies()[1]), peer.replies()[1].ended) == (b"still here", False)
    peer.connection.drain()
    await peer.say(heard(peer))
    assert peer.replies()[1].ended


@asynchronous
async def test_connections_that_never_grow_old() -> None:
    """An age of 0 is none."""
    peer = Peer(Settings(max_connection_age_s=0))
    await peer.say(START)
    peer.connection.tick(1e9)
    assert http2.GOAWAY not in peer.kinds()


def test_connections_do_not_end_together() -> None:
    """Of those opened at one moment each has a time of its own, a tenth around the setting."""
    ages = [lifetime_s(Settings(max_connection_age_s=100)) for _ in range(200)]
    assert 90 <= min(ages) < 95
    assert 105 < max(ages) <= 110
