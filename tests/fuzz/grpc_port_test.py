"""The gRPC port beside the `h2` library: sequences of frames that the library writes, and mutations of them.

The library's client reads every reply. Of a mutated sequence the library's server says what it is worth: which requests
are whole, and whether a rule was broken.
"""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import zlib
from typing import TYPE_CHECKING

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import pytest
from hyperframe.frame import DataFrame, GoAwayFrame, HeadersFrame, PingFrame
from tritonclient.grpc import service_pb2 as pb

from bertserve.loadtest.generator import frames as wire
from bertserve.loadtest.generator.frames import HEADERS, PREFACE, frame
from tests.support.clients import MODEL_INFER, RawConnection
from tests.support.grpc_sequences import STREAM_INFER, UNFINISHED, chunks, legal, mutated
from tests.support.http2 import Replies, Reply, hear

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tests.support.grpc_sequences import PlannedCall
    from tests.support.server import Server

_LIMIT_S = 20.0
_MARK = b"that all"
_STATUSES = {0, 3, 4, 5, 8, 9, 12, 13}


def ids_in(reply: Reply, path: str) -> list[str]:
    """Of the messages of a reply, the ids of the requests that they answer."""
    if path == STREAM_INFER:
        return [str(pb.ModelStreamInferResponse.FromString(one).infer_response.id) for one in reply.messages()]
    return [str(pb.ModelInferResponse.FromString(one).id) for one in reply.messages()] if path == MODEL_INFER else []


class Client:
    """The library's client: what it reads, by stream; it raises what breaks a rule."""

    def __init__(self, connection: h2.connection.H2Connection) -> None:
        self.h2 = connection
        self.replies: dict[int, Reply] = {}
        self.closed = self.marked = False

    def take(self, data: bytes) -> bytes:
        """Reads; returns what is to be sent for it."""
        for event in hear(self.h2, data, self.replies):
            self.closed |= isinstance(event, h2.events.ConnectionTerminated)
            self.marked |= isinstance(event, h2.events.PingAckReceived) and event.ping_data == _MARK
        return self.h2.data_to_send()


def are_over(replies: dict[int, Reply], streams: Iterable[int]) -> bool:
    return all(stream in replies and replies[stream].over for stream in streams)


def talk(
    address: str,
    parts: list[bytes],
    take: Callable[[bytes], bytes],
    done: Callable[[], bool],
    *,
    ends: bool = False,
) -> bool:
    """Sends, and reads until all is there or the server closes; returns whether it closed in order, if it did.

    `ends`: the client says that no more comes from it.
    """
    with RawConnection(address) as connection:
        plain = connection.socket
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        plain.settimeout(_LIMIT_S)
        try:
            for part in parts:
                plain.sendall(part)
            if ends:
                with contextlib.suppress(OSError):  # closed by the server
                    plain.shutdown(socket.SHUT_WR)
            while not done() and (data := plain.recv(1 << 16)):
                if more := take(data):
                    plain.sendall(more)
        except ConnectionError:
            return False
    return True


def check_legal(address: str, seed: int) -> None:
    """Every call is answered as it should be, with its own answer."""
    sequence = legal(seed)
    client = Client(sequence.client)
    client.h2.ping(_MARK)
    calls = {stream: call for stream, call in sequence.calls.items() if call.status is not UNFINISHED}

    def done() -> bool:
        return client.marked and are_over(client.replies, calls)

    talk(address, chunks(seed, sequence.data + client.h2.data_to_send()), client.take, done)
    assert not client.closed, "GOAWAY"
    assert done(), "closed before all was answered"
    for stream, call in calls.items():
        check_answer(call, client.replies[stream])
    for stream, answer in client.replies.items():
        if stream not in calls and answer.fields.get("grpc-status") == "0":
            assert set(ids_in(answer, sequence.calls[stream].path)) <= set(sequence.calls[stream].ids)


