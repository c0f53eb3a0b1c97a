"""Row 34 of the failure modes: with API keys every route and every call needs one, but what probes and pages need."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import openai
import pytest
import tritonclient.utils
from google.protobuf import descriptor_pb2
from h2.errors import ErrorCodes
from hyperframe.frame import HeadersFrame

from bertserve import serving
from bertserve.loadtest.generator.frames import DATA, END_HEADERS, END_STREAM, HEADERS, frame, prefixed
from bertserve.serving.grpc.services import reflection_pb2
from bertserve.serving.security.keys import ApiKeys
from bertserve.serving.security.watch import FileWatch
from tests.support.clients import (
    MODEL_INFER,
    HttpConnection,
    RawConnection,
    Refused,
    get,
    grpc_raw,
    http_call,
    metric,
    post_json,
)
from tests.support.credentials import FIRST, SECOND, THIRD, WRONG, bearer, write_keys
from tests.support.http2 import RawHttp2, request_fields
from tests.support.models import NAME
from tests.support.openai_client import client_of
from tests.support.server import Server
from tests.support.tables import Tables
from tests.support.triton_clients import FLAVOURS, TritonClient
from tests.support.virtual_time import virtually
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

WEB = Path(serving.__file__).parent / "web"
CONSOLE = {f"/console/{entry.name}" for entry in WEB.iterdir() if entry.suffix != ".html"}
OPEN_PATHS = {"/", *CONSOLE, "/livez", "/readyz", "/health", "/ping", "/v2/health/live", "/v2/health/ready"}
OPEN_CALLS = {
    *("/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"),
    *("/inference.GRPCInferenceService/ServerLive", "/inference.GRPCInferenceService/ServerReady"),
}
ENDLESS_CALLS = {"/grpc.health.v1.Health/Watch"}
METADATA = "/inference.GRPCInferenceService/ServerMetadata"
REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
SMALL = b'{"inputs": "small"}'
RESOURCE_EXHAUSTED, UNAUTHENTICATED = 8, 16
READ_AGAIN_S = 2.0
"""In which a change of the file has been noticed."""


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    file = write_keys(tmp_path_factory.mktemp("keys") / "keys", FIRST, SECOND)
    with Server(models, "--engine", "fake", "--api-keys-file", str(file)) as running:
        yield running


@pytest.fixture(scope="module")
def tables(models: Path) -> Tables:
    """Every route and call, from the server's own tables."""
    return Tables.of(models)


def filled(path: str) -> str:
    """A path with names for its parts in braces."""
    return path.replace("{model}", NAME).replace("{version}", "1").replace("{region}", "r")


def http_status(address: str, method: str, path: str, key: str | None) -> int:
    body = b"{}" if method == "POST" and key else None
    return http_call(address, method, filled(path), body, bearer(key)).status


def grpc_code(address: str, call: str, key: str | None) -> str:
    metadata = [("authorization", f"Bearer {key}")] if key else []
    with RawHttp2(address) as connection:
        fields = request_fields(call) + metadata
        block = frame(HEADERS, END_HEADERS, 1, connection.block(fields))
        connection.send(block + frame(DATA, END_STREAM, 1, prefixed(b"")))
        if call in ENDLESS_CALLS:
            arrived = connection.replies.take(connection.await_frame(HeadersFrame))
            return "OK" if arrived.status < 0 else grpc.StatusCode(_code(arrived.status)).name
        return _code(connection.reply(1).status)[1].upper().replace(" ", "_")


def _code(number: int) -> tuple[int, str]:
    return next(code.value for code in grpc.StatusCode if code.value[0] == number)


def sweep(server: Server, tables: Tables, good: tuple[str, ...], bad: tuple[str | None, ...]) -> None:
    """Asks every route and call with each key, and checks which were refused."""
    for key in (*good, *bad):
        refused = {(method, path) for method, path in tables.http if http_status(server.http, method, path, key) == 401}
        reading = {("GET", path) for path in OPEN_PATHS}
        assert refused == (set() if key in good else {*map(tuple, tables.http)} - reading), key
    for key in (*good, *bad):
        refused = {call for call in tables.grpc if grpc_code(server.grpc, call, key) == "UNAUTHENTICATED"}
        assert refused == (set() if key in good else set(tables.grpc) - OPEN_CALLS), key


