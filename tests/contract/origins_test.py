"""What pages of other origins may ask, as browsers make them ask, and the names that the HTTP port answers to."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from bertserve.serving.http.hosts import known_hosts
from bertserve.serving.security.keys import ApiKeys
from bertserve.serving.settings import Settings
from tests.support.clients import HttpReply, RawConnection, get, http_call, post_json
from tests.support.credentials import FIRST, bearer, write_keys
from tests.support.server import FAKE, Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.browser import Page


OURS, LOCAL, OTHER = "https://app.example", "http://localhost:3000", "https://other.example"
CHROME = "chrome-extension://gmpljdlgcdkljlppaekciacdmdlhfeon"
WEBVIEW = "vscode-webview://0agb1ll8ov2aijncgpjhbmkb2jmm8ri6b2kvjjj9jupc6jq3rkrd"
APPS = f"null,app://obsidian.md,capacitor://localhost,tauri://localhost,file://,{CHROME},vscode-webview://*"
PLACES = "https://*.app.example,http://localhost:*,https://*.ports.example:*,http://[::1]:*"
SMALL = b'{"inputs": "small"}'


@pytest.fixture(scope="module")
def cors_server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with keys that two origins may call."""
    keys = write_keys(tmp_path_factory.mktemp("keys") / "keys", FIRST)
    options = ("--engine", "fake", "--cors-origins", f"{OURS},{LOCAL}", "--api-keys-file", str(keys))
    with Server(models, *options) as running:
        yield running


def preflight(cors_server: Server, origin: str, path: str = "/embed") -> HttpReply:
    wanted = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    return http_call(cors_server.http, "OPTIONS", path, headers={"Origin": origin, **wanted})


def allowed(reply: HttpReply) -> str | None:
    """The origin whose scripts may read a reply."""
    assert reply.headers["vary"] == "origin"
    assert "access-control-allow-credentials" not in reply.headers
    return reply.headers.get("access-control-allow-origin")


@pytest.mark.parametrize("path", ["/embed", "/v1/embeddings", "/v2/models/minilm/infer", "/no/such/path"])
def test_a_preflight_needs_no_key(cors_server: Server, path: str) -> None:
    """Browsers send none with it; every path answers alike, so that none is told to exist."""
    reply = preflight(cors_server, OURS, path)
    assert (reply.status, allowed(reply), reply.body) == (200, OURS, b"")
    assert reply.headers["access-control-allow-methods"] == "GET, HEAD, POST"
    assert reply.headers["access-control-allow-headers"] == "*, authorization"


def test_another_origin_is_told_nothing(cors_server: Server) -> None:
    """Its scripts can read neither the preflight nor an answer."""
    assert allowed(preflight(cors_server, OTHER)) is None
    assert allowed(post_json(cors_server.http, "/embed", SMALL, {"Origin": OTHER, **bearer(FIRST)})) is None
    assert allowed(post_json(cors_server.http, "/embed", SMALL, bearer(FIRST))) is None


@pytest.mark.parametrize("origin", [OURS, LOCAL])
def test_answers_and_errors_can_be_read(cors_server: Server, origin: str) -> None:
    """With the stage times, and when to come back; also what is refused before its body is read."""
    good = {"Origin": origin, **bearer(FIRST)}
    replies = {
        200: post_json(cors_server.http, "/embed", SMALL, good),
        404: http_call(cors_server.http, "GET", "/no/such/path", headers=good),
        401: post_json(cors_server.http, "/embed", SMALL, {"Origin": origin}),
        413: post_json(cors_server.http, "/embed", b" " * (5 << 20), good),
    }
    for status, reply in replies.items():
        assert (reply.status, allowed(reply)) == (status, origin)
        exposed = reply.headers["access-control-expose-headers"].split(", ")
        assert {"server-timing", "retry-after", "retry-after-ms", "x-request-id"} <= set(exposed)
    assert "server-timing" in replies[200].headers


ALLOWED = (
    # What these apps send, letter by letter, and pages without an origin: local files, sandboxed frames.
    *(*APPS.split(",")[:-1], WEBVIEW),
    # A wildcard is one whole label, or any port.
    *("https://a.app.example", "https://xn--mnchen-3ya.app.example", "https://a.ports.example:8443"),
    *("http://localhost", "http://localhost:5173", "http://[::1]:5173", "https://a.ports.example"),
)
OTHERS = (
    *("app://other.md", "app://obsidian.md.evil", "http://obsidian.md", "app://*", "Null", "file:", ""),
    *(f"{CHROME}a", f"{WEBVIEW}/a", "vscode-webview", "xvscode-webview://a", "null null", "http://localhost:1,null"),
    *("https://app.example", "https://a.b.app.example", "https://.app.example", "http://a.app.example"),
    *("https://a.app.example:444", "https://a.app.example.evil", "https://evil-app.example", "https://a.appxexample"),
    *("https://evil/.app.example", "https://ports.example:8443", "https://localhost:5173"),
    *("http://localhost:", "http://localhost:x", "http://localhost5"),
)


