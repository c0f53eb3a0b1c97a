"""The wire between server and engine: what is packed comes out again, however the bytes are cut."""

from __future__ import annotations

import itertools
import socket
from array import array
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.engine.base import Batch, BatchOutput
from serving.engine.process.wire import (
    FRAME_LIMIT_BYTES,
    HEADER,
    Channel,
    FrameReader,
    Kind,
    WireError,
    pack,
    pack_result,
    pack_run,
    unpack_result,
    unpack_run,
)
from serving.records import EncodedText, ModelIndex
from serving.rollout.engine_process import STARTED

if TYPE_CHECKING:
    from collections.abc import Iterator

ids = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=40).map(lambda values: array("i", values))


@st.composite
def texts(draw: st.DrawFn) -> EncodedText:
    """A text with or without segments."""
    tokens = draw(ids)
    typed = draw(st.booleans())
    return EncodedText(tokens, array("i", [place % 2 for place in range(len(tokens))]) if typed else None)


batches = st.builds(Batch, st.integers(0, 65_535).map(ModelIndex), st.lists(texts(), min_size=1, max_size=8))


def payload_of(frame: bytes) -> memoryview:
    """What follows a frame's header."""
    return memoryview(frame)[HEADER.size :]


@given(batches, st.integers(0, 2**64 - 1))
def test_run_round_trip(batch: Batch, number: int) -> None:
    """A batch comes out of its frame with every id and segment; texts without segments get zeros beside others."""
    frame = pack_run(number, batch)
    length, kind, model, found = HEADER.unpack_from(frame)
    assert (length, kind, model, found) == (len(frame) - HEADER.size, Kind.RUN, batch.model, number)
    out = unpack_run(model, payload_of(frame))
    assert out.model == batch.model
    assert [text.ids for text in out.texts] == [text.ids for text in batch.texts]
    typed = any(text.type_ids is not None for text in batch.texts)
    for before, after in zip(batch.texts, out.texts, strict=True):
        zeros = array("i", [0] * len(before.ids))
        assert after.type_ids == ((before.type_ids or zeros) if typed else None)


@given(
    st.lists(st.booleans(), min_size=1, max_size=9),
    st.lists(st.lists(st.integers(1, 4), max_size=2), min_size=1, max_size=3),
    st.floats(0, 1e9),
)
def test_result_round_trip(finite: list[bool], shapes: list[list[int]], compute_us: float) -> None:
    """Arrays of any number and shape come out as they went in, with the flags and the time."""
    arrays = [
        np.arange(np.prod([len(finite), *shape]), dtype=np.float32).reshape(len(finite), *shape) for shape in shapes
    ]
    frame = pack_result(7, BatchOutput(arrays, finite, compute_us))
    assert HEADER.unpack_from(frame)[1:] == (Kind.RESULT, 0, 7)
    out = unpack_result(bytes(payload_of(frame)))
    assert out.finite == finite
    assert out.compute_us == compute_us
    assert len(out.arrays) == len(arrays)
    for before, after in zip(arrays, out.arrays, strict=True):
        np.testing.assert_array_equal(after, before)
        assert after.dtype == np.float32


def test_result_takes_any_layout() -> None:
    """An array that is not contiguous, or of another precision, is sent as float32 rows."""
    values = np.arange(12, dtype=np.float64).reshape(4, 3).T
    out = unpack_result(bytes(payload_of(pack_result(1, BatchOutput([values], [True] * 3, 0.0)))))
    np.testing.assert_array_equal(out.arrays[0], values)


def test_result_keeps_integers() -> None:
    """Token ids come back as int32 beside float32 scores: the largest is no float32."""
    ids, scores = np.array([[2**31 - 1, 7]], np.int32), np.array([[0.5, 0.25]], np.float32)
    out = unpack_result(bytes(payload_of(pack_result(1, BatchOutput([ids, scores], [True], 0.0)))))
    assert [array.dtype for array in out.arrays] == [np.int32, np.float32]
    np.testing.assert_array_equal(out.arrays[0], ids)
    np.testing.assert_array_equal(out.arrays[1], scores)


