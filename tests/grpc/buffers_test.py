"""What calls hold counts against the server's budget of bytes; beyond it they are refused, and all is given back."""

from __future__ import annotations

import gzip

from google.protobuf.wrappers_pb2 import BytesValue
from h2.errors import ErrorCodes
from hpack import Encoder

from bertserve.loadtest.generator import frames as wire
from bertserve.loadtest.generator.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    frame,
    prefixed,
    reset,
    settings,
    window_update,
)
from bertserve.serving.settings import Settings
from tests.support.grpc_peer import Peer, call, said, talk
from tests.support.http2 import START, request_fields
from tests.support.virtual_time import asynchronous
from tests.support.waiting import until

SETTINGS = Settings(body_limit_bytes=1 << 20, buffer_limit_mb=4)
SHARE = 2 << 20
PART = 15_000
LARGE = bytes(PART)
RESOURCE_EXHAUSTED, OK = 8, 0
CALLS = 200
STREAMS = range(1, 2 * CALLS, 2)


async def connected(start: bytes = START) -> Peer:
    """A connection whose server may hold 4 MiB, and this connection half of them."""
    peer = Peer(SETTINGS)
    await peer.say(start)
    return peer


async def ask(peer: Peer, encoder: Encoder, stream: int, value: bytes = b"small") -> int:
    """A whole call, and its status."""
    await peer.say(call(encoder, stream, value))
    return peer.replies()[stream].status


@asynchronous
async def test_messages_that_do_not_end() -> None:
    """Those that begin beyond a connection's share are refused; small calls are answered all the while."""
    peer, encoder = await connected(), Encoder()
    begun = said(bytes(1 << 19))[:PART]
    for stream in STREAMS:
        opened = frame(HEADERS, END_HEADERS, stream, encoder.encode(request_fields("/echo")))
        await peer.say(opened + frame(DATA, 0, stream, begun))
    replies = peer.replies()
    refused = [stream for stream, reply in replies.items() if reply.ended]
    assert {replies[stream].status for stream in refused} == {RESOURCE_EXHAUSTED}
    assert replies[refused[0]].fields["bertserve-reason"] == "buffers_full"
    assert SHARE - PART < peer.connection.share.held <= SHARE
    assert peer.budget.used <= SHARE
    assert await ask(peer, encoder, 401) == OK
    for stream in STREAMS:
        if stream not in refused:
            await peer.say(reset(stream))
    assert peer.connection.share.held == peer.budget.used == 0
    assert await ask(peer, encoder, 403, LARGE) == OK


@asynchronous
async def test_messages_that_are_worked_on() -> None:
    """They count until their calls end, whether answered or given up."""
    peer, encoder = await connected(), Encoder()
    for stream in STREAMS:
        await peer.say(call(encoder, stream, b"wait" + LARGE))
    refused = [stream for stream, reply in peer.replies().items() if reply.status == RESOURCE_EXHAUSTED]
    assert len(refused) == CALLS - SHARE // (PART + 13)
    assert await ask(peer, encoder, 401) == OK
    await peer.say(*[reset(stream) for stream in STREAMS if stream not in refused])
    assert peer.connection.share.held == 0


