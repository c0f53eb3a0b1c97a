"""Rows 55 and 56 with real parts: replicas behind HAProxy, as users have it, end and come back under load."""

from __future__ import annotations

import itertools
import os
import re
import socket
import subprocess
from functools import partial
from typing import TYPE_CHECKING

import pytest

from loadtest.benchmarks.server_process import free_ports
from serving.settings import Settings
from tests.support.rolling.drive import Plan, experiment
from tests.support.rolling.parts import CONFIGURATION, haproxy
from tests.support.server import FAKE, listening
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from pathlib import Path


RESTARTS, REQUESTS = 20, 200_000

needs_haproxy = pytest.mark.external(None if haproxy() else "no HAProxy here (see make programs)")


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
