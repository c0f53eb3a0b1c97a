"""HAProxy learns weights and ends of replicas from their agent ports, with the configuration that users get."""

from __future__ import annotations

import re
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from loadtest.benchmarks.rolling.parts import NAMES, Proxy, Replica, haproxy
from serving.net.connection_limiter import MAX_PROBE_CONNECTIONS
from tests.support.clients import post_json
from tests.support.server import Server, free_port
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SLOW = ("--engine", "fake", "--precision", "fp32", "--threads", "1", "--default-timeout-ms", "60000")
LIMIT_S = 20.0


@pytest.fixture(scope="module")
def replicas(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Replica]]:
    """Two quick replicas and one whose engine takes long for each token."""
    folder = tmp_path_factory.mktemp("replicas")
    made = {
        name: Replica(name, models, folder, (*SLOW, "--lame-duck-s", lame_duck_s, "--fake-token-us", token_us))
        for name, lame_duck_s, token_us in zip(NAMES, ("0", "4", "0"), ("1", "1", "500"), strict=True)
    }
    try:
        for replica in made.values():
            replica.start()
        yield made
    finally:
        for replica in made.values():
            replica.close()


def told(port: int, sent: bytes = b"") -> str:
    """What an agent says to whoever connects, whatever that sends."""
    with socket.create_connection(("127.0.0.1", port), 5) as connection, connection.makefile() as lines:
        connection.sendall(sent)
        return lines.read()


def percent(port: int, sent: bytes = b"") -> int:
    """The weight that an agent tells."""
    found = re.fullmatch(r"ready up (\d+)%\n", told(port, sent))
    assert found
    return int(found[1])


def test_a_slow_or_busy_replica_weighs_less(replicas: dict[str, Replica]) -> None:
    """By the time until one more text would be answered."""
    quick, slow = replicas["a"], replicas["c"]
    assert percent(quick.agent_port) > 4 * percent(slow.agent_port)
    idle = percent(slow.agent_port)
    body = b'{"inputs": [%b]}' % b", ".join([b'"a text and a text that is in it"'] * 8)
    with ThreadPoolExecutor(16) as clients:
        replies = [clients.submit(post_json, f"127.0.0.1:{slow.http_port}", "/embed", body) for _ in range(16)]
        wait_for(lambda: percent(slow.agent_port) <= idle // 2, "a smaller weight", LIMIT_S)
        assert {reply.result().status for reply in replies} == {200}
    # Hardly the same again: what the texts really took has corrected their cost.
    wait_for(lambda: percent(slow.agent_port) > idle // 2, "the weight of an idle replica", LIMIT_S)


def test_an_agent_listens_to_nobody(replicas: dict[str, Replica]) -> None:
    """HAProxy may be told to send something; the line comes whole. Who holds connections takes no place of others."""
    port = replicas["a"].agent_port
    for sent in (b"bertserve\n", b"drain\n" * 20_000):
        assert percent(port, sent) > 0
    with ExitStack() as held:
        for _ in range(MAX_PROBE_CONNECTIONS):
            held.enter_context(socket.create_connection(("127.0.0.1", port), 5))
        wait_for(lambda: _told_or_none(port).startswith("ready up"), "a place", LIMIT_S)


@pytest.mark.skipif(haproxy() is None, reason="no HAProxy here (see make haproxy)")
def test_the_proxy_takes_weights_and_ends(replicas: dict[str, Replica], tmp_path: Path) -> None:
    """Over both protocols; a replica that comes back is taken back."""
    with Proxy(list(replicas.values()), tmp_path) as proxy:

        def weight(backend: str, name: str) -> int:
            return int(proxy._row(backend, name)["weight"])

        def status(backend: str, name: str) -> str:
            return proxy._row(backend, name)["status"]

        for name in NAMES:
            proxy.wait_for(name, up=True, limit_s=LIMIT_S)
        for backend in ("http", "grpc"):
            wait_for(lambda: 1 <= 4 * weight(backend, "c") < weight(backend, "a"), "weights", LIMIT_S)  # noqa: B023
        with ThreadPoolExecutor(1) as ending:
            end = ending.submit(replicas["b"].stop, LIMIT_S)
            for backend in ("http", "grpc"):
                wait_for(lambda: status(backend, "b").startswith("DRAIN"), "the drain", LIMIT_S)  # noqa: B023
            assert end.result() == 0
        replicas["b"].start()
        for backend in ("http", "grpc"):
            wait_for(lambda: status(backend, "b").startswith("UP"), "the replica's return", LIMIT_S)  # noqa: B023
            assert weight(backend, "b") > 0


def test_there_is_no_agent_unless_it_is_asked_for(models: Path) -> None:
    """And one that is not ready yet says so."""
    port = free_port()
    with Server(models, *SLOW, "--agent-port", str(port), "--fake-ms", "30", wait_ready=False):
        wait_for(lambda: _told_or_none(port) == "down\n", "an agent before the engine is there", LIMIT_S)
        wait_for(lambda: _told_or_none(port).startswith("ready up"), "readiness", LIMIT_S)


def _told_or_none(port: int) -> str:
    try:
        return told(port)
    except OSError:
        return ""