@asynchronous
async def test_replies_that_are_not_read() -> None:
    """Beyond the share their streams are reset; the others come whole once the client takes them."""
    no_window = wire.PREFACE + settings((wire.INITIAL_WINDOW_SIZE, 0))
    peer, encoder = await connected(no_window), Encoder()
    for stream in STREAMS:
        await peer.say(call(encoder, stream, b"large"))
    resets = [stream for stream, reply in peer.replies().items() if reply.reset == ErrorCodes.ENHANCE_YOUR_CALM]
    assert len(resets) == CALLS - (SHARE // (PART + 8))
    assert {error.reason for error in peer.errors} == {"buffers_full"}
    await peer.say(window_update(0, 1 << 30))
    for stream in set(STREAMS) - set(resets):
        await peer.say(window_update(stream, 1 << 20))
    answered = [reply for stream, reply in peer.replies().items() if stream not in resets]
    assert {(reply.status, BytesValue.FromString(reply.message).value) for reply in answered} == {(OK, LARGE)}
    assert peer.connection.share.held == 0


@asynchronous
async def test_a_reply_larger_than_the_share() -> None:
    """It arrives, if the connection holds no other; one that is made meanwhile is reset."""
    no_window = wire.PREFACE + settings((wire.INITIAL_WINDOW_SIZE, 0))
    peer, encoder = await connected(no_window), Encoder()
    for stream, value in enumerate((b"huge", b"large")):
        await peer.say(call(encoder, 2 * stream + 1, value))
    assert peer.replies()[3].reset == ErrorCodes.ENHANCE_YOUR_CALM
    await peer.say(window_update(0, 1 << 30) + window_update(1, 1 << 19))
    peer.wire.buffered = 1 << 19  # the client takes it slowly
    peer.connection.pause_writing()
    peer.connection.resume_writing()
    await peer.say(window_update(1, 1 << 30))
    assert (peer.replies()[1].status, len(peer.replies()[1].message)) == (OK, len(said(bytes(3 << 20))) - 5)
    assert peer.connection.share.held == 0


@asynchronous
async def test_a_stream_whose_answers_are_not_read() -> None:
    """Its messages wait where flow control holds them; all are answered once the client reads."""
    no_window = wire.PREFACE + settings((wire.INITIAL_WINDOW_SIZE, 0))
    peer, sent = await connected(no_window), 4
    await peer.say(talk(Encoder(), 1), *[frame(DATA, 0, 1, said(LARGE))] * sent)
    assert sent * PART <= peer.connection.share.held < (sent + 1) * PART
    await peer.say(window_update(1, 1 << 20))
    assert peer.replies()[1].data == said(LARGE) * sent
    assert peer.connection.share.held == 0
    await peer.say(frame(DATA, END_STREAM, 1))
    assert peer.replies()[1].status == OK


@asynchronous
async def test_answers_that_are_there_at_once() -> None:
    """Answers larger than their messages, ready in one turn, count right beside a message in work."""
    peer, waiting = await connected(), said(b"wait" + LARGE)
    await peer.say(talk(Encoder(), 1), *[frame(DATA, 0, 1, part) for part in (*[said(b"large")] * 3, waiting)])
    assert peer.replies()[1].data == said(LARGE) * 3
    assert PART <= peer.connection.share.held <= len(waiting)
    await peer.say(reset(1))
    assert peer.connection.share.held == 0


@asynchronous
async def test_messages_that_grow_when_they_are_inflated() -> None:
    """A message of a few bytes counts with what it becomes, of one call and of streams."""
    peer, encoder = await connected(), Encoder()
    message = BytesValue(value=b"wait" + bytes(900_000)).SerializeToString()
    bomb = gzip.compress(message)
    grown = range(len(message), len(message) + len(bomb) + 1)
    for stream, path in ((1, "/echo"), (3, "/talk"), (5, "/echo"), (7, "/talk")):
        fields = encoder.encode(request_fields(path, grpc_encoding="gzip"))
        data = frame(DATA, END_STREAM, stream, prefixed(bomb, compressed=True))
        held = peer.connection.share.held
        await peer.say(frame(HEADERS, END_HEADERS, stream, fields), data)

        def counts(stream: int = stream, held: int = held) -> bool:
            # While it is inflated, it counts with as much as it may become.
            return stream in peer.replies() or peer.connection.share.held - held in grown

        await until(counts, "the message to count")
    assert {stream: reply.status for stream, reply in peer.replies().items()} == {5: 8, 7: 8}
    await peer.say(reset(1), reset(3))
    assert peer.connection.share.held == 0


@asynchronous
async def test_what_the_network_does_not_take() -> None:
    """It counts while writing is paused; beyond the share the connection ends."""
    peer = await connected()
    for size, closed in ((SHARE, False), (SHARE + 1, True)):
        peer.wire.buffered = size
        peer.connection.pause_writing()
        assert (peer.connection.share.held, peer.wire.closed) == (0 if closed else size, closed)
        peer.connection.resume_writing()
        assert peer.connection.share.held == 0


@asynchronous
async def test_a_connection_that_ends_gives_all_back() -> None:
    """Whatever it held."""
    peer = await connected()
    await peer.say(talk(Encoder(), 1, b"wait"), *[frame(DATA, 0, 1, said(b"wait" + LARGE))] * 4)
    assert peer.connection.share.held > 4 * PART
    peer.connection.connection_lost(None)
    assert peer.budget.used == peer.connection.share.held == 0