@pytest.fixture(scope="module")
def apps_server(models: Path) -> Iterator[Server]:
    """A server that pages of apps may call, and those of origins with wildcards."""
    with Server(models, *FAKE, "--cors-origins", f"{APPS},{PLACES}") as running:
        yield running


@pytest.mark.parametrize("origin", [*ALLOWED, *OTHERS])
def test_origins_of_apps_and_wildcards(apps_server: Server, origin: str) -> None:
    """Any serialized origin of RFC 6454 can be listed; a preflight and a reply name it, and no other."""
    replies = preflight(apps_server, origin), post_json(apps_server.http, "/embed", SMALL, {"Origin": origin})
    assert {allowed(reply) for reply in replies} == {origin if origin in ALLOWED else None}


@pytest.mark.parametrize(("kind", "found"), [("apps_server", 384), ("fake_server", "TypeError")])
def test_a_local_file_in_a_browser(
    request: pytest.FixtureRequest, page: Page, tmp_path: Path, kind: str, found: object
) -> None:
    """Its page has no origin, and reads a reply where `null` is allowed."""
    file = tmp_path / "page.html"
    file.write_text("<!doctype html><title>a page</title>")
    page.open(file.as_uri())
    asked = {"method": "POST", "headers": {"Content-Type": "application/json"}, "body": SMALL.decode()}
    ask = f"fetch('http://{request.getfixturevalue(kind).http}/embed', {json.dumps(asked)})"
    read = ".then((reply) => reply.json()).then((vectors) => vectors[0].length, (error) => error.name)"
    assert page.run(ask + read) == found
    page.problems[:] = [problem for problem in page.problems if "blocked by CORS policy" not in problem]


@pytest.mark.parametrize("more", ["Content-Length: 9", "Transfer-Encoding: chunked"])
def test_a_preflight_opens_nothing(cors_server: Server, more: str) -> None:
    """With a body, or without its two headers, `OPTIONS` needs a key like any request."""
    head = f"OPTIONS /embed HTTP/1.1\r\nHost: test\r\nOrigin: {OURS}\r\nAccess-Control-Request-Method: POST\r\n"
    with RawConnection(cors_server.http) as connection:
        connection.send(f"{head}{more}\r\n\r\n".encode())
        assert connection.status() == 401
    assert http_call(cors_server.http, "OPTIONS", "/embed", headers={"Origin": OURS}).status == 401


def test_all_origins(serve: Callable[..., Server]) -> None:
    """`*` lets every page ask, and still no credentials."""
    cors_server = serve("--engine", "fake", "--cors-origins", "*")
    assert allowed(preflight(cors_server, OTHER)) == "*"
    assert allowed(post_json(cors_server.http, "/embed", SMALL, {"Origin": OTHER})) == "*"


def test_switched_off_nothing_is_added(fake_server: Server) -> None:
    """No header, and `OPTIONS` is a method that no route takes."""
    for reply in (get(fake_server.http, "/livez"), post_json(fake_server.http, "/embed", SMALL, {"Origin": OURS})):
        assert reply.status == 200
        assert not [name for name in reply.headers if name == "vary" or name.startswith("access-control")]
    assert preflight(fake_server, OURS).status == 405


NAMES = "Search.example,10.0.0.7,[fd00::7]"


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[Server]:
    """A server on loopback, without keys, that has more names."""
    with Server(models, *FAKE, "--allowed-hosts", NAMES) as running:
        yield running


def status(address: str, *lines: str, version: str = "1.1") -> int:
    """Of the reply to a request line and header lines; the connection then ends."""
    line, *headers = lines
    with RawConnection(address) as connection:
        connection.send("\r\n".join([f"{line} HTTP/{version}", *headers, "Connection: close", "", ""]).encode())
        return int(connection.read_to_end().split()[1])


