"""Connections that the server ends lose nothing of what it said on them; every refusal is counted and logged once."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

import h11
import pytest

from serving.net.lingering_close import LingeringClose
from tests.support.certificates import Certificates
from tests.support.clients import RawConnection, http_call, metrics
from tests.support.credentials import FIRST, bearer, write_keys
from tests.support.grpc_peer import Wire
from tests.support.server import FAKE, Server
from tests.support.waiting import until, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAGE = "https://app.example"
LARGE = b"GET /openapi.json HTTP/1.1\r\nHost: test\r\nAuthorization: Bearer %b\r\n" % FIRST.encode()


@pytest.fixture(scope="module", params=["plain", "tls"])
def server(request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("keys")
    keys = write_keys(folder / "keys", FIRST)
    options = ("--access-log", "true", "--api-keys-file", str(keys), "--cors-origins", PAGE, "--load-reports", "always")
    waits = ("--header-timeout-s", "2", "--body-timeout-s", "2")
    tls = Certificates(folder) if request.param == "tls" else None
    with Server(models, *FAKE, *options, *waits, tls=tls) as running:
        yield running


@pytest.mark.parametrize("behind", [b"\r\n", b"GET /livez HTTP/1.1\r\nHost: test\r\n\r\n", b"x" * 100_000])
def test_what_is_sent_behind_the_last_request_cuts_no_reply(server: Server, behind: bytes) -> None:
    """A reply that ends the connection is read whole, however slowly, whatever its client still sends."""
    with RawConnection(server.http, receive_bytes=8192) as connection:
        identity = f"cut-{len(behind)}"
        connection.send(LARGE + f"X-Request-Id: {identity}\r\nConnection: close\r\n\r\n".encode())
        wait_for(lambda: identity in server.log, "the end of the request")
        connection.send(behind)
        reply = connection.read_to_end()
    head, _, body = reply.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    assert length is not None
    assert len(body) == int(length[1]) > 100_000


REFUSED = {
    # The request's line, its last field, and what is behind its head.
    "no_host": (400, "malformed_request", "GET /livez", "", b""),
    "no_field": (400, "malformed_request", "GET /livez", "Host: test\r\nA B: c", b""),
    "no_key": (401, "invalid_api_key", "POST /embed", "Host: test\r\nContent-Length: 2", b"{}"),
    "no_key_for_head": (401, "invalid_api_key", "HEAD /status", "Host: test", b""),
    "slow": (408, "slow_request", "POST /embed", "KEY\r\nHost: test\r\nContent-Length: 2", b"{"),
    "too_large": (413, "body_too_large", "POST /embed", "KEY\r\nHost: test\r\nContent-Length: 99999999", b""),
    "headers": (431, "headers_too_large", "GET /livez", "Host: test\r\nX-A: " + "v" * 60_000, b""),
    "coding": (501, "unsupported", "POST /embed", "KEY\r\nHost: test\r\nTransfer-Encoding: gzip, chunked", b""),
    "no_route": (404, "not_found", "GET /nothing", "KEY\r\nHost: test\r\nConnection: close", b""),
    "no_json": (
        400,
        "malformed_request",
        "POST /embed",
        "KEY\r\nHost: test\r\nConnection: close\r\nContent-Length: 1",
        b"{",
    ),
}


def counted(server: Server) -> dict[str, float]:
    return {name: value for name, value in metrics(server).items() if name.startswith("bertserve_requests_total")}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_of_every_layer_is_a_reply_like_any(server: Server, name: str) -> None:
    """It has the client's id, what pages and balancers read, a line of the access log and a count of its own."""
    status, reason, line, last, behind = REFUSED[name]
    last = last.replace("KEY", f"Authorization: Bearer {FIRST}\r\nContent-Type: application/json")
    before = counted(server)
    identity = f"refused-{name}"
    with RawConnection(server.http) as connection:
        head = f"{line} HTTP/1.1\r\nX-Request-Id: {identity}\r\nOrigin: {PAGE}\r\n{last}\r\n\r\n"
        connection.send(head.encode() + behind)
        received = connection.read_to_end()
    reader = h11.Connection(h11.CLIENT)
    method = line.split()[0]
    reader.send(h11.Request(method=method, target="/", headers=[("Host", "test")]))
    reader.send(h11.EndOfMessage())
    reader.receive_data(received)
    reply = reader.next_event()
    assert isinstance(reply, h11.Response)
    body = b""
    while isinstance(event := reader.next_event(), h11.Data):
        body += bytes(event.data)
    assert isinstance(event, h11.EndOfMessage)
    assert reader.trailing_data[0] == b""
    fields = dict(reply.headers)
    assert reply.status_code == status
    assert fields[b"x-request-id"] == identity.encode()
    assert fields[b"access-control-allow-origin"] == PAGE.encode()
    assert fields[b"endpoint-load-metrics"].startswith(b"JSON ")
    assert bool(body) == (method != "HEAD")
    wait_for(lambda: f"bertserve.access: request request_id={identity}" in server.log, "the line of the access log")
    (logged,) = [each for each in server.log.splitlines() if f"access: request request_id={identity} " in each]
    route = "?" if name == "no_route" else line.split()[1]
    assert f"method={method} route={route} status={status} reason={reason} " in logged
    assert f"bytes_out={len(body)}" in logged.split()
    after = counted(server)
    changed = {name: after[name] - before.get(name, 0.0) for name in after if after[name] != before.get(name, 0.0)}
    assert changed == {f'bertserve_requests_total{{model="",protocol="http",reason="{reason}"}}': 1.0}


def test_a_browsers_question_before_a_request_has_a_line_too(server: Server) -> None:
    asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "X-Request-Id": "preflight"}
    reply = http_call(server.http, "OPTIONS", "/embed", headers=asked)
    assert (reply.status, reply.headers["x-request-id"]) == (200, "preflight")
    wait_for(lambda: "request_id=preflight protocol=http method=OPTIONS route=/embed" in server.log, "the line")


def test_an_answer_is_one_line_and_one_count(server: Server) -> None:
    before = counted(server)
    reply = http_call(
        *(server.http, "POST", "/embed", b'{"inputs": "a"}'),
        headers={"Content-Type": "application/json", "X-Request-Id": "answered", **bearer(FIRST)},
    )
    assert reply.status == 200
    wait_for(lambda: "request_id=answered" in server.log, "the line")
    after = counted(server)
    ok = 'bertserve_requests_total{model="minilm",protocol="http",reason="ok"}'
    assert after == before | {ok: before[ok] + 1}


class Stuck(Wire):
    """A transport whose client takes nothing of what is in its buffer."""

    def get_extra_info(self, name: str, default: object = None) -> object:  # noqa: ARG002  asyncio's
        return default


def test_a_farewell_ends() -> None:
    """When the client has had its time, when it takes nothing, or when it sends without end."""

    async def ends(buffered: int, received: int) -> float:
        wire, loop = Stuck(), asyncio.get_running_loop()
        wire.buffered = buffered
        began = loop.time()
        farewell = LingeringClose(wire, quiet_s=0.02, pace_s=0.06)
        farewell.received(received)
        await until(lambda: wire.closed, "the end")
        farewell.cancel()
        return loop.time() - began

    async def all_ends() -> None:
        assert await ends(0, 100) > 0.015
        assert await ends(1000, 100) > 0.055
        assert await ends(0, 1 << 30) < await ends(1000, 100)

    asyncio.run(all_ends())
