"""The wire between server and engine: what is packed comes out again, however the bytes are cut."""

from __future__ import annotations

import itertools
import socket
from array import array
from threading import Thread
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertserve.serving.engine.base import Batch, BatchOutput
from bertserve.serving.engine.process.wire import (
    FRAME_LIMIT_BYTES,
    HEADER,
    KINDS,
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
from bertserve.serving.records import EncodedText, ModelIndex
from bertserve.serving.rollout.engine_process import STARTED

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ids = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=40).map(lambda values: array("i", values))


@st.composite
def texts(draw: st.DrawFn) -> EncodedText:
    tokens = draw(ids)
    typed = draw(st.booleans())
    return EncodedText(tokens, array("i", [place % 2 for place in range(len(tokens))]) if typed else None)


batches = st.tuples(st.integers(0, 65_535).map(ModelIndex), st.lists(texts(), min_size=1, max_size=8)).map(
    lambda parts: Batch(*parts)
)


def check_run(batch: Batch, model: int, payload: memoryview) -> None:
    """Every id and segment has crossed; texts without segments get zeros beside others."""
    out = unpack_run(model, payload)
    assert out.model == batch.model
    assert [text.ids for text in out.texts] == [text.ids for text in batch.texts]
    typed = any(text.type_ids is not None for text in batch.texts)
    for before, after in zip(batch.texts, out.texts, strict=True):
        zeros = array("i", [0] * len(before.ids))
        assert after.type_ids == ((before.type_ids or zeros) if typed else None)


@given(batches, st.integers(0, 2**64 - 1))
def test_run_round_trip(batch: Batch, number: int) -> None:
    """A batch comes out of its frame as it went in."""
    frame = pack_run(number, batch)
    length, kind, model, found = HEADER.unpack_from(frame)
    assert (length, kind, model, found) == (len(frame) - HEADER.size, Kind.RUN, batch.model, number)
    check_run(batch, model, memoryview(frame)[HEADER.size :])


def crossed(arrays: list[np.ndarray], finite: Sequence[bool] = (), compute_us: float = 0.0) -> BatchOutput:
    frame = pack_result(7, BatchOutput(arrays, list(finite), compute_us))
    assert HEADER.unpack_from(frame)[1:] == (Kind.RESULT, 0, 7)
    return unpack_result(frame[HEADER.size :])


@given(
    st.lists(st.booleans(), max_size=17),
    st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=3),
    st.floats(0, 1e9),
)
@settings(derandomize=True, max_examples=100, deadline=None)
def test_result_round_trip(finite: list[bool], shapes: list[list[int]], compute_us: float) -> None:
    """No arrays, arrays without a number and of no dimension come out as they went in, with flags and time."""
    arrays = [np.arange(np.prod(shape), dtype=np.float32).reshape(shape) for shape in shapes]
    out = crossed(arrays, finite, compute_us)
    assert (list(out.finite), out.compute_us, len(out.arrays)) == (finite, compute_us, len(arrays))
    for before, after in zip(arrays, out.arrays, strict=True):
        np.testing.assert_array_equal(after, before)
        assert (after.shape, after.dtype) == (before.shape, np.float32)


RESULTS = {
    "transposed float64 becomes float32 rows": (np.arange(12, dtype=np.float64).reshape(4, 3).T, np.float32),
    "token ids stay int32, as the largest is no float32": (np.array([[2**31 - 1, 7]], np.int32), np.int32),
    "what is not finite is judged elsewhere": (np.array([[np.nan, np.inf, -np.inf]], np.float32), np.float32),
}


@pytest.mark.parametrize(("values", "dtype"), RESULTS.values(), ids=RESULTS)
def test_a_result_keeps_its_values(values: np.ndarray, dtype: type) -> None:
    """In any layout, alone and beside an array of scores."""
    scores = np.array([[0.5, 0.25]], np.float32)
    for arrays in ([values], [values, scores]):
        found = crossed(arrays, [True] * len(values)).arrays
        assert [each.dtype for each in found] == [dtype, np.float32][: len(arrays)]
        for one, other in zip(found, arrays, strict=True):
            np.testing.assert_array_equal(one, other)


BATCH = Batch(ModelIndex(3), [EncodedText(array("i", [1, 2])), EncodedText(array("i", [3]), array("i", [1]))])
WIRED = [pack_run(1, BATCH), pack(Kind.FAULT, b""), pack(Kind.REFUSED, b"why", batch=2**64 - 1)]
STREAM = b"".join(WIRED)
EDGES = list(itertools.accumulate(map(len, WIRED), initial=0))
FRAMES = [
    (Kind.RUN, BATCH.model, 1, WIRED[0][HEADER.size :]),
    (Kind.FAULT, 0, 0, b""),
    (Kind.REFUSED, 0, 2**64 - 1, b"why"),
]


def test_frames_split_at_every_byte() -> None:
    """Wherever the stream is cut in two, the same frames come out."""
    for at in range(len(STREAM) + 1):
        reader = FrameReader(KINDS)
        assert reader.feed(STREAM[:at]) + reader.feed(STREAM[at:]) == FRAMES


