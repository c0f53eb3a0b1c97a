"""Cross-origin requests, as browsers make them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.clients import HttpReply, RawConnection, get, http_call, post_json
from tests.support.credentials import FIRST, bearer, write_keys
from tests.support.server import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

OURS, LOCAL, OTHER = "https://app.example", "http://localhost:3000", "https://other.example"
SMALL = b'{"inputs": "small"}'


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with keys that two origins may call."""
    keys = write_keys(tmp_path_factory.mktemp("keys") / "keys", FIRST)
    options = ("--engine", "fake", "--cors-origins", f"{OURS},{LOCAL}", "--api-keys-file", str(keys))
    with Server(models, *options) as running:
        yield running


def preflight(server: Server, origin: str, path: str = "/embed") -> HttpReply:
    wanted = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    return http_call(server.http, "OPTIONS", path, headers={"Origin": origin, **wanted})


def allowed(reply: HttpReply) -> str | None:
    """The origin whose scripts may read a reply."""
    assert reply.headers["vary"] == "origin"
    assert "access-control-allow-credentials" not in reply.headers
    return reply.headers.get("access-control-allow-origin")


@pytest.mark.parametrize("path", ["/embed", "/v1/embeddings", "/v2/models/minilm/infer", "/no/such/path"])
def test_a_preflight_needs_no_key(server: Server, path: str) -> None:
    """Browsers send none with it; every path answers alike, so that none is told to exist."""
    reply = preflight(server, OURS, path)
    assert (reply.status, allowed(reply), reply.body) == (200, OURS, b"")
    assert reply.headers["access-control-allow-methods"] == "GET, HEAD, POST, DELETE"
    assert reply.headers["access-control-allow-headers"] == "*, authorization"


def test_another_origin_is_told_nothing(server: Server) -> None:
    """Its scripts can read neither the preflight nor an answer."""
    assert allowed(preflight(server, OTHER)) is None
    assert allowed(post_json(server.http, "/embed", SMALL, {"Origin": OTHER, **bearer(FIRST)})) is None
    assert allowed(post_json(server.http, "/embed", SMALL, bearer(FIRST))) is None


@pytest.mark.parametrize("origin", [OURS, LOCAL])
def test_answers_and_errors_can_be_read(server: Server, origin: str) -> None:
    """With the stage times, and when to come back; also what is refused before its body is read."""
    good = {"Origin": origin, **bearer(FIRST)}
    replies = {
        200: post_json(server.http, "/embed", SMALL, good),
        404: http_call(server.http, "GET", "/no/such/path", headers=good),
        401: post_json(server.http, "/embed", SMALL, {"Origin": origin}),
        413: post_json(server.http, "/embed", b" " * (5 << 20), good),
    }
    for status, reply in replies.items():
        assert (reply.status, allowed(reply)) == (status, origin)
        exposed = reply.headers["access-control-expose-headers"].split(", ")
        assert {"server-timing", "retry-after", "retry-after-ms", "x-request-id"} <= set(exposed)
    assert "server-timing" in replies[200].headers


@pytest.mark.parametrize("more", ["Content-Length: 9", "Transfer-Encoding: chunked"])
def test_a_preflight_opens_nothing(server: Server, more: str) -> None:
    """With a body, or without its two headers, `OPTIONS` needs a key like any request."""
    head = f"OPTIONS /embed HTTP/1.1\r\nHost: test\r\nOrigin: {OURS}\r\nAccess-Control-Request-Method: POST\r\n"
    with RawConnection(server.http) as connection:
        connection.send(f"{head}{more}\r\n\r\n".encode())
        assert connection.status() == 401
    assert http_call(server.http, "OPTIONS", "/embed", headers={"Origin": OURS}).status == 401


def test_all_origins(serve: Callable[..., Server]) -> None:
    """`*` lets every page ask, and still no credentials."""
    server = serve("--engine", "fake", "--cors-origins", "*")
    assert allowed(preflight(server, OTHER)) == "*"
    assert allowed(post_json(server.http, "/embed", SMALL, {"Origin": OTHER})) == "*"


def test_switched_off_nothing_is_added(fake_server: Server) -> None:
    """No header, and `OPTIONS` is a method that no route takes."""
    for reply in (get(fake_server.http, "/livez"), post_json(fake_server.http, "/embed", SMALL, {"Origin": OURS})):
        assert reply.status == 200
        assert not [name for name in reply.headers if name == "vary" or name.startswith("access-control")]
    assert preflight(fake_server, OURS).status == 405
