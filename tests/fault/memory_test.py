"""Memory: what connections hold is bounded and given back, and refused, cancelled and lost requests leave nothing."""

from __future__ import annotations

import contextlib
import gzip
import json
import sys
from functools import partial
from typing import TYPE_CHECKING

import pytest
from h2.errors import ErrorCodes
from hyperframe.frame import WindowUpdateFrame
from tritonclient.grpc import service_pb2 as pb

from bertserve.loadtest.benchmarks.processes import resident_bytes
from bertserve.loadtest.errors import BenchError
from bertserve.loadtest.generator import frames as wire
from bertserve.loadtest.generator.closed_loop import Lane, connect
from bertserve.loadtest.generator.frames import DATA, END_HEADERS, END_STREAM, HEADERS, frame, prefixed, reset
from bertserve.loadtest.generator.grpc_messages import METHOD, request_bytes
from bertserve.loadtest.generator.http1 import post_bytes
from bertserve.loadtest.generator.http2 import GrpcWire
from tests.hostile.measure import LEFT_MB
from tests.support.canary import sing
from tests.support.clients import MODEL_INFER, RawConnection, bytes_tensor, metric, post_json
from tests.support.http2 import RawHttp2, request_fields
from tests.support.models import NAME
from tests.support.server import FAKE, Server
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from pathlib import Path

    from bertserve.loadtest.generator.wire import Reply


MIB = 1 << 20
HEAD = b"POST /embed HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
LARGEST = json.dumps({"inputs": "a text"}).encode().ljust(4 * MIB)


@pytest.fixture(scope="module")
def narrow_server(models: Path) -> Iterator[Server]:
    """A server that holds 16 MiB, four of the largest bodies."""
    with Server(models, *FAKE, "--buffer-limit-mb", "16") as server:
        yield server


@pytest.fixture
def connections(narrow_server: Server) -> Iterator[list[RawConnection]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(RawConnection(narrow_server.http)) for _ in range(5)]
    wait_for(lambda: held(narrow_server) == 0, "the end of all connections to give back what they held")


def held(server: Server) -> float:
    """Bytes of the budget that are in use."""
    return metric(server, "bertserve_buffer_bytes")


def test_bodies_on_their_way_are_bounded(narrow_server: Server, connections: list[RawConnection], models: Path) -> None:
    """The one for which there is no room gets 503 and a time to come back; short requests are served as ever."""
    refusals = metric(narrow_server, "bertserve_buffer_refusals_total")
    for connection in connections[:4]:
        connection.send(HEAD + b"Content-Length: %d\r\n\r\n" % len(LARGEST) + LARGEST[:-1])
    wait_for(lambda: held(narrow_server) == 16 * MIB, "four bodies to arrive")
    connections[4].send(HEAD + b"Content-Length: %d\r\n\r\n" % len(LARGEST) + LARGEST)
    reply = connections[4].read_to_end()
    assert reply.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1\r\n" in reply
    assert json.loads(reply.partition(b"\r\n\r\n")[2])["error_type"] == "Overloaded"
    assert metric(narrow_server, "bertserve_buffer_refusals_total") == refusals + 1
    sing(narrow_server, models)
    connections[0].send(LARGEST[-1:])
    assert connections[0].socket.recv(100).startswith(b"HTTP/1.1 200 ")
    wait_for(lambda: held(narrow_server) == 12 * MIB, "the body that was answered to be given back")
    assert post_json(narrow_server.http, "/embed", LARGEST).status == 200


def test_replies_that_nobody_reads_are_bounded(narrow_server: Server, connections: list[RawConnection]) -> None:
    """Once they have filled the budget, the next large reply is a 503."""
    body = json.dumps({"model": "minilm", "input": ["a text"] * 2048}).encode()
    sent = b"POST /v1/embeddings HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nContent-Length: "
    for connection in connections[:4]:
        connection.send(sent + b"%d\r\n\r\n" % len(body) + body)
        connection.socket.recv(1000)
    assert held(narrow_server) >= 16 * MIB
    connections[4].send(sent + b"%d\r\nConnection: close\r\n\r\n" % len(body) + body)
    assert connections[4].status() == 503


def test_inflated_bodies_are_bounded(narrow_server: Server) -> None:
    """Twenty small bodies that grow to 4 MiB each, at once, grow one at a time."""
    body = gzip.compress(LARGEST)
    head = HEAD + b"Connection: close\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body)
    with contextlib.ExitStack() as stack:
        many = [stack.enter_context(RawConnection(narrow_server.http)) for _ in range(20)]
        for connection in many:
            connection.send(head + body)
        assert {connection.status() for connection in many} <= {200, 503}
    assert held(narrow_server) == 0