def check_answer(call: PlannedCall, answer: Reply) -> None:
    """The status of one call, and whose messages came."""
    status = int(answer.fields["grpc-status"])
    assert status == call.status, (call, answer.fields)
    assert ids_in(answer, call.path) == ([] if status else call.ids), call
    if status == 0:
        assert answer.fields["content-type"] == "application/grpc"
        assert answer.ended
    else:
        assert answer.fields["grpc-message"]
        assert answer.fields["bertserve-reason"]


_MAX_FRAME_SIZE = 5
"""A setting: RFC 9113, 6.5.2."""


class Judge:
    """The library's server: what a sequence says.

    Attributes:
        requests: The path of each request that it took, and its data so far.
        whole: Streams whose requests have ended.
        given_up: Streams that the client has reset.
        broken: Which rule was broken, if any.
        unfinished: Whether the sequence ends inside a frame or a header block.
    """

    def __init__(self, data: bytes) -> None:
        self.requests: dict[int, tuple[str, bytearray]] = {}
        self.whole: set[int] = set()
        self.given_up: set[int] = set()
        self.broken = ""
        self._server = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        self._server.initiate_connection()
        try:
            self._take(data[: len(PREFACE)])
            frames, rest = wire.split(data[len(PREFACE) :])
            for place, one in enumerate(frames):
                self.broken = self.broken or self._unseen(*one, first=place == 0)
                self._take(frame(*one))
            self._take(rest)
        except h2.exceptions.ProtocolError as error:
            self.broken = self.broken or f"{type(error).__name__}: {error}"
        buffer = self._server.incoming_buffer
        self.unfinished = bool(getattr(buffer, "_data", b"") or getattr(buffer, "_headers_buffer", []))

    def _unseen(self, kind: int, flags: int, stream: int, payload: bytes, *, first: bool) -> str:
        """A rule of RFC 9113 that a frame breaks and that the library does not look at."""
        is_settings = kind == wire.SETTINGS and not flags & wire.ACK
        if first and not is_settings:
            return "3.4: the first frame is not SETTINGS"
        stream &= wire.LARGEST
        if kind == wire.RST_STREAM and stream not in self.requests:
            return "6.4: RST_STREAM of an idle stream"
        if kind == HEADERS and stream in self.whole | self.given_up:
            return "5.1: HEADERS of a closed stream"
        if kind == wire.CONTINUATION and stream in self.whole | self.given_up:
            return "6.10: CONTINUATION of a closed stream"  # to the library a stream that was reset excuses it
        settings = struct.iter_unpack(">HI", payload[: len(payload) // 6 * 6])
        sizes = [value for number, value in settings if number == _MAX_FRAME_SIZE]
        if is_settings and any(not 2**14 <= size < 2**24 for size in sizes):
            return "6.5.2: a MAX_FRAME_SIZE out of range, before another"  # the library looks at the last
        return ""

    def _take(self, data: bytes) -> None:
        for event in self._server.receive_data(data):
            if isinstance(event, h2.events.RequestReceived):
                fields = {bytes(name): bytes(value) for name, value in event.headers}
                self.requests[event.stream_id] = (fields[b":path"].decode("latin-1"), bytearray())
            elif isinstance(event, h2.events.DataReceived):
                self.requests[event.stream_id][1].extend(event.data)
            elif isinstance(event, h2.events.StreamEnded):
                self.whole.add(event.stream_id)
            elif isinstance(event, h2.events.StreamReset):
                self.given_up.add(event.stream_id)
            elif isinstance(event, h2.events.ConnectionTerminated):
                self.broken = "the client has said GOAWAY"


def ids_of(data: bytes) -> set[str]:
    """The ids in the messages of a request, as far as they can be read."""
    found = set()
    while len(data) >= 5:
        size = int.from_bytes(data[1:5], "big")
        content = data[5 : 5 + size]
        try:
            content = zlib.decompress(content, 32 + zlib.MAX_WBITS) if data[0] else content
            found.add(str(pb.ModelInferRequest.FromString(content).id))
        except Exception:  # noqa: BLE001  what protobuf raises differs between its implementations
            break
        data = data[5 + size :]
    return found


class Reader(Replies):
    """Frames of the server's, read by their form alone."""

    goaway = marked = False

    def hear(self, data: bytes) -> bytes:
        """Reads; returns nothing to be sent."""
        for one in self.frames(data):
            self.goaway |= isinstance(one, GoAwayFrame)
            self.marked |= isinstance(one, PingFrame) and one.opaque_data == _MARK
            before = self.streams.get(one.stream_id, Reply())
            if isinstance(one, HeadersFrame | DataFrame):
                assert not before.over, "a frame behind the end of its stream"
                assert isinstance(one, HeadersFrame) or ":status" in before.fields, "DATA before HEADERS"
            if one.stream_id:
                self.take(one)
        return b""


def check_mutated(address: str, seed: int) -> str:
    """What is whole by the library's judgement is answered, and nothing goes to another stream; returns the verdict."""
    data = mutated(seed)
    judge = Judge(data)
    reader = Reader()
    expected = judge.whole - judge.given_up

    ends = judge.unfinished or bool(judge.broken)
    sent = chunks(seed, data + frame(wire.PING, 0, 0, _MARK))

    def done() -> bool:
        return not ends and reader.marked and are_over(reader.streams, expected)

    whole = talk(address, sent, reader.hear, done, ends=ends)
    if not ends:
        assert not reader.goaway, "GOAWAY where the library finds nothing wrong"
        assert reader.marked, "no answer to a PING"
        assert are_over(reader.streams, expected), f"not all of {expected} are answered"
    assert not (whole and reader.rest), "a frame that is cut off"
    for stream, answer in reader.streams.items():
        if answer.ended:
            assert int(answer.fields["grpc-status"]) in _STATUSES, answer.fields
            check_owner(judge, stream, answer, data)
    return judge.broken or "well"


def check_owner(judge: Judge, stream: int, answer: Reply, data: bytes) -> None:
    """The messages of an answer are those of its own stream; what came behind a broken rule the judge has not read."""
    if answer.fields["grpc-status"] == "0" and stream in judge.requests:
        path, body = judge.requests[stream]
        others = set(ids_in(answer, path)) - ids_of(bytes(body))
        if judge.broken:
            others = {one for one in others if sent_elsewhere(one, stream, data)}
        assert not others, "another stream's answer"


def sent_elsewhere(identity: str, stream: int, data: bytes) -> bool:
    """Whether an id stands in the data of other streams and not in that of this one."""
    frames, _ = wire.split(data[len(PREFACE) :])
    bodies = {number: b"".join(payload for *_, at, payload in frames if at == number) for number in range(1, 20, 2)}
    found = {number for number, body in bodies.items() if identity.encode() in body}
    return bool(found) and stream not in found


def _parts() -> list[object]:
    parts: list[object] = [pytest.param(0, 1000, id="1000")]
    parts.append(pytest.param(1000, 5000, id="5000", marks=pytest.mark.slow))
    parts += [
        pytest.param(start, 5000, id=f"{start}+5000", marks=pytest.mark.endurance)
        for start in range(6000, 206_000, 5000)
    ]
    return parts


@pytest.mark.parametrize(("first", "count"), _parts())
def test_sequences(fake_server: Server, first: int, count: int) -> None:
    """Half of them legal, half mutated; afterwards the server is the same, and its log has nothing above a warning."""
    process, logged = fake_server.pid, len(fake_server.log)
    verdicts: dict[str, int] = {}
    for seed in range(first, first + count):
        try:
            if seed % 2:
                verdict = check_mutated(fake_server.grpc, seed)
                verdicts[verdict] = verdicts.get(verdict, 0) + 1
            else:
                check_legal(fake_server.grpc, seed)
        except Exception as error:
            raise AssertionError(f"sequence {seed}: {error!r}") from error
    assert len(verdicts) > 5, "mutations that break too little"
    assert 10 * verdicts["well"] > count // 2, "mutations that break too much"
    assert fake_server.pid == process
    assert not re.search(r" (?:ERROR|CRITICAL) |Traceback", fake_server.log[logged:])