OURS_HOSTS = (
    *("localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1:1", "127.8.9.10", "[::1]:8000", "[::ffff:127.0.0.1]"),
    *("search.EXAMPLE:443", "search.example.", "10.0.0.7:80", "[fd00::7]:80"),
)
OTHER_HOSTS = (
    *("evil.example", "localhost.evil.example", "evil.localhost.example:8000", "127.0.0.1.evil.example"),
    *("sub.search.example", "10.0.0.8", "[fd00::8]", "[localhost]", "2130706433", ""),
)
ASKED = {
    # Loopback addresses, `localhost` and `--allowed-hosts` are answered, whatever the case and the port.
    **{("server", "GET /status", host): 200 for host in OURS_HOSTS},
    **{("server", "GET /status", host): 421 for host in OTHER_HOSTS},
    # Where no names are given, one without a dot is nobody's domain: that of an nginx upstream or a container.
    **{("fake_server", "GET /status", host): 200 for host in ("backend", "bertserve:8000", "")},
    **{("fake_server", "GET /status", host): 421 for host in ("2130706433", "evil.example")},
    # Another name is answered neither the page, nor data, nor whether there is such a route.
    **{
        ("server", target, "evil.example"): 421
        for target in ("GET /", "GET /console/api.js", "GET /v1/models", "POST /embed", "GET /no/such/path")
    },
    # Kubelets and load balancers ask by an address or a name of their own.
    **{
        ("server", f"GET {path}", "10.244.0.9:8000"): 200
        for path in ("/livez", "/readyz", "/health", "/ping", "/v2/health/live", "/v2/health/ready")
    },
    # A target in absolute form has a host of its own, and Host is only to be valid (RFC 9112, 3.2.2).
    **{
        ("server", f"GET http://{host}/status", "evil.example"): 200
        for host in ("localhost:1", "[::1]", "[fd00::7]:80")
    },
    **{("server", f"GET http://{host}/status", "localhost"): 421 for host in ("evil.example", "[fd00::8]:80")},
    **{("server", "GET http://localhost/status", host): 400 for host in ("a b", "localhost, localhost")},
}


@pytest.mark.parametrize(("kind", "target", "host"), ASKED)
def test_only_its_own_names_are_answered(request: pytest.FixtureRequest, kind: str, target: str, host: str) -> None:
    """Whatever a page says of where it comes from."""
    address = request.getfixturevalue(kind).http
    assert status(address, target, f"Host: {host}", f"Origin: http://{host}") == ASKED[kind, target, host]


def test_what_no_page_can_send_is_not_checked(server: Server) -> None:
    """HTTP/1.0 without Host, the metrics port, and the authority of gRPC."""
    assert status(server.http, "GET /status", version="1.0") == 200
    assert status(server.metrics, "GET /status", "Host: evil.example") == 200
    with grpc.insecure_channel(server.grpc, options=[("grpc.default_authority", "evil.example")]) as channel:
        live = channel.unary_unary(
            "/inference.GRPCInferenceService/ServerLive",
            request_serializer=pb.ServerLiveRequest.SerializeToString,
            response_deserializer=pb.ServerLiveResponse.FromString,
        )
        assert live(pb.ServerLiveRequest(), timeout=10).live


def test_a_host_in_the_target_alone(server: Server) -> None:
    """HTTP/1.1 needs the header Host as well; HTTP/1.0 does not, and the target's host is checked."""
    assert status(server.http, "GET http://localhost/status") == 400
    hosts = ("localhost", "evil.example")
    assert [status(server.http, f"GET http://{host}/status", version="1.0") for host in hosts] == [200, 421]


def test_a_connection_remembers_only_names_that_were_allowed(server: Server) -> None:
    """A later request of the connection is checked again, also behind a probe under the same name."""
    ask = "GET {} HTTP/1.1\r\nHost: {}\r\n\r\n"
    sent = [("/status", "localhost"), ("/livez", "evil.example"), ("/status", "evil.example"), ("/status", "localhost")]
    with RawConnection(server.http) as connection:
        connection.send("".join(ask.format(*one) for one in sent).encode())
        received = connection.read_to_end()
    assert [int(line.split()[0]) for line in received.decode().split("HTTP/1.1 ")[1:]] == [200, 200, 421]
    assert b'"wrong_host"' in received


@pytest.mark.parametrize(
    ("address", "keyed", "names", "checked"),
    [
        ("127.0.0.1", False, "", True),
        ("127.0.0.2", False, "", True),
        ("0.0.0.0", False, "", False),
        ("127.0.0.1", True, "", False),
        ("127.0.0.1", False, "*", False),
        ("127.0.0.1", True, "a.example", True),
        ("0.0.0.0", False, "a.example", True),
        ("0.0.0.0", True, "a.example,b.example", True),
    ],
)
def test_where_host_is_checked(address: str, keyed: bool, names: str, checked: bool, tmp_path: Path) -> None:  # noqa: FBT001
    """On loopback without keys; elsewhere where `--allowed-hosts` names some, so that services work as before."""
    keys = ApiKeys(write_keys(tmp_path / "keys", FIRST)) if keyed else None
    known = known_hosts(Settings.load(["--allowed-hosts", names], {}), address, keys)
    assert known == (frozenset(names.split(",") if names else ()) if checked else None)
