"""Row 55 over a network: a server ends while its clients, a round trip away, have not heard of it."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

import grpc
import pytest

from tests.support.clients import MODEL_INFER, TIMEOUT_S, Grpc, HttpConnection
from tests.support.delaying_proxy import DelayingProxy
from tests.support.server import FAKE, Server
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

ONE_WAY_S = 0.025
CLIENTS = 12
"""Of each wire; those of gRPC share a connection."""


class Steady(threading.Thread):
    """Asks again and again; the first failure ends it."""

    def __init__(self, ask: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._ask = ask
        self.stop = False
        self.answers = 0
        self.failure: Exception | None = None

    def run(self) -> None:
        """Asks until told to stop."""
        while not self.stop:
            try:
                self._ask()
            except Exception as error:  # noqa: BLE001  kept for the test to judge
                self.failure = error
                return
            self.answers += 1


class HttpClient:
    """A client that closes its connection when it is told to, and then opens another."""

    def __init__(self, address: str) -> None:
        self._connection = HttpConnection(address)

    def __call__(self) -> None:
        """Asks, and takes nothing but an answer."""
        reply = self._connection.call("POST", "/embed", b'{"inputs": "small"}', {"Content-Type": "application/json"})
        assert reply.status == 200, reply.body


@pytest.fixture
def clients(models: Path) -> Iterator[tuple[Server, DelayingProxy, DelayingProxy, list[Steady]]]:
    """Clients of a server, each way to it with a delay."""
    with ExitStack() as stack:
        first = stack.enter_context(Server(models, *FAKE))
        http = stack.enter_context(DelayingProxy(first.http, ONE_WAY_S))
        wire = stack.enter_context(DelayingProxy(first.grpc, ONE_WAY_S))
        # Without retries, a call fails that the server has not taken, even where the client knows that.
        channel = stack.enter_context(grpc.insecure_channel(wire.address, options=[("grpc.enable_retries", 0)]))
        with Grpc(first) as client:
            message = client.request(["small"]).SerializeToString()
        infer = channel.unary_unary(MODEL_INFER)
        steady = [Steady(lambda: infer(message, timeout=TIMEOUT_S)) for _ in range(CLIENTS)]
        steady += [Steady(HttpClient(http.address)) for _ in range(CLIENTS)]
        for one in steady:
            one.start()
        yield first, http, wire, steady
        for one in steady:
            one.stop = True
        for one in steady:
            one.join()


def wait_for_answers(steady: list[Steady]) -> None:
    """Waits until every client has two more answers, or one has failed."""
    answers = [one.answers for one in steady]
    wait_for(
        lambda: (
            any(one.failure for one in steady)
            or all(one.answers > before + 1 for one, before in zip(steady, answers, strict=True))
        ),
        "answers for every client",
    )


def restart(server: Server, other: Server, http: DelayingProxy, wire: DelayingProxy, steady: list[Steady]) -> None:
    """New connections go to another server from now on, then this one ends."""
    http.target, wire.target = other.http, other.grpc
    wait_for_answers(steady)  # connections that were opened just before have arrived
    assert server.stop() == 0
    wait_for_answers(steady)
    assert [one.failure for one in steady if one.failure] == []


@pytest.mark.parametrize("restarts", [pytest.param(2, id="few"), pytest.param(20, id="many", marks=pytest.mark.long)])
@pytest.mark.parametrize("lame_duck_s", ["0", pytest.param("0.5", marks=pytest.mark.long)])
def test_row_55_restarts_a_round_trip_away(
    models: Path,
    clients: tuple[Server, DelayingProxy, DelayingProxy, list[Steady]],
    lame_duck_s: str,
    restarts: int,
) -> None:
    """What is sent before its client can have heard of the end is answered: nothing is refused, nothing is lost."""
    server, http, wire, steady = clients
    with ExitStack() as stack:
        for _ in range(restarts):
            other = stack.enter_context(Server(models, *FAKE, "--lame-duck-s", lame_duck_s))
            restart(server, other, http, wire, steady)
            server = other