def test_row_34_every_route_and_call_of_the_tables(server: Server, tables: Tables) -> None:
    """Without a key or with a wrong one all are refused but those that are open; with either key none is."""
    assert {path for _, path in tables.http} > OPEN_PATHS
    assert set(tables.grpc) > OPEN_CALLS
    sweep(server, tables, good=(FIRST, SECOND), bad=(None, WRONG))


@pytest.mark.parametrize("key", [None, WRONG, FIRST])
def test_row_34_the_metrics_port_asks_for_nothing(server: Server, tables: Tables, key: str | None) -> None:
    """Kubelets and scrapes have no key: all that it has is open, and the rest is not there, whoever asks."""
    assert {path for _, path in tables.probes} == {"/livez", "/readyz", "/metrics", "/status"}
    assert {http_status(server.metrics, method, path, key) for method, path in tables.probes} == {200}
    unknown = http_call(server.metrics, "GET", "/info", headers=bearer(key))
    assert (unknown.status, unknown.json()["error"]) == (
        404,
        "unknown path; available: /livez, /readyz, /metrics, /status",
    )
    assert grpc_code(server.metrics, "/grpc.health.v1.Health/Check", key) == "OK"
    assert grpc_code(server.metrics, MODEL_INFER, key) == "UNIMPLEMENTED"


