"""deploy/ray on a cluster of one node: what replicas answer, and how many there are."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.support.clients import post_json
from tests.support.models import ROOT
from tests.support.ray_nodes import LIMIT_S, TOKEN, RayNode
from tests.support.server import FAKE, environment, free_port
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SETTINGS = {"RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper": "true"}
"""As docs/guides/deploy.md has it."""
SLOW = " ".join([*FAKE, "--fake-ms", "50", "--max-batch-tokens", "16"])


@pytest.mark.slow
def test_replicas_answer_as_servers_and_follow_the_load(models: Path, tmp_path: Path) -> None:
    """Over Ray's own HTTP port, errors included; what is killed is replaced; a queue brings another replica."""
    port = str(free_port())
    with RayNode(tmp_path, cpus=4, **SETTINGS) as node:
        serve(node, "start", "--http-host", "127.0.0.1", "--http-port", port).wait(LIMIT_S)
        words = (f"models={models}", "threads=1", f"options={SLOW}")
        running = serve(node, "run", "serve_app:application", *words)
        wait_for(lambda: embed(port) == 200, "an answer", LIMIT_S)
        reply = post_json(f"127.0.0.1:{port}", "/embed", json.dumps({"inputs": ["a text", "another"]}).encode())
        assert len(reply.json()) == 2
        assert reply.headers["server-timing"].startswith("tokenize;dur=")
        assert post_json(f"127.0.0.1:{port}", "/embed", b"{").status == 400
        for victim in ("server", "replica"):
            (server,) = servers(node)
            (server if victim == "server" else server.parent()).kill()
            wait_for(lambda server=server: server not in servers(node), f"the server's end with its {victim}", LIMIT_S)  # type: ignore[misc]  default arguments of a lambda
            wait_for(lambda: embed(port) == 200, f"an answer without that {victim}", LIMIT_S)
        with queue(port):
            wait_for(lambda: len(servers(node)) > 1, "another replica", LIMIT_S)
        running.send_signal(signal.SIGINT)
        running.wait(LIMIT_S)
        wait_for(lambda: not servers(node), "the servers' end", LIMIT_S)


def serve(node: RayNode, *words: str) -> subprocess.Popen[bytes]:
    """Ray Serve's command line in the folder of the application."""
    command = [sys.executable, "-m", "ray.serve.scripts", words[0], "--address", node.address, *words[1:]]
    return subprocess.Popen(command, cwd=ROOT / "deploy" / "ray", env=environment(TOKEN))


def embed(port: str, text: str = "a text") -> int:
    """The status of an answer; 0 where nobody listens."""
    try:
        return post_json(f"127.0.0.1:{port}", "/embed", json.dumps({"inputs": text}).encode()).status
    except OSError:
        return 0


def servers(node: RayNode) -> list[psutil.Process]:
    """Server processes of replicas."""
    found = []
    for process in node.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.cmdline()[1:4] == ["-m", "bertserve", "serve"] and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@contextlib.contextmanager
def queue(port: str) -> Iterator[None]:
    """Twenty clients that each send a request after the other."""
    ended = threading.Event()

    def ask(client: int) -> None:
        while not ended.is_set():
            embed(port, f"a text of client {client}")

    threads = [threading.Thread(target=ask, args=(client,)) for client in range(20)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()
