"""Nodes of a Ray cluster on this machine."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Self

import psutil

from tests.support.server import environment, free_port
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from pathlib import Path

LIMIT_S = 600.0
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
"""Whoever lacks it is refused: a node's ports are open to the network."""

_ENVIRONMENT = {
    **TOKEN,
    # Workers are started when a job needs them, and not one for each CPU beforehand.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}


class RayNode:
    """`ray start` as a subprocess, in a cluster of its own or in that of a head; use it in a `with` block."""

    def __init__(self, folder: Path, *, cpus: int, head: RayNode | None = None, **settings: str) -> None:
        self.folder = folder
        self.address = head.address if head else f"127.0.0.1:{free_port()}"
        self._cpus = cpus
        self._environment = environment({**_ENVIRONMENT, **settings})
        self._is_head = head is None

    def __enter__(self) -> Self:
        self._files = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # sockets lie below it, whose paths must be short
        options = [f"--address={self.address}"]
        if self._is_head:
            port = self.address.rpartition(":")[2]
            options = ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={self._files}"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", *options]
        command += [f"--num-cpus={self._cpus}", "--object-store-memory", str(100 << 20)]
        log = self.folder / "ray.log"
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command, cwd=self.folder, env=self._environment, stdout=output, stderr=output
            )
        try:
            wait_for(lambda: "Ray runtime started" in log.read_text(), "Ray to start", LIMIT_S)
        except TimeoutError:
            self._kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()

    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self._process.pid).children(recursive=True)

    def _kill(self) -> None:
        """At once: asked to end, a node takes half a minute."""
        processes = self.processes()
        self._process.kill()
        self._process.wait(LIMIT_S)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=LIMIT_S)
        shutil.rmtree(self._files, ignore_errors=True)
