"""Rows 55 and 56 with real parts: replicas behind HAProxy, as users have it, end and come back under load."""

from __future__ import annotations

import itertools
import os
import re
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import pytest

from loadtest.benchmarks.server_process import free_ports
from serving.net.connection_limiter import MAX_PROBE_CONNECTIONS
from serving.settings import Settings
from tests.support.clients import post_json
from tests.support.rolling.drive import Plan, experiment
from tests.support.rolling.parts import CONFIGURATION, NAMES, Proxy, Replica, haproxy
from tests.support.server import FAKE, Server, free_port, listening
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


RESTARTS, REQUESTS = 20, 200_000

needs_haproxy = pytest.mark.skipif(haproxy() is None, reason="no HAProxy here (see make haproxy)")


@needs_haproxy
def test_row_55_restarts_behind_a_proxy(models: Path, tmp_path: Path) -> None:
    """Two replicas of three end one after another: every request is answered once, with its own answer, and no 5xx."""
    found = experiment(Plan(models, tmp_path, 2, 1, 100.0, FAKE, 3.0), lambda _: None)
    assert found.verdict() == []
    assert [one.replica for one in found.restarts] == ["a", "b"]
    assert sum(found.offered.values()) == found.proxy["requests"] > 1000


@needs_haproxy
@pytest.mark.endurance
def test_row_55_restarts_behind_a_proxy_in_full(models: Path, tmp_path: Path) -> None:
    """The model itself, at 0.7 of what three replicas carry, twenty restarts and 200,000 requests."""
    found = experiment(Plan(models, tmp_path, RESTARTS, REQUESTS, None, (), 5.0), lambda _: None)
    assert found.verdict() == []
    assert len(found.restarts) >= RESTARTS
    assert sum(found.offered.values()) >= REQUESTS


@needs_haproxy
def test_the_configuration_is_valid_as_it_is() -> None:
    """Without one variable set; that the names of the replicas cannot be resolved here is no error."""
    command = [*(haproxy() or []), "-c", "-f", str(CONFIGURATION)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stderr.splitlines() if "[WARNING]" in line]
    assert all("could not resolve address 'replica-" in line for line in warnings)


@needs_haproxy
def test_the_ports_are_open_to_both_families() -> None:
    """With the addresses that the configuration has, but for the numbers of the ports."""
    text = CONFIGURATION.read_text(encoding="utf-8")
    usual = dict(re.findall(r"\$\{HAPROXY_(HTTP|GRPC)-(\S+):\d+\}", text))
    operations, *others = free_ports(3)
    ports = dict(zip(usual, others, strict=True))
    places = {f"HAPROXY_{name}": f"{usual[name]}:{port}" for name, port in ports.items()}
    places["HAPROXY_OPERATIONS"] = f"127.0.0.1:{operations}"
    command = [*(haproxy() or []), "-db", "-f", str(CONFIGURATION)]
    families = ["127.0.0.1", *(["::1"] if socket.has_dualstack_ipv6() else [])]
    with subprocess.Popen(command, env=os.environ | places) as proxy:
        try:
            for host, port in itertools.product(families, ports.values()):
                wait_for(partial(listening, f"{host}:{port}"), f"HAProxy on {host}")
        finally:
            proxy.terminate()


def test_the_configuration_fits_the_servers_times() -> None:
    """The proxy has noticed before the lame duck ends, waits longer than any deadline, and closes idle ones first."""
    text, usual = CONFIGURATION.read_text(encoding="utf-8"), Settings()
    every, down = re.search(r"inter (\d+)s fall (\d+)", text).groups()  # type: ignore[union-attr]  it is there
    assert (int(every) + 1) * int(down) < usual.lame_duck_s
    (patience,) = re.findall(r"timeout server (\d+)s", text)
    assert int(patience) > usual.max_timeout_ms / 1e3
    (idle,) = re.findall(r"timeout http-keep-alive (\d+)s", text)
    assert int(idle) < usual.keep_alive_s
    ports = {int(port) for port in re.findall(r":(\d{4})\}|_METRICS-(\d{4})\}", text) for port in port if port}
    assert {usual.http_port, usual.grpc_port, usual.metrics_port} <= ports


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