def test_row_34_every_route_that_the_documentation_lists(server: Server) -> None:
    """As a client sees them; the document also says which need a key, and that they answer 401."""
    document = json.loads(http_call(server.http, "GET", "/openapi.json", headers=bearer(SECOND)).body)
    assert document["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    for path, entries in document["paths"].items():
        for method, entry in entries.items():
            needs = path not in OPEN_PATHS or method != "get"
            assert (http_status(server.http, method.upper(), path, None) == 401) is needs, path
            assert entry.get("security", []) == ([{"key": []}] if needs else []), path
            assert ("401" in entry["responses"]) is needs, path


def test_row_34_every_call_that_reflection_lists(server: Server) -> None:
    """As a client sees them."""
    metadata = [("authorization", f"Bearer {FIRST}")]
    with grpc.insecure_channel(server.grpc) as channel:
        ask = channel.stream_stream(
            REFLECTION,
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )

        def asked(**question: str) -> reflection_pb2.ServerReflectionResponse:
            return next(ask(iter([reflection_pb2.ServerReflectionRequest(**question)]), metadata=metadata))

        services = [entry.name for entry in asked(list_services="").list_services_response.service]
        calls = set()
        for service in services:
            reply = asked(file_containing_symbol=service)
            for data in reply.file_descriptor_response.file_descriptor_proto:
                described = descriptor_pb2.FileDescriptorProto.FromString(data)
                calls |= {
                    f"/{described.package}.{found.name}/{method.name}"
                    for found in described.service
                    for method in found.method
                }
    assert calls > OPEN_CALLS
    for call in sorted(calls):
        expected = call not in OPEN_CALLS
        assert (grpc_code(server.grpc, call, None) == "UNAUTHENTICATED") is expected, call


@pytest.mark.parametrize(
    ("path", "status"),
    [
        *[
            (path, 404)
            for path in ("/no/such/path", "/docs/other", "/v2/models/other", "//", "/livez/", "/%2e", "/%00")
        ],
        ("/embed", 405),
    ],
)
def test_row_34_what_does_not_exist_is_not_told(server: Server, path: str, status: int) -> None:
    """Unknown paths and methods are 401 like known ones, until there is a key."""
    assert get(server.http, path).status == 401
    assert http_call(server.http, "GET", path, headers=bearer(FIRST)).status == status


def test_row_34_unknown_calls_are_not_told(server: Server) -> None:
    for change in ({"path": "/no.Such/Call"}, {"content_type": "text/plain"}, {"method": "GET"}):
        with RawHttp2(server.grpc) as connection:
            connection.call(1, b"", **change)
            assert connection.reply(1).status == UNAUTHENTICATED


def test_row_34_each_protocol_refuses_in_its_own_words(server: Server) -> None:
    """Status 401, `WWW-Authenticate`, and the protocol's error body, which tells nothing of the keys."""
    for path, read in {
        "/embed": lambda body: body["error_type"] == "Validation" and body["error"],
        "/": lambda body: body["error_type"] == "Validation" and body["error"],
        "/v1/embeddings": lambda body: body["error"]["code"] == "invalid_api_key" and body["error"]["message"],
        "/v2/models/minilm/infer": lambda body: body["error"],
        "/v2/rerank": lambda body: body["message"],
        "/classify": lambda body: body["error"]["reason"] == "invalid_api_key" and body["error"]["message"],
    }.items():
        for key, words in ((None, "missing API key"), (WRONG, "invalid API key")):
            reply = post_json(server.http, path, SMALL, bearer(key))
            assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
            assert words in read(reply.json())
            assert WRONG.encode() not in reply.body


def test_row_34_grpc_says_why(server: Server) -> None:
    """UNAUTHENTICATED, with the reason in the trailers; refusals are counted."""
    before = metric(server, "bertserve_requests_total", reason="invalid_api_key")
    with pytest.raises(Refused) as refused:
        grpc_raw(server.grpc, MODEL_INFER, b"", headers=[("authorization", f"Bearer {WRONG}")])
    assert refused.value.status == "UNAUTHENTICATED"
    assert refused.value.headers["bertserve-reason"] == "invalid_api_key"
    assert metric(server, "bertserve_requests_total", reason="invalid_api_key") == before + 1


@pytest.mark.parametrize(
    ("value", "status"),
    [
        (f"Bearer {FIRST}", 200),
        (f"bearer {FIRST}", 200),
        (f"BEARER   {SECOND} ", 200),
        (FIRST, 401),
        (f"Basic {FIRST}", 401),
        (f"Bearer {FIRST}x", 401),
        (f"Bearer {FIRST[:-1]}", 401),
        (f"Bearer {FIRST} {FIRST}", 401),
        ("Bearer # those of the tests", 401),
        ("Bearer", 401),
        ("Bearer ", 401),
        ("", 401),
        ("Bearer \xff\xfe", 401),
    ],
)
def test_row_34_how_a_key_is_sent(server: Server, value: str, status: int) -> None:
    """The scheme in any case, the key to the letter, on both wires. In HTTP/2, space around a value is malformed."""
    assert post_json(server.http, "/embed", SMALL, {"Authorization": value}).status == status
    fields = request_fields(REFLECTION)
    with RawHttp2(server.grpc) as connection:
        raw = [*((name.encode(), text.encode()) for name, text in fields), (b"authorization", value.encode("latin-1"))]
        connection.send(frame(HEADERS, END_HEADERS | END_STREAM, 1, connection.block(raw)))
        reply = connection.reply(1)
        if value != value.strip():
            assert reply.reset == ErrorCodes.PROTOCOL_ERROR
        else:
            assert reply.status == (0 if status == 200 else UNAUTHENTICATED)


def test_row_34_two_keys_that_differ_are_refused(server: Server) -> None:
    """A second `Authorization` line may only repeat the first (RFC 9110, section 5.3)."""
    for keys, status in (((FIRST, WRONG), 400), ((WRONG, FIRST), 400), ((FIRST, FIRST), 200)):
        lines = "".join(f"Authorization: Bearer {key}\r\n" for key in keys)
        head = f"POST /embed HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nConnection: close\r\n{lines}"
        with RawConnection(server.http) as connection:
            connection.send(f"{head}Content-Length: {len(SMALL)}\r\n\r\n".encode() + SMALL)
            assert connection.status() == status


@pytest.mark.parametrize(
    "framing",
    ["Content-Length: 4000000", "Content-Length: 4000000\r\nExpect: 100-continue", "Transfer-Encoding: chunked"],
)
@pytest.mark.parametrize("path", ["/embed", "/", "/livez", "/v2/health/live"])
def test_row_34_a_body_is_not_waited_for(server: Server, path: str, framing: str) -> None:
    """The refusal comes from the headers alone, instead of the leave to send a body, also of open routes."""
    with RawConnection(server.http) as connection:
        connection.send(f"POST {path} HTTP/1.1\r\nHost: test\r\n{framing}\r\n\r\n".encode())
        assert connection.status() == 401


@pytest.mark.parametrize(
    ("call", "status"), [(MODEL_INFER, UNAUTHENTICATED), *[(call, RESOURCE_EXHAUSTED) for call in sorted(OPEN_CALLS)]]
)
def test_row_34_no_large_message_of_strangers_is_waited_for(server: Server, call: str, status: int) -> None:
    """Open calls take 4 KiB at most, the others nothing."""
    with RawHttp2(server.grpc) as connection:
        connection.send(frame(HEADERS, END_HEADERS, 1, connection.block(request_fields(call))))
        if call in OPEN_CALLS:
            connection.send(frame(DATA, 0, 1, b"\0" + (5000).to_bytes(4, "big")))
        assert connection.reply(1).status == status


def test_row_34_each_request_of_a_connection_is_looked_at(server: Server) -> None:
    """A key shown once opens nothing for the requests behind it."""
    with HttpConnection(server.http) as connection:
        for key, status in ((FIRST, 200), (None, 401), (SECOND, 200), (WRONG, 401), (FIRST, 200)):
            headers = {"Content-Type": "application/json", **bearer(key)}
            assert connection.call("POST", "/embed", SMALL, headers).status == status
    with RawHttp2(server.grpc) as connection:
        for number, key in enumerate((FIRST, None, FIRST, WRONG, WRONG, SECOND, None)):
            more = {} if key is None else {"authorization": f"Bearer {key}"}
            connection.call(2 * number + 1, b"", METADATA, **more)
            good = key in {FIRST, SECOND}
            assert connection.reply(2 * number + 1).status == (0 if good else UNAUTHENTICATED)


def test_a_refusal_comes_after_the_answers_that_are_due(server: Server) -> None:
    """A request without a key behind a good one does not cost that one its answer."""
    good = f"POST /embed HTTP/1.1\r\nHost: test\r\nAuthorization: Bearer {FIRST}\r\nContent-Type: application/json\r\n"
    good += f"Content-Length: {len(SMALL)}\r\n\r\n{SMALL.decode()}"
    with RawConnection(server.http) as connection:
        connection.send(good.encode() + b"GET /status HTTP/1.1\r\nHost: test\r\n\r\n" + good.encode())
        reply = connection.read_to_end()
    assert reply.count(b"HTTP/1.1 200") == 1
    assert reply.index(b"HTTP/1.1 200") < reply.index(b"HTTP/1.1 401")


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_tritonclient(server: Server, flavour: str) -> None:
    """All four flavours take the key as a header; without it they say what is wrong."""
    client = TritonClient(flavour, server)
    headers = {"authorization": f"Bearer {SECOND}"}
    assert client.infer(NAME, {"text": ["hello"]}, headers=headers).as_numpy("embedding").shape == (1, 384)
    assert client.call("is_server_ready")
    with pytest.raises(tritonclient.utils.InferenceServerException, match="missing API key"):
        client.infer(NAME, {"text": ["hello"]})


def test_openai(server: Server) -> None:
    """Its client sends the key it is given, and knows what 401 means."""
    with client_of(server, FIRST) as client:
        assert len(client.embeddings.create(model=NAME, input="hello").data) == 1
    with client_of(server, WRONG) as client, pytest.raises(openai.AuthenticationError) as refused:
        client.embeddings.create(model=NAME, input="hello")
    assert refused.value.code == "invalid_api_key"


def test_keys_are_shown_nowhere(server: Server) -> None:
    """Not in the log, on no page, not in the process's arguments; the file's name is no secret."""
    shown = [server.log.encode(), Path(f"/proc/{server.pid}/cmdline").read_bytes()]
    for path in ("/status", "/info", "/", "/metrics", "/openapi.json"):
        shown.append(http_call(server.http, "GET", path, headers=bearer(FIRST)).body)  # noqa: PERF401
    assert all(shown)
    for key in (FIRST, SECOND, WRONG):
        assert not [data for data in shown if key.encode() in data]


def ask(address: str, key: str) -> int:
    return http_call(address, "GET", "/v2", headers=bearer(key)).status


def test_keys_are_read_again(serve: Callable[..., Server], tables: Tables, tmp_path: Path) -> None:
    """A changed file counts without a restart, also on connections that are open, on every route and call.

    A request under way is answered.
    """
    file = write_keys(tmp_path / "keys", FIRST, SECOND)
    server = serve("--engine", "fake", "--api-keys-file", str(file))
    with (
        HttpConnection(server.http) as http,
        RawHttp2(server.grpc) as connection,
        RawConnection(server.http) as under_way,
    ):
        head = f"POST /embed HTTP/1.1\r\nHost: test\r\nAuthorization: Bearer {FIRST}\r\nConnection: close\r\n"
        sized = f"Content-Type: application/json\r\nContent-Length: {len(SMALL)}\r\n\r\n"
        under_way.send((head + sized).encode() + SMALL[:5])
        assert http.call("GET", "/v2", headers=bearer(FIRST)).status == 200
        more = {"authorization": f"Bearer {FIRST}"}
        connection.call(1, b"", METADATA, **more)
        connection.call(3, b"", METADATA, **more)
        assert (connection.reply(1).status, connection.reply(3).status) == (0, 0)
        connection.send(frame(HEADERS, END_HEADERS, 5, connection.block(request_fields(REFLECTION, **more))))
        write_keys(file, SECOND, THIRD)
        wait_for(lambda: ask(server.http, THIRD) == 200, "the new key to count")
        assert connection.reply(5).status == UNAUTHENTICATED  # a conversation ends with its key
        under_way.send(SMALL[5:])
        assert under_way.status() == 200
        assert http.call("GET", "/v2", headers=bearer(FIRST)).status == 401
        connection.call(7, b"", METADATA, **more)
        assert connection.reply(7).status == UNAUTHENTICATED
    sweep(server, tables, good=(SECOND, THIRD), bad=(FIRST,))


@contextlib.asynccontextmanager
async def watched(file: Path) -> AsyncIterator[ApiKeys]:
    """The keys of a file, read again as the server does while the block runs."""
    keys, watch = ApiKeys(file), FileWatch()

    async def reload() -> str:
        keys.reload()
        return f"{len(keys)} in use"

    watch.add("API keys", [file], reload)
    running = asyncio.create_task(watch.run())
    yield keys
    running.cancel()


def allows(keys: ApiKeys, *asked: str) -> list[bool]:
    return [keys.allow(f"Bearer {key}".encode()) for key in asked]


@virtually
async def test_a_secret_of_kubernetes_is_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its files are links through `..data`, which is turned round in one move; the log says how many keys there are."""
    caplog.set_level("INFO")
    for name, key in (("before", FIRST), ("after", SECOND)):
        (tmp_path / name).mkdir()
        write_keys(tmp_path / name / "keys", key)
    (tmp_path / "..data").symlink_to("before")
    (tmp_path / "keys").symlink_to("..data/keys")
    async with watched(tmp_path / "keys") as keys:
        assert allows(keys, FIRST, SECOND) == [True, False]
        (tmp_path / "..new").symlink_to("after")
        (tmp_path / "..new").replace(tmp_path / "..data")
        await asyncio.sleep(READ_AGAIN_S)
        assert allows(keys, FIRST, SECOND) == [False, True]
    assert "API keys: reloaded, 1 in use" in caplog.text


@virtually
async def test_a_file_that_is_broken_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Empty, wrong or gone: the keys that were there go on to count, and the log says why, without what stood there."""
    file = write_keys(tmp_path / "keys", FIRST)
    async with watched(file) as keys:
        for content, words in (("# none\n", "no key"), (f"{SECOND}\nséçrét\n", "line 2"), (None, "No such file")):
            if content is None:
                file.unlink()
            else:
                file.write_text(content, encoding="utf-8")
            await asyncio.sleep(READ_AGAIN_S)
            assert words in caplog.text
            assert allows(keys, FIRST, SECOND) == [True, False]
        assert caplog.text.count("keeping the previous ones") == 3
        assert not [word for word in (FIRST, SECOND, "séçrét", "Traceback") if word in caplog.text]
        write_keys(file, SECOND)
        await asyncio.sleep(READ_AGAIN_S)
        assert allows(keys, SECOND) == [True]


@pytest.mark.parametrize(
    ("host", "keyed", "warned"), [("0.0.0.0", False, True), ("0.0.0.0", True, False), ("127.0.0.1", False, False)]
)
def test_an_open_server_warns(
    serve: Callable[..., Server],
    tmp_path: Path,
    host: str,
    keyed: bool,  # noqa: FBT001
    warned: bool,  # noqa: FBT001
) -> None:
    """Whoever lets others reach it without keys is told so; on loopback and with keys nothing is said."""
    keys = ("--api-keys-file", str(write_keys(tmp_path / "keys", FIRST))) if keyed else ()
    server = serve("--engine", "fake", "--host", host, *keys)
    lines = [line for line in server.log.splitlines() if "WARNING" in line and "--api-keys-file" in line]
    assert bool(lines) == warned
    assert all(f"--host {host}" in line for line in lines)


def test_without_keys_nothing_is_asked_for(fake_server: Server) -> None:
    """Whatever a client sends as its key, as clients do that must have one."""
    for value in ("Bearer anything", "nonsense"):
        assert post_json(fake_server.http, "/embed", SMALL, {"Authorization": value}).status == 200