def test_result_keeps_what_is_not_finite() -> None:
    """NaN and infinity cross the wire as they are; judging them is not its business."""
    values = np.array([[np.nan, np.inf, -np.inf]], np.float32)
    out = unpack_result(bytes(payload_of(pack_result(1, BatchOutput([values], [False], 0.0)))))
    np.testing.assert_array_equal(out.arrays[0], values)


FRAMES = [(Kind.READY, 0, b"{}"), (Kind.RESULT, 2**64 - 1, b"\x00" * 9), (Kind.FAULT, 1, b""), (Kind.FAULT, 2, b"why")]
STREAM = b"".join(pack(kind, payload, batch=number) for kind, number, payload in FRAMES)


def test_frames_split_at_every_byte() -> None:
    """Wherever the stream is cut in two, the same frames come out."""
    for at in range(len(STREAM) + 1):
        reader = FrameReader()
        assert reader.feed(STREAM[:at]) + reader.feed(STREAM[at:]) == FRAMES


def test_frames_byte_by_byte() -> None:
    """So they do byte by byte, each as soon as it is whole."""
    reader = FrameReader()
    found = [(place, frame) for place in range(len(STREAM)) for frame in reader.feed(STREAM[place : place + 1])]
    assert [frame for _, frame in found] == FRAMES
    ends = np.cumsum([HEADER.size + len(payload) for _, _, payload in FRAMES]) - 1
    assert [place for place, _ in found] == ends.tolist()


@given(st.lists(st.integers(0, len(STREAM)), max_size=6))
def test_frames_in_any_pieces(cuts: list[int]) -> None:
    """And in any pieces."""
    edges = [0, *sorted(cuts), len(STREAM)]
    reader = FrameReader()
    assert [frame for a, b in itertools.pairwise(edges) for frame in reader.feed(STREAM[a:b])] == FRAMES


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    """A channel and the socket at its other end."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Channel(ours), theirs


def test_channel_receives(ends: tuple[Channel, socket.socket]) -> None:
    """Frames come out one by one though they arrive together."""
    channel, other = ends
    other.sendall(STREAM)
    for kind, number, payload in FRAMES:
        found = channel.receive()
        assert (found[0], found[2], bytes(found[3])) == (kind, number, payload)
        del found


def test_channel_receives_what_outgrows_its_buffer(ends: tuple[Channel, socket.socket]) -> None:
    """A frame larger than the buffer is received whole, and so is the next."""
    channel, other = ends
    large = bytes(range(256)) * 400
    for payload in (large, b"small", large * 2):
        other.setblocking(True)
        frame = pack(Kind.RESULT, payload, model=3, batch=9)
        for at in range(0, len(frame), 65_536):
            other.sendall(frame[at : at + 65_536])
        kind, model, number, found = channel.receive()
        assert (kind, model, number, bytes(found)) == (Kind.RESULT, 3, 9, payload)
        del found


def test_channel_sends_what_a_reader_reads(ends: tuple[Channel, socket.socket]) -> None:
    """What a channel sends, the server's reader understands."""
    channel, other = ends
    channel.send(pack(Kind.FAULT, b"why", batch=5))
    assert FrameReader().feed(other.recv(4096)) == [(Kind.FAULT, 5, b"why")]


def test_channel_ends_between_frames(ends: tuple[Channel, socket.socket]) -> None:
    """The other end may close between frames."""
    channel, other = ends
    other.close()
    with pytest.raises(EOFError):
        channel.receive()


@pytest.mark.parametrize("kept", [1, HEADER.size, HEADER.size + 1])
def test_channel_ends_inside_a_frame(ends: tuple[Channel, socket.socket], kept: int) -> None:
    """Inside a frame it may not."""
    channel, other = ends
    other.sendall(pack(Kind.FAULT, b"why")[:kept])
    other.close()
    with pytest.raises(WireError):
        channel.receive()


def test_channel_refuses_a_frame_that_is_too_long(ends: tuple[Channel, socket.socket]) -> None:
    """A length beyond the limit is nonsense, not an order for memory."""
    channel, other = ends
    other.sendall(HEADER.pack(FRAME_LIMIT_BYTES + 1, Kind.RUN, 0, 0))
    with pytest.raises(WireError):
        channel.receive()


def test_an_engine_process_says_that_it_has_started() -> None:
    """In a frame that is written down where nothing may be imported that makes frames."""
    assert pack(Kind.STARTED, b"") == STARTED
