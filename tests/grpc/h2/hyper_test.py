"""An independent peer: the client of the `h2` library, over bytes that are cut anywhere."""

from __future__ import annotations

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.settings
from hypothesis import given
from hypothesis import strategies as st

from bertserve.serving.grpc.h2 import (
    DataReceived,
    ErrorCode,
    Event,
    H2Connection,
    Limits,
    RequestReceived,
    StreamReset,
    encode_fields,
    encode_status,
)
from tests.support.http2 import REQUEST, Reply, hear

REPLY = encode_status(200) + encode_fields([("content-type", "text/plain")])
WINDOW = 65_535
_MAX_PIECES = 30

sizes = st.one_of(st.integers(0, 300), st.integers(0, 150_000))
cuts = st.lists(st.integers(1, 40_000), min_size=1, max_size=20)
settings = st.fixed_dictionaries(
    {},
    optional={
        h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: st.integers(0, 300_000),
        h2.settings.SettingCodes.MAX_FRAME_SIZE: st.integers(16_384, 60_000),
        h2.settings.SettingCodes.HEADER_TABLE_SIZE: st.sampled_from([0, 100, 4096]),
    },
)


class Echo:
    """A server that answers each body with itself, and its number as a trailer."""

    def __init__(self, limits: Limits) -> None:
        self.h2 = H2Connection(limits)
        self.bodies: dict[int, bytes] = {}
        self.resets: list[tuple[int, int]] = []

    def receive(self, data: bytes) -> bytes:
        """What it answers to some bytes; every turn of the loop that they need is taken."""
        self._handle(self.h2.receive(data))
        while self.h2.pending:
            self._handle(self.h2.receive(b""))
        return self.h2.data_to_send()

    def _handle(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, RequestReceived):
                self.bodies[event.stream.number] = b""
            elif isinstance(event, DataReceived):
                self.bodies[event.stream.number] += event.data
                self.h2.expect(event.stream, 200_000)
            elif isinstance(event, StreamReset):
                self.resets.append((event.stream.number, event.code))
            if isinstance(event, RequestReceived | DataReceived) and event.ended:
                number = event.stream.number
                trailers = encode_fields([("x-number", str(number))])
                self.h2.send(event.stream, REPLY, self.bodies[number], trailers)


class Client:
    """The library's client, its requests half sent, and its replies."""

    def __init__(
        self, server: Echo, chunks: list[int], settings: dict[h2.settings.SettingCodes, int] | None = None
    ) -> None:
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        self.h2.initiate_connection()
        if settings:
            self.h2.update_settings(settings)
        self.server = server
        self.chunks = chunks
        self.unsent: dict[int, bytes] = {}
        self.replies: dict[int, Reply] = {}
        self.events: list[h2.events.Event] = []

    def request(self, stream: int, body: bytes) -> None:
        self.h2.send_headers(stream, REQUEST)
        self.unsent[stream] = body

    def talk(self) -> None:
        """Exchanges bytes until both sides have said all they can."""
        self._send()
        while outgoing := self.h2.data_to_send():
            replies = b"".join(map(self.server.receive, self._cut(outgoing)))
            for piece in self._cut(replies):
                self.events += hear(self.h2, piece, self.replies)
            self._send()

    def _cut(self, data: bytes) -> list[bytes]:
        pieces, at = [], 0
        while at < len(data) and len(pieces) < _MAX_PIECES:
            size = self.chunks[len(pieces) % len(self.chunks)]
            pieces.append(data[at : at + size])
            at += size
        return [*pieces, data[at:]]

    def _send(self) -> None:
        for stream, body in list(self.unsent.items()):
            size = min(self.h2.local_flow_control_window(stream), self.h2.max_outbound_frame_size, len(body))
            if size == len(body):
                self.h2.send_data(stream, body, end_stream=True)
                del self.unsent[stream]
            elif size:
                self.h2.send_data(stream, body[:size], pad_length=min(9, size - 1) if size < 200 else None)
                self.unsent[stream] = body[size:]


@given(st.lists(sizes, min_size=1, max_size=5), cuts, settings, st.sampled_from([3, 50, 1000]))
def test_requests_and_replies_of_any_size(
    lengths: list[int], chunks: list[int], client_settings: dict[h2.settings.SettingCodes, int], work: int
) -> None:
    """Flow control both ways, any cutting, any settings, any budget of work: each body comes back whole."""
    client = Client(Echo(Limits(turn_work=work, credit=1 << 30)), chunks, client_settings)
    bodies = {2 * index + 1: bytes([index]) * length for index, length in enumerate(lengths)}
    for stream, body in bodies.items():
        client.request(stream, body)
    client.talk()
    if client_settings.get(h2.settings.SettingCodes.INITIAL_WINDOW_SIZE) == 0:
        # Nobody but the client can open a window of nothing.
        for stream, body in bodies.items():
            if body:
                client.h2.increment_flow_control_window(1 << 20, stream)
        client.talk()
    assert {stream: reply.data for stream, reply in client.replies.items() if reply.ended} == bodies
    assert all(client.replies[stream].fields["x-number"] == str(stream) for stream in bodies)
    assert client.server.h2.streams == []


@given(cuts, st.lists(st.sampled_from(["ping", "settings", "reset", "request"]), max_size=20))
def test_pings_settings_and_resets_between_requests(chunks: list[int], steps: list[str]) -> None:
    """Pings come back, settings are acknowledged, a request that was given up is reported; the others are answered."""
    client = Client(Echo(Limits()), chunks)
    given_up, asked = [], []
    for number, step in enumerate(steps):
        stream = 2 * number + 1
        if step == "ping":
            client.h2.ping(number.to_bytes(8, "big"))
        elif step == "settings":
            client.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: WINDOW + number})
        elif step == "reset":
            client.h2.send_headers(stream, REQUEST)
            client.h2.reset_stream(stream, h2.errors.ErrorCodes.CANCEL)
            given_up.append((stream, ErrorCode.CANCEL))
        else:
            client.request(stream, b"x" * number)
            asked.append(stream)
        client.talk()
    pongs = [event.ping_data for event in client.events if isinstance(event, h2.events.PingAckReceived)]
    acknowledged = [event for event in client.events if isinstance(event, h2.events.SettingsAcknowledged)]
    assert pongs == [number.to_bytes(8, "big") for number, step in enumerate(steps) if step == "ping"]
    assert len(acknowledged) == (steps.count("settings") + 1 if steps else 0)
    assert client.server.resets == given_up
    assert {stream for stream, reply in client.replies.items() if reply.ended} == set(asked)


def test_headers_larger_than_a_frame() -> None:
    """Both ways in CONTINUATION frames."""
    server = H2Connection(Limits(header_bytes=1 << 17))
    client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    client.initiate_connection()
    client.send_headers(1, [*REQUEST, *[(f"x-{number}", "~" * 5000) for number in range(10)]], end_stream=True)
    (event,) = server.receive(client.data_to_send())
    assert isinstance(event, RequestReceived)
    assert event.headers.fields[-1] == (b"x-9", b"~" * 5000)
    server.send(event.stream, None, b"", REPLY + encode_fields([("x-long", "y" * 40_000)]))
    (response,) = [
        event for event in client.receive_data(server.data_to_send()) if isinstance(event, h2.events.ResponseReceived)
    ]
    assert dict(response.headers)[b"x-long"] == b"y" * 40_000
