"""The addresses that the server listens on, over both families."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bertserve.serving.errors import StartupError
from bertserve.serving.net.ports import bind
from tests.support import without_ipv6
from tests.support.clients import get
from tests.support.models import ROOT
from tests.support.server import FAKE, Server
from tests.support.skips import excused

if TYPE_CHECKING:
    from pathlib import Path


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason=excused("no IPv6 here"))


@needs_ipv6
@pytest.mark.parametrize(("host", "reached"), [("::", ["[::1]", "127.0.0.1"]), ("::1", ["[::1]"])])
def test_every_port_listens_on_ipv6(models: Path, host: str, reached: list[str]) -> None:
    """HTTP, gRPC and the port of probes alike; on `::`, which images and manifests set, over IPv4 as well."""
    with Server(models, *FAKE, "--host", host) as server:
        assert server.http.startswith(f"[{host}]:")
        http, rpc, metrics = (place.rpartition(":")[2] for place in (server.http, server.grpc, server.metrics))
        for place in reached:
            assert [get(f"{place}:{port}", "/readyz").status for port in (http, metrics)] == [200, 200]
            with grpc.insecure_channel(f"{place}:{rpc}") as channel:
                reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_where_there_is_no_ipv6() -> None:
    """`::` is every address of IPv4; an address of IPv6 alone is refused."""
    code = (
        "from bertserve.serving.net.ports import bind\n"
        "print(bind('::', 0, 'HTTP').getsockname()[0], flush=True)\n"
        "bind('::1', 0, 'HTTP')"
    )
    command = [sys.executable, without_ipv6.__file__, sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "0.0.0.0\n", done.stderr
    assert "StartupError: cannot listen on [::1]:0 for HTTP: Address family not supported" in done.stderr


@needs_ipv6
def test_a_port_that_is_taken_over_ipv4_alone() -> None:
    """The start fails, and does not fall back to an address on which some clients would reach another program."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(StartupError, match=rf"cannot listen on \[::\]:{port} for HTTP: Address already in use"):
            bind("::", port, "HTTP")