def test_frames_byte_by_byte() -> None:
    """Each as soon as it is whole."""
    reader = FrameReader(KINDS)
    found = [(place + 1, frame) for place in range(len(STREAM)) for frame in reader.feed(STREAM[place : place + 1])]
    assert found == list(zip(EDGES[1:], FRAMES, strict=True))


@given(st.lists(st.integers(0, len(STREAM)), max_size=6))
def test_frames_in_any_pieces(cuts: list[int]) -> None:
    """And in any pieces."""
    reader = FrameReader(KINDS)
    pieces = itertools.pairwise([0, *sorted(cuts), len(STREAM)])
    assert [frame for a, b in pieces for frame in reader.feed(STREAM[a:b])] == FRAMES


class Chopped(socket.socket):
    """A socket that gives at most so many bytes at a time."""

    most = 1

    def recv_into(self, buffer: memoryview, *options: int) -> int:  # type: ignore[override]  what the channel uses
        return super().recv_into(buffer[: self.most], *options)


def receive(stream: bytes, most: int, spin_s: float = 0.0) -> list[tuple[Kind, int, int, bytes]]:
    """Every frame that a channel makes of a stream that comes in pieces."""
    ours, theirs = socket.socketpair()
    with theirs, Chopped(ours.family, ours.type, ours.proto, ours.detach()) as chopped:
        chopped.most = most
        theirs.sendall(stream)
        theirs.shutdown(socket.SHUT_WR)
        channel = Channel(chopped)
        channel.spin_s = spin_s
        frames = []
        while True:
            try:
                kind, model, number, payload = channel.receive()
            except EOFError:
                return frames
            frames.append((kind, model, number, bytes(payload)))
            del payload


@pytest.mark.sampled(40)
@pytest.mark.parametrize("spin_s", [0.0, 10.0])
@pytest.mark.parametrize("most", range(1, len(STREAM) + 1))
def test_pieces_of_any_size_are_the_same_frames(most: int, spin_s: float) -> None:
    """However the kernel cuts the stream, and whatever of the next frame comes along."""
    found = receive(STREAM, most, spin_s)
    assert found == FRAMES
    check_run(BATCH, 3, memoryview(found[0][3]))


@pytest.mark.parametrize("whole", range(len(WIRED) + 1))
def test_a_stream_may_end_between_frames(whole: int) -> None:
    """What came before is received."""
    assert len(receive(STREAM[: EDGES[whole]], most=7)) == whole


@pytest.mark.sampled(30)
@pytest.mark.parametrize("at", sorted(set(range(len(STREAM))) - set(EDGES)))
def test_a_stream_that_ends_inside_a_frame_is_an_error(at: int) -> None:
    """Wherever it is cut."""
    with pytest.raises(WireError):
        receive(STREAM[:at], most=7)


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Channel(ours), theirs


def test_channel_receives_what_outgrows_its_buffer(ends: tuple[Channel, socket.socket]) -> None:
    """A frame larger than the channel's buffer and the socket's is received whole, and so is the next."""
    channel, other = ends
    rows = np.random.default_rng(0).standard_normal((1024, 384)).astype(np.float32)
    large = pack_result(1, BatchOutput([rows, rows[:, :1]], [True] * 1024, 2.0))
    frames = [large, pack(Kind.RESULT, b"small", model=3, batch=9), large]
    writer = Thread(target=other.sendall, args=(b"".join(frames),))
    writer.start()
    for frame in frames:
        kind, model, number, payload = channel.receive()
        assert pack(kind, bytes(payload), model=model, batch=number) == frame
        del payload
    writer.join()


def test_channel_sends_what_a_reader_reads(ends: tuple[Channel, socket.socket]) -> None:
    """What a channel sends, the server's reader understands."""
    channel, other = ends
    channel.send(pack(Kind.FAULT, b"why", batch=5))
    assert FrameReader(KINDS).feed(other.recv(4096)) == [(Kind.FAULT, 0, 5, b"why")]


def test_channel_refuses_a_frame_that_is_too_long(ends: tuple[Channel, socket.socket]) -> None:
    """A length beyond the limit is nonsense, not an order for memory."""
    channel, other = ends
    other.sendall(HEADER.pack(FRAME_LIMIT_BYTES + 1, Kind.RUN, 0, 0))
    with pytest.raises(WireError):
        channel.receive()


@pytest.mark.parametrize("spin_s", [1e-9, 10.0])
def test_a_frame_that_comes_while_it_is_looked_for_or_later_is_received(
    ends: tuple[Channel, socket.socket], spin_s: float
) -> None:
    """A channel that looks for frames without sleeping sleeps where they take longer, and misses none."""
    channel, other = ends
    channel.spin_s = spin_s
    answers: list[int] = []

    def answer() -> None:
        for _ in range(20):
            answers.append(channel.receive()[2])
            channel.send(b"!")

    thread = Thread(target=answer)
    thread.start()
    for number in range(20):
        other.sendall(pack(Kind.FAULT, b"", batch=number))
        assert other.recv(1) == b"!"
    thread.join()
    assert answers == list(range(20))


def test_an_engine_process_says_that_it_has_started() -> None:
    """In a frame that is written down where nothing may be imported that makes frames."""
    assert pack(Kind.STARTED, b"") == STARTED
