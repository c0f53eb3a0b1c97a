"""Rows 55 and 56 with real parts: replicas behind HAProxy, as users have it, end and come back under load."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import os
import re
import shutil
import socket
import subprocess
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from bertserve.serving.settings import Settings
from tests.support.asking import asking, failures, wait_for_more
from tests.support.clients import MODEL_INFER, TIMEOUT_S, HttpConnection, Tei, get, infer_request
from tests.support.models import ROOT
from tests.support.server import FAKE, Server, free_port, listening
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

CONFIGURATION = ROOT / "deploy" / "haproxy" / "haproxy.cfg"
UNPACKED = ROOT / "build" / "haproxy"
CLIENTS = 4
"""Of each wire."""


def haproxy() -> list[str]:
    """The system's HAProxy, or the one that `make programs` unpacked."""
    installed, unpacked = shutil.which("haproxy"), UNPACKED / "usr" / "sbin" / "haproxy"
    if installed is not None:
        return [installed]
    libraries = os.pathsep.join(map(str, (UNPACKED / "usr" / "lib").glob("*-linux-gnu")))
    return ["env", f"LD_LIBRARY_PATH={libraries}", str(unpacked)] if unpacked.exists() else []


needs_haproxy = pytest.mark.external(None if haproxy() else "no HAProxy here (see make programs)")


@contextlib.contextmanager
def proxy(places: dict[str, str]) -> Iterator[str]:
    """HAProxy with the configuration that users get; gives the address of its operators' page."""
    operations = f"127.0.0.1:{free_port()}"
    environment = os.environ | {"HAPROXY_OPERATIONS": operations} | places
    with subprocess.Popen([*haproxy(), "-db", "-f", str(CONFIGURATION)], env=environment) as running:
        try:
            wait_for(partial(listening, operations), "HAProxy")
            yield operations
        finally:
            running.terminate()


def sees(operations: str, name: str) -> bool:
    """Whether the proxy sends requests to a replica."""
    rows = csv.DictReader(get(operations, "/;csv").body.decode().removeprefix("# ").splitlines())
    (status,) = (row["status"] for row in rows if (row["pxname"], row["svname"]) == ("http", name))
    return status.startswith("UP")


def http_client(connection: HttpConnection, number: int, text: str, expected: NDArray[np.float32]) -> Callable[[], str]:
    """Asks with an id of its own each time, which it returns; the answer is this request's and this text's."""
    numbers, body = itertools.count(), json.dumps({"inputs": text}).encode()

    def ask() -> str:
        identity = f"http-{number}-{next(numbers)}"
        headers = {"Content-Type": "application/json", "X-Request-Id": identity}
        reply = connection.call("POST", "/embed", body, headers)
        assert (reply.status, reply.headers["x-request-id"]) == (200, identity), reply.body
        assert np.array(reply.json()[0]) @ expected > 0.999
        return identity

    return ask


def grpc_client(channel: grpc.Channel, number: int, text: str, expected: NDArray[np.float32]) -> Callable[[], str]:
    """The same over gRPC."""
    numbers = itertools.count()
    infer = channel.unary_unary(MODEL_INFER, response_deserializer=pb.ModelInferResponse.FromString)

    def ask() -> str:
        identity = f"grpc-{number}-{next(numbers)}"
        reply = infer(infer_request([text], identity).SerializeToString(), timeout=TIMEOUT_S)
        assert reply.id == identity
        assert np.frombuffer(reply.raw_output_contents[0], "<f4") @ expected > 0.999
        return identity

    return ask


@needs_haproxy
@pytest.mark.parametrize(
    ("options", "restarts"),
    [pytest.param(FAKE, 2, id="few"), pytest.param((), 20, id="many", marks=pytest.mark.endurance)],
)
def test_row_55_restarts_behind_a_proxy(models: Path, options: tuple[str, ...], restarts: int) -> None:
    """Replicas end one after another: every request is answered once, with its own answer."""
    logs = ("--log-format", "json", "--access-log", "true")
    replicas = {name: Server(models, *options, "--lame-duck-s", "3", *logs, wait_ready=False) for name in "abc"}
    places = {f"HAPROXY_{wire}": f"127.0.0.1:{free_port()}" for wire in ("HTTP", "GRPC")}
    for name, replica in replicas.items():
        named = f"REPLICA_{name.upper()}"
        places |= {f"{named}_HTTP": replica.http, f"{named}_GRPC": replica.grpc}
        places[f"{named}_METRICS"] = replica.metrics.rpartition(":")[2]
    texts = [f"the text of client {number}" for number in range(CLIENTS)]
    with contextlib.ExitStack() as stack:
        for replica in replicas.values():
            stack.enter_context(replica).wait_state()
        with Tei(replicas["a"]) as direct:
            known = direct.embed(texts).vectors
        operations = stack.enter_context(proxy(places))
        for name in replicas:
            wait_for(partial(sees, operations, name), f"replica {name}")
        options_of_wire = [("grpc.enable_retries", 0)]
        channel = stack.enter_context(grpc.insecure_channel(places["HAPROXY_GRPC"], options=options_of_wire))
        clients = [
            http_client(stack.enter_context(HttpConnection(places["HAPROXY_HTTP"])), *one)
            for one in zip(range(CLIENTS), texts, known, strict=True)
        ]
        clients += [grpc_client(channel, *one) for one in zip(range(CLIENTS), texts, known, strict=True)]
        with asking(*clients, rest_s=0.03) as askers:
            for name in itertools.islice(itertools.cycle(replicas), restarts):
                wait_for_more(askers, 5)
                assert replicas[name].stop() == 0
                replicas[name].__exit__()
                replicas[name].__enter__().wait_state()
                wait_for(partial(sees, operations, name), f"replica {name}")
            wait_for_more(askers, 5)
        assert failures(askers) == []
        assert [replica.stop() for replica in replicas.values()] == [0] * len(replicas)
    lines = [json.loads(line) for replica in replicas.values() for line in replica.log.splitlines()]
    assert [line for line in lines if line["level"] == "error"] == []
    answered = [line["request_id"] for line in lines if line["logger"] == "bertserve.access" and line["reason"] == "ok"]
    asked = {identity for asker in askers for identity in asker.answers}
    assert Counter(name for name in answered if name in asked) == Counter(asked)


@needs_haproxy
def test_the_configuration_is_valid_as_it_is() -> None:
    """Without one variable set; that the names of the replicas cannot be resolved here is no error."""
    command = [*haproxy(), "-c", "-f", str(CONFIGURATION)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stderr.splitlines() if "[WARNING]" in line]
    assert all("could not resolve address 'replica-" in line for line in warnings)


@needs_haproxy
def test_the_ports_are_open_to_both_families() -> None:
    """With the addresses that the configuration has, but for the numbers of the ports."""
    text = CONFIGURATION.read_text(encoding="utf-8")
    usual = dict(re.findall(r"\$\{HAPROXY_(HTTP|GRPC)-(\S+):\d+\}", text))
    ports = {name: free_port() for name in usual}
    families = ["127.0.0.1", *(["::1"] if socket.has_dualstack_ipv6() else [])]
    with proxy({f"HAPROXY_{name}": f"{usual[name]}:{port}" for name, port in ports.items()}):
        for host, port in itertools.product(families, ports.values()):
            wait_for(partial(listening, f"{host}:{port}"), f"HAProxy on {host}")


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
