"""nginx and Envoy before the server: what a client sees, and what becomes of requests on connections that end."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from tests.contract.clients.proxies import PROXIES, Ports, Proxy
from tests.support.clients import BOTH, TIMEOUT_S, Grpc, HttpConnection, Refused, get, metric, post_json
from tests.support.console import answered
from tests.support.expected import fake_answers
from tests.support.external_servers import program
from tests.support.models import NAME
from tests.support.server import FAKE, SLOW_ENGINES, Server, free_port, listening
from tests.support.stopping import stop
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.browser import Page

AGE_S, PASSED_S = 0.1, 1.0

pytestmark = pytest.mark.external


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[Server]:
    """A server that asks for a new connection ten times a second."""
    with Server(models, *FAKE, "--max-connection-age-s", str(AGE_S), env=SLOW_ENGINES, cold=True) as running:
        yield running


@pytest.fixture(scope="module", params=PROXIES, ids=lambda proxy: proxy.name)
def proxied(request: pytest.FixtureRequest, server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    proxy: Proxy = request.param
    if not proxy.is_here:
        pytest.skip(f"no {proxy.name} here (see make programs)")
    behind = (int(place.rpartition(":")[2]) for place in (server.http, server.grpc))
    ports = Ports(free_port(), free_port(), *behind)
    folder = tmp_path_factory.mktemp(proxy.name)
    places = SimpleNamespace(http=f"127.0.0.1:{ports.http}", grpc=f"127.0.0.1:{ports.grpc}", name=proxy.name)

    def is_ready() -> bool:
        return listening(places.grpc) and get(places.http, "/readyz").status == 200

    with program(proxy.command(folder, ports), folder / "log", is_ready, cwd=folder):
        yield places
    assert (folder / "log").read_text().strip() == ""


def test_no_request_is_lost_where_connections_end(proxied: Any, models: Path) -> None:
    """Kept connections to the server end by age all the time, under requests of both protocols: each has its answer."""
    until = time.monotonic() + PASSED_S
    together = threading.Barrier(2 * len(BOTH))

    def ask(number: int) -> list[tuple[str, Any]]:
        found = []
        with BOTH[number % len(BOTH)](proxied) as client:
            together.wait()
            while time.monotonic() < until:
                text = f"{number} {len(found)}"
                found.append((text, client.embed([text]).vectors[0]))
        return found

    with ThreadPoolExecutor(together.parties) as pool:
        found = [pair for pairs in pool.map(ask, range(together.parties)) for pair in pairs]
    assert len(found) > 10 * together.parties
    texts, vectors = zip(*found, strict=True)
    np.testing.assert_allclose(vectors, fake_answers(models, list(texts)), atol=1e-5)


@pytest.mark.parametrize("proxied", [proxy for proxy in PROXIES if proxy.name == "Envoy"], ids=["Envoy"], indirect=True)
def test_what_was_not_computed_is_sent_again(proxied: Any, server: Server) -> None:
    """Envoy retries what the server refuses while its engine restarts, and nothing else that it refuses."""
    engine = server.engine_pid()
    assert engine is not None
    os.kill(engine, signal.SIGKILL)
    again = wait_for(lambda: next(iter(set(server.engine_pids()) - {engine}), None), "another engine process")
    stop(again)
    wait_for(lambda: get(server.metrics, "/readyz").status == 503, "readiness to fall")

    def refused(reason: str) -> float:
        return metric(server, "bertserve_requests_total", reason=reason)

    try:
        late = post_json(proxied.http, "/embed", b'{"inputs": "now?"}', {"X-Request-Timeout-Ms": "20"})
        assert (late.status, refused("not_ready")) == (503, 3)
        with Grpc(proxied) as client, pytest.raises(Refused) as error:
            client.embed(["now?"], timeout_ms=20)
        assert (error.value.status, refused("not_ready")) == ("UNAVAILABLE", 6)
    finally:
        os.kill(again, signal.SIGCONT)
    wait_for(lambda: get(proxied.http, "/readyz").status == 200, "a new engine", 20)
    before = refused("malformed_request")
    assert post_json(proxied.http, "/embed", b"{").status == 400
    assert refused("malformed_request") == before + 1


def test_long_bodies(proxied: Any, models: Path) -> None:
    """By both protocols, in chunks, and by HTTP/1.0, which nginx speaks where nothing else is written."""
    texts = [f"text {number}" + " " * 5_000 for number in range(30)]
    expected = fake_answers(models, texts)
    for kind in BOTH:
        with kind(proxied) as client:
            np.testing.assert_allclose(client.embed(texts).vectors, expected, atol=1e-5)
    body = json.dumps({"inputs": texts}).encode() + b" " * 1_000_000
    with HttpConnection(proxied.http) as connection:
        for path in ("/embed", f"/models/{NAME}/embed"):
            pieces = iter([body[at : at + 50_000] for at in range(0, len(body), 50_000)])
            reply = connection.call("POST", path, pieces, {"Content-Type": "application/json"})
            np.testing.assert_allclose(reply.json(), expected, atol=1e-5)


def test_refusals_come_through(proxied: Any) -> None:
    """With their status and their words, and not as an error of the proxy's own."""
    reply = post_json(proxied.http, "/models/nobody/embed", b'{"inputs": "a"}')
    assert (reply.status, "unknown model" in reply.json()["error"]) == (404, True)
    with Grpc(proxied) as client, pytest.raises(grpc.RpcError) as refused:
        client.infer(pb.ModelInferRequest(model_name="nobody"), timeout=TIMEOUT_S)
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    assert "unknown model" in refused.value.details()


@pytest.mark.parametrize("proxied", PROXIES[:1], ids=["nginx"], indirect=True)
@pytest.mark.parametrize("start", ["/bert/", "/bert", "/slashless"])
def test_pages_below_a_prefix(proxied: Any, page: Page, start: str) -> None:
    """A proxy strips it: console, documentation and OpenAPI document ask below it, with or without the last slash.

    nginx redirects `/bert`, and passes `/slashless` on as `/`, as other proxies do.
    """
    prefix = f"http://{proxied.http}{start.rstrip('/')}/"
    page.open(f"http://{proxied.http}{start}#model={NAME}")
    page.wait("document.getElementById('main')?.hidden === false", "the console")
    assert page.run("location.href") == f"{prefix}#model={NAME}"
    page.requests.clear()
    page.click("#run")
    answered(page)
    assert page.run("document.querySelector('.refusal')") is None
    assert f"curl '{prefix}embed'" in page.run("document.querySelector('#curl pre').textContent")
    page.click("#route-docs")
    page.wait("document.querySelector('#operations-TEI-post_embed .try-out__btn')", "the route's documentation")
    page.click(".try-out__btn")
    page.wait("document.querySelector('button.execute')", "the form")
    page.click("button.execute")
    page.wait("document.querySelector('.live-responses-table tbody .response-col_status')?.innerText.includes('200')")
    assert f"'{prefix}embed'" in page.text(".curl")
    page.click("body > p a")
    page.wait("document.getElementById('main')?.hidden === false", "the console")
    assert page.run("location.href").partition("#")[0] == prefix
    assert [url for url in page.requests if not url.startswith((prefix, "data:"))] == []
    page.problems[:] = [problem for problem in page.problems if "deep link" not in problem]  # Swagger's own
