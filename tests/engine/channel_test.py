from __future__ import annotations

import socket
from array import array
from itertools import accumulate
from threading import Thread

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.engine.base import Batch, BatchOutput
from serving.engine.process.wire import Channel, Kind, WireError, pack, pack_result, pack_run, unpack_result, unpack_run
from serving.records import EncodedText, ModelIndex

BATCH = Batch(ModelIndex(3), [EncodedText(array("i", [1, 2])), EncodedText(array("i", [3]), array("i", [1]))])
FRAMES = [pack_run(1, BATCH), pack(Kind.FAULT, b""), pack(Kind.REFUSED, b"why", batch=2**64 - 1)]
STREAM = b"".join(FRAMES)
EDGES = list(accumulate(map(len, FRAMES), initial=0))


class Chopped(socket.socket):
    """A socket that gives at most so many bytes at a time."""

    most = 1

    def recv_into(self, buffer: memoryview, *options: int) -> int:  # type: ignore[override]  what the channel uses
        """Fewer bytes than there is room for."""
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
    run, fault, refused = receive(STREAM, most, spin_s)
    assert fault == (Kind.FAULT, 0, 0, b"")
    assert refused == (Kind.REFUSED, 0, 2**64 - 1, b"why")
    kind, model, number, payload = run
    assert (kind, number) == (Kind.RUN, 1)
    found = unpack_run(model, memoryview(payload))
    assert [list(text.ids) for text in found.texts] == [[1, 2], [3]]
    assert [list(text.type_ids or ()) for text in found.texts] == [[0, 0], [1]]


@pytest.mark.parametrize("whole", range(len(FRAMES) + 1))
def test_a_stream_may_end_between_frames(whole: int) -> None:
    """What came before is received."""
    assert len(receive(STREAM[: EDGES[whole]], most=7)) == whole


@pytest.mark.sampled(30)
@pytest.mark.parametrize("at", sorted(set(range(len(STREAM))) - set(EDGES)))
def test_a_stream_that_ends_inside_a_frame_is_an_error(at: int) -> None:
    """Wherever it is cut."""
    with pytest.raises(WireError):
        receive(STREAM[:at], most=7)


@given(st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=3), st.lists(st.booleans(), max_size=17))
@settings(derandomize=True, max_examples=40, deadline=None)
def test_results_of_any_shape_cross(shapes: list[list[int]], finite: list[bool]) -> None:
    """No arrays, arrays without a number, arrays of no dimension; read as they were written."""
    arrays = [np.arange(np.prod(shape), dtype=np.float32).reshape(shape) for shape in shapes]
    ((kind, _, number, payload),) = receive(pack_result(9, BatchOutput(arrays, finite, 1.5)), 4096)
    found = unpack_result(payload)
    assert (kind, number, list(found.finite), found.compute_us) == (Kind.RESULT, 9, finite, 1.5)
    assert [array.shape for array in found.arrays] == [tuple(shape) for shape in shapes]
    for before, after in zip(arrays, found.arrays, strict=True):
        np.testing.assert_array_equal(before, after)


def test_a_large_result_crosses() -> None:
    """Larger than a socket's buffer: it is written while it is read."""
    rows = np.random.default_rng(0).standard_normal((1024, 384)).astype(np.float32)
    frame = pack_result(1, BatchOutput([rows, rows[:, :1]], [True] * 1024, 2.0))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel(ours)
        theirs.setblocking(False)
        sent = theirs.send(frame)
        assert sent < len(frame)
        theirs.setblocking(True)
        writer = Thread(target=theirs.sendall, args=(frame[sent:],))
        writer.start()
        kind, _, _, payload = channel.receive()
        writer.join()
        found = unpack_result(bytes(payload))
        del payload
    assert kind is Kind.RESULT
    np.testing.assert_array_equal(found.arrays[0], rows)
    np.testing.assert_array_equal(found.arrays[1], rows[:, :1])


@pytest.mark.parametrize("spin_s", [1e-9, 10.0])
def test_a_frame_that_comes_while_it_is_looked_for_or_later_is_received(spin_s: float) -> None:
    """A channel that looks for frames without sleeping sleeps where they take longer, and misses none."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel(ours)
        channel.spin_s = spin_s
        answers: list[int] = []

        def answer() -> None:
            for _ in range(20):
                answers.append(channel.receive()[2])
                ours.sendall(b"!")

        thread = Thread(target=answer)
        thread.start()
        for number in range(20):
            theirs.sendall(pack(Kind.FAULT, b"", batch=number))
            assert theirs.recv(1) == b"!"
        thread.join()
    assert answers == list(range(20))