def test_a_pipeline_that_waits_is_bounded(serve: Callable[..., Server]) -> None:
    """What lies behind a request that waits counts, and is parsed a little at a time."""
    server = serve(*FAKE, "--fake-ms", "100", "--buffer-limit-mb", "16")
    request = HEAD + b"Content-Length: 20\r\n\r\n" + b'{"inputs": "a text"}'
    with RawConnection(server.http) as connection:
        connection.send(request * 1500)
        assert 0 < wait_for(lambda: held(server), "the pipeline to be counted") <= 16 * MIB
    wait_for(lambda: held(server) == 0, "the pipeline to be given back")


BODY_LIMIT = 4 << 20
BODIES = 8
MAX_GROWTH = BODIES * BODY_LIMIT // 3
"""What is left of all bodies together may be no more than a third of them; allocators keep a little."""

_WITHOUT_COLLECTOR = "import gc, sys; gc.disable(); from bertserve import main; sys.exit(main())"
_NOT_FINITE = "hello"


@pytest.fixture(scope="module")
def uncollected_server(models: Path) -> Iterator[Server]:
    """A server in which only reference counting frees anything."""
    faults = ("--fake-faults", "7592:nan")  # the token of `_NOT_FINITE`
    with Server(models, *FAKE, *faults, program=(sys.executable, "-c", _WITHOUT_COLLECTOR)) as server:
        yield server


def post(path: str, body: bytes, *, headers: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nConnection: close\r\n{headers}"
    framing = "" if "Transfer-Encoding" in headers else f"Content-Length: {len(body)}\r\n"
    return f"{head}{framing}\r\n".encode() + body


def filled(message: object, size: int = BODY_LIMIT) -> bytes:
    """A message as JSON, with so many bytes."""
    return json.dumps(message).encode().ljust(size)


def leaves_nothing(server: Server, act: Callable[[int], object], warm_up: int, count: int, most_bytes: int) -> None:
    """Resident memory grows by less, at least in one of two rounds: what leaks grows each time."""
    act(warm_up)

    def growth() -> int:
        before = resident_bytes(server.pid)
        act(count)
        return resident_bytes(server.pid) - before

    assert growth() < most_bytes or growth() < most_bytes


_GZIP = "Content-Encoding: gzip\r\n"
_TEXTS = {"inputs": ["a text"]}
REFUSED_POSTS: dict[str, Callable[[], tuple[int, bytes]]] = {
    "no JSON": lambda: (400, post("/embed", b"x" * BODY_LIMIT)),
    "not UTF-8": lambda: (400, post("/embed", b'{"inputs": "' + b"\xff" * (BODY_LIMIT - 20) + b'"}')),
    "schema": lambda: (422, post("/embed", filled({"inputs": {"a": 1}}))),
    "too many inputs": lambda: (422, post("/embed", filled({"inputs": ["a text"] * 100_000}))),
    "too long a text": lambda: (422, post("/embed", filled({"inputs": "a" * (BODY_LIMIT - 70), "truncate": False}))),
    "empty": lambda: (400, post("/embed", filled({"inputs": []}))),
    "media type": lambda: (415, post("/embed", filled(_TEXTS)).replace(b"application/json", b"text/plain")),
    "encoding": lambda: (415, post("/embed", filled(_TEXTS), headers="Content-Encoding: br\r\n")),
    "deadline": lambda: (504, post("/embed", filled(_TEXTS), headers="X-Request-Timeout-Ms: 0.001\r\n")),
    "engine": lambda: (500, post("/embed", filled({"inputs": [_NOT_FINITE]}))),
    "no such path": lambda: (404, post("/no/such/path", filled(_TEXTS))),
    "method": lambda: (405, post("/embed", filled(_TEXTS)).replace(b"POST", b"PUT")),
    "no such model": lambda: (404, post("/models/no-such/embed", filled(_TEXTS))),
    "wrong task": lambda: (424, post("/embed_all", filled(_TEXTS))),
    "openai": lambda: (400, post("/v1/embeddings", filled({"input": 1, "model": "minilm"}))),
    "cohere": lambda: (422, post("/v2/rerank", filled({"query": 1}))),
    "oip": lambda: (400, post("/v2/models/minilm/infer", filled({"inputs": [{"name": "text"}]}))),
    "past the app's routes": lambda: (422, post("/tokenize", filled({"inputs": 1}))),
    "compressed": lambda: (422, post("/embed", gzip.compress(filled({"inputs": {"a": 1}})), headers=_GZIP)),
    "compressed, too large": lambda: (413, post("/embed", gzip.compress(b" " * (BODY_LIMIT + 1)), headers=_GZIP)),
    "compressed, cut off": lambda: (400, post("/embed", gzip.compress(filled(_TEXTS))[:-9], headers=_GZIP)),
    "chunks beyond the limit": lambda: (
        413,
        post(
            "/embed",
            b"".join([b"10000\r\n" + b"x" * 65_536 + b"\r\n"] * (BODY_LIMIT // 65_536 + 1)),
            headers="Transfer-Encoding: chunked\r\n",
        ),
    ),
}
"""How each is made: together they are 80 MB, and most processes run none of these tests."""


@pytest.mark.sampled(7)
@pytest.mark.parametrize("kind", REFUSED_POSTS)
def test_refused_requests_leave_nothing(uncollected_server: Server, kind: str) -> None:
    """Whatever they are refused for, and wherever on their way."""
    status, sent = REFUSED_POSTS[kind]()

    def refuse(count: int) -> None:
        for _ in range(count):
            with RawConnection(uncollected_server.http) as connection:
                connection.send(sent)
                assert connection.status() == status

    leaves_nothing(uncollected_server, refuse, 4, BODIES, MAX_GROWTH)


@pytest.mark.parametrize(
    "sent", [pytest.param(1 << 20, id="in its body", marks=pytest.mark.slow), pytest.param(None, id="behind it")]
)
def test_clients_that_leave_leave_nothing(uncollected_server: Server, sent: int | None) -> None:
    """In the middle of a body, or before their answer.

    One at a time: what bodies held at once is not given back by the allocator, and is no leak.
    """

    def leave(count: int) -> None:
        for _ in range(count):
            with RawConnection(uncollected_server.http) as connection:
                connection.send(post("/embed", filled(_TEXTS))[:sent])
            wait_for(lambda: not metric(uncollected_server, "bertserve_connections", protocol="http"), "its end")

    leaves_nothing(uncollected_server, leave, 4, BODIES * 2, MAX_GROWTH)


_AT_ONCE = 32
LEFT_BYTES = 800
"""Of each small request, where they are few."""


def _refusals(server: Server, way: str) -> Generator[None, None, None]:
    """32 small requests for each step, one after another on a connection; the step ends when all of them are refused.

    At full speed calls that are only refused use up a connection's credit in the end: then there is another one.
    """
    if way == "http":
        with RawConnection(server.http) as http:
            requests = post_bytes("test", "/embed", b'{"inputs": 7}') * _AT_ONCE
            while True:
                http.send(requests)
                answered = b""
                while answered.count(b"HTTP/1.1 422") < _AT_ONCE or not answered.endswith(b"}"):
                    answered += http.socket.recv(1 << 16)
                yield

    def check(reply: Reply) -> None:
        assert reply.fault

    message = prefixed(request_bytes("no-such-model", "a text"))
    host, port = server.grpc.split(":")
    while True:
        with connect(host, int(port)) as connection, _ended_for_its_cost():
            lane = Lane(connection, GrpcWire(server.grpc, METHOD), check)
            while True:
                lane.send([message] * _AT_ONCE)
                missing = _AT_ONCE
                while missing:
                    missing -= len(lane.receive())
                yield


@contextlib.contextmanager
def _ended_for_its_cost() -> Iterator[None]:
    """Takes the end of a connection that cost too much, and no other."""
    try:
        yield
    except BenchError as error:
        if "too_many_pings" not in str(error):
            raise


@pytest.mark.parametrize("count", [5_000, pytest.param(500_000, marks=pytest.mark.endurance)])
@pytest.mark.parametrize("way", ["http", "grpc"])
def test_any_number_of_small_refusals_leaves_nothing(uncollected_server: Server, way: str, count: int) -> None:
    """A million of them, half over each wire: no list, table or label grows with them."""
    refusals = _refusals(uncollected_server, way)

    def refuse(requests: int) -> int:
        for _ in range(requests // _AT_ONCE):
            next(refusals)
        return resident_bytes(uncollected_server.pid)

    with contextlib.closing(refusals):
        before = refuse(2_000)
        after = refuse(count)
        assert after - before < min(LEFT_MB * (1 << 20), count * LEFT_BYTES)


def test_idle_connections_hold_no_body(uncollected_server: Server) -> None:
    """A request that was answered is forgotten, however long its connection is kept."""
    sent = post("/embed", filled(_TEXTS)).replace(b"Connection: close", b"Connection: keep-alive")
    kept = []
    before = resident_bytes(uncollected_server.pid)
    try:
        for _ in range(BODIES):
            kept.append(RawConnection(uncollected_server.http))
            kept[-1].send(sent)
            assert kept[-1].socket.recv(1 << 16).startswith(b"HTTP/1.1 200")
        assert resident_bytes(uncollected_server.pid) - before < MAX_GROWTH
    finally:
        for connection in kept:
            connection.socket.close()


SIZE = 2 << 20
CALLS, WARM_UP = 32, 10
ALLOWED = SIZE // 4
"""Of each message; the rest is what allocators keep."""

FRAME_BYTES = 16_384
FIRST_WINDOW = 65_535
STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"


@pytest.fixture(scope="module")
def slow_server(models: Path) -> Iterator[Server]:
    """A server whose batches take long enough to leave while they run, with all that observes requests."""
    with Server(models, *FAKE, "--fake-ms", "100", "--access-log", "true", "--log-level", "error") as running:
        yield running


def request(text: str = "small", model: str = NAME, padding: int = SIZE) -> bytes:
    """A request of so many bytes more than it needs, whose text may not be cut."""
    message = pb.ModelInferRequest(model_name=model)
    message.inputs.add(name="text", datatype="BYTES", shape=[1, 1])
    message.raw_input_contents.append(bytes_tensor([text]))
    message.parameters["padding"].string_param = "x" * padding
    message.parameters["truncate"].bool_param = False
    return message.SerializeToString()


def tensor(name: str, datatype: str, shape: list[int], **contents: list[int]) -> bytes:
    """A request with one tensor; without contents it is a blob of empty texts."""
    message = pb.ModelInferRequest(model_name=NAME)
    added = message.inputs.add(name=name, datatype=datatype, shape=shape)
    for field, values in contents.items():
        getattr(added.contents, field).extend(values)
    if not contents:
        message.raw_input_contents.append(bytes(SIZE))
    return message.SerializeToString()


GOOD = request()
RESET = ErrorCodes.CANCEL.to_bytes(4, "big")


class Client(RawHttp2):
    stream = -1
    window = 0

    def upload(self, message: bytes, path: str = MODEL_INFER, *, flags: int = END_STREAM, **fields: str) -> int:
        """Begins a call with a large message, as far as the server lets it; returns its stream."""
        self.stream += 2
        self.window = FIRST_WINDOW
        errors = [("triton_grpc_error", fields.pop("errors"))] if "errors" in fields else []
        self.send(frame(HEADERS, END_HEADERS, self.stream, self.block(request_fields(path, **fields) + errors)))
        self.message(message, flags=flags, compressed="grpc_encoding" in fields)
        return self.stream

    def message(self, message: bytes, *, flags: int, compressed: bool = False) -> None:
        """A message of the last call, or as much as is taken of it before the call is refused."""
        rest = memoryview(prefixed(message, compressed=compressed))
        while rest:
            while not self.window:
                if self._is_over():
                    return
                self._await_window()
            part, rest = rest[: min(FRAME_BYTES, self.window)], rest[min(FRAME_BYTES, self.window) :]
            self.window -= len(part)
            self.send(frame(DATA, 0 if rest else flags, self.stream, bytes(part)))

    def _await_window(self) -> None:
        for arrived in self.frames():
            self.replies.take(arrived)
            if isinstance(arrived, WindowUpdateFrame) and arrived.stream_id == self.stream:
                self.window += arrived.window_increment
                return
            if self._is_over():
                return

    def _is_over(self) -> bool:
        reply = self.replies.streams.get(self.stream)
        return reply is not None and reply.ended


def refused(message: bytes, status: int, path: str = MODEL_INFER, **fields: str) -> Callable[[Server, int], None]:
    def run(slow_server: Server, count: int) -> None:
        with Client(slow_server.grpc) as client:
            for _ in range(count):
                assert client.reply(client.upload(message, path, **fields)).status == status

    return run


def begin(slow_server: Server, client: Client, path: str) -> int:
    """A call of which the server has everything; returns its stream."""
    before = metric(slow_server, "bertserve_admitted_tokens")
    stream = client.upload(GOOD, path, flags=END_STREAM if path == MODEL_INFER else 0)
    wait_for(lambda: metric(slow_server, "bertserve_admitted_tokens") > before, "the call to be admitted")
    return stream


def cancelled(path: str) -> Callable[[Server, int], None]:
    """Calls that are given up while they are computed."""

    def run(slow_server: Server, count: int) -> None:
        with Client(slow_server.grpc) as client:
            for _ in range(count):
                client.send(frame(wire.RST_STREAM, 0, begin(slow_server, client, path), RESET))
                wait_for(lambda: metric(slow_server, "bertserve_admitted_tokens") == 0, "the call to be forgotten")

    return run


def lost(path: str) -> Callable[[Server, int], None]:
    """Calls whose connections go while they are computed."""

    def run(slow_server: Server, count: int) -> None:
        for _ in range(count):
            with Client(slow_server.grpc) as client:
                begin(slow_server, client, path)
            wait_for(lambda: metric(slow_server, "bertserve_admitted_tokens") == 0, "the call to be forgotten")

    return run


def half(slow_server: Server, count: int) -> None:
    """Calls that are given up before their message is whole."""
    with Client(slow_server.grpc) as client:
        for _ in range(count):
            client.upload(GOOD, flags=0)
            client.send(reset(client.stream))


def several(slow_server: Server, count: int) -> None:
    """Streams that a refusal ends while other messages of theirs are there."""
    message = request(model="nobody")
    with Client(slow_server.grpc) as client:
        for _ in range(count // 4):
            client.upload(GOOD, STREAM_INFER, flags=0, errors="true")
            for _ in range(3):
                client.message(message, flags=0)
            assert client.reply(client.stream).status == 5


def told(slow_server: Server, count: int) -> None:
    """Messages of one stream, each refused in a message."""
    message = request(model="nobody")
    with Client(slow_server.grpc) as client:
        client.upload(message, STREAM_INFER, flags=0)
        for _ in range(count - 1):
            client.message(message, flags=0)
        client.send(frame(DATA, END_STREAM, client.stream))
        assert client.reply(client.stream).status == 0


WAYS: dict[str, Callable[[], Callable[[Server, int], None]]] = {
    "an unknown model": lambda: refused(request(model="nobody"), 5),
    "no message": lambda: refused(b"\xff" * SIZE, 3),
    "many tensors": lambda: refused(b"\x2a\0" * (SIZE // 2), 3),
    "many outputs": lambda: refused(b"\x32\0" * (SIZE // 2), 3),
    "many parameters": lambda: refused(b"".join(b"\x22\x06\x0a\x04%04x" % number for number in range(1 << 16)) * 4, 3),
    "many texts": lambda: refused(tensor("text", "BYTES", [SIZE // 4, 1]), 3),
    "many numbers": lambda: refused(tensor("input_ids", "INT32", [1, SIZE - 99], int_contents=[5] * (SIZE - 99)), 3),
    "many rows": lambda: refused(tensor("input_ids", "INT64", [SIZE // 8, 1], int64_contents=[5] * (SIZE // 8)), 3),
    "many dimensions": lambda: refused(tensor("input_ids", "INT64", [5] * (SIZE // 2), int64_contents=[5]), 3),
    "too many characters": lambda: refused(request("x" * SIZE, padding=0), 3),
    "too late": lambda: refused(GOOD, 4, grpc_timeout="1u"),
    "too late to be computed": lambda: refused(GOOD, 4, grpc_timeout="30m"),
    "inflated and refused": lambda: refused(gzip.compress(request(model="nobody")), 5, grpc_encoding="gzip"),
    "inflated beyond the limit": lambda: refused(gzip.compress(request(padding=3 * SIZE)), 8, grpc_encoding="gzip"),
    "stream, refused": lambda: refused(request(model="nobody"), 5, STREAM_INFER, errors="true"),
    "stream, refused among others": lambda: several,
    "stream, told": lambda: told,
    "cancelled": lambda: cancelled(MODEL_INFER),
    "stream, cancelled": lambda: cancelled(STREAM_INFER),
    "lost": lambda: lost(MODEL_INFER),
    "stream, lost": lambda: lost(STREAM_INFER),
    "half a message": lambda: half,
}
"""How each is made: of all together the messages are large, and most processes run none of these tests."""


@pytest.mark.sampled(7)
@pytest.mark.parametrize("way", WAYS)
def test_large_messages_leave_nothing(slow_server: Server, way: str) -> None:
    """However their calls end; the allocator may once keep more than before."""
    leaves_nothing(slow_server, partial(WAYS[way](), slow_server), WARM_UP, CALLS, CALLS * ALLOWED)
