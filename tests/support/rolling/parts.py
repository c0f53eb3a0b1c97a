"""The system under test: replicas that can be restarted on their ports, behind HAProxy."""

from __future__ import annotations

import csv
import http.client
import json
import os
import shutil
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from loadtest.benchmarks.server_process import HOST, BertServer, ServerProcess, free_ports, get
from loadtest.errors import BenchError
from serving.host import available_cpus

if TYPE_CHECKING:
    from collections.abc import Sequence

_ROOT = Path(__file__).parents[3]
CONFIGURATION = _ROOT / "deploy" / "haproxy" / "haproxy.cfg"
_UNPACKED = _ROOT / "build" / "haproxy"
NAMES = ("a", "b", "c")
"""Names of the replicas, as in the configuration."""

_POLL_S = 0.05
_PROTOCOLS = ("http", "grpc")


def haproxy() -> list[str] | None:
    """Command of HAProxy: the system's, or the one that `make programs` unpacked; None if there is none."""
    installed, unpacked = shutil.which("haproxy"), _UNPACKED / "usr" / "sbin" / "haproxy"
    if installed is not None:
        return [installed]
    if not unpacked.exists():
        return None
    libraries = os.pathsep.join(map(str, (_UNPACKED / "usr" / "lib").glob("*-linux-gnu")))
    return ["env", f"LD_LIBRARY_PATH={libraries}", str(unpacked)]


class Replica(BertServer):
    """A server that is started repeatedly on the same ports; `name` is its name in the proxy."""

    def __init__(self, name: str, models: Path, folder: Path, options: Sequence[str]) -> None:
        """Prepares; `start` starts it."""
        self.name, self.log = name, folder / f"replica-{name}.log"
        own = ("--engine", "auto", "--log-format", "json", "--access-log", "true")
        super().__init__(models, "auto", available_cpus(), *own, *options, log=self.log)

    def start(self) -> float:
        """Starts it, waits until it is ready, and returns the seconds; raises BenchError if it never is."""
        return self.__enter__().ready_s

    def stop(self, limit_s: float) -> int:
        """Sends SIGTERM and returns the exit code; raises BenchError if it does not end in time."""
        self._process.terminate()
        try:
            code = self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise BenchError(f"replica {self.name} did not end within {limit_s:g} s:\n{self.last_words()}") from None
        self.close()
        return code

    def close(self) -> None:
        """Ends it if it still runs."""
        self.__exit__(None, None, None)

    def answered(self) -> Counter[str]:
        """Number of good answers to each request, by its id."""
        found: Counter[str] = Counter()
        for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines():
            if '"request_id":"rolling-' in line:
                told = json.loads(line)
                if told.get("logger") == "bertserve.access" and told["reason"] == "ok":
                    found[told["request_id"]] += 1
        return found

    def faults(self) -> list[str]:
        """Log lines that a restart under load should not cause."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return [line for line in lines if '"level":"error"' in line or "Traceback" in line]


class Proxy(ServerProcess):
    """HAProxy with the configuration that users get."""

    def __init__(self, replicas: Sequence[Replica], folder: Path, configuration: Path = CONFIGURATION) -> None:
        """Prepares the command; raises BenchError if there is no HAProxy."""
        found = haproxy()
        if found is None:
            raise BenchError("no HAProxy here: install it, or `make programs`")
        http_port, grpc_port, self.operations_port = free_ports(3)
        ports = {"HTTP": http_port, "GRPC": grpc_port, "OPERATIONS": self.operations_port}
        places = {f"HAPROXY_{name}": f"{HOST}:{port}" for name, port in ports.items()}
        for replica in replicas:
            prefix = f"REPLICA_{replica.name.upper()}"
            places |= {f"{prefix}_HTTP": f"{HOST}:{replica.http_port}", f"{prefix}_GRPC": f"{HOST}:{replica.grpc_port}"}
            places[f"{prefix}_METRICS"] = str(replica.metrics_port)
        command, ready = [*found, "-db", "-f", str(configuration)], (self.operations_port, "/livez")
        super().__init__(command, {**os.environ, **places}, ready, log=folder / "haproxy.log")
        self.http_port, self.grpc_port = http_port, grpc_port

    def wait_for(self, name: str, *, up: bool, limit_s: float) -> None:
        """Waits until the proxy sees that a replica is ready, or not; raises BenchError after the limit."""
        limit = time.monotonic() + limit_s
        while (self._row("http", name)["status"].startswith("UP")) is not up:
            if time.monotonic() > limit:
                raise BenchError(f"HAProxy does not see that replica {name} is {'up' if up else 'down'}")
            time.sleep(_POLL_S)

    def counts(self) -> dict[str, int]:
        """Counts over all replicas: requests sent, connection and reply errors, retries, statuses."""
        names = {
            "req_tot": "requests",
            "econ": "connections failed",
            "wretr": "requests sent again",
            "wredis": "requests sent to another replica",
            "eresp": "replies broken",
            "srv_abrt": "replies cut off by a replica",
            "cli_abrt": "replies given up by a client",
            "hrsp_4xx": "replies 4xx",
            "hrsp_5xx": "replies 5xx",
        }
        rows = [self._row(protocol, "BACKEND") for protocol in _PROTOCOLS]
        return {words: sum(int(row[name] or 0) for row in rows) for name, words in names.items()}

    def _row(self, backend: str, server: str) -> dict[str, str]:
        try:
            table = get(self.operations_port, "/;csv")[1].decode().removeprefix("# ")
        except (OSError, http.client.HTTPException) as error:
            raise BenchError(f"HAProxy does not tell its state: {error}") from error
        for row in csv.DictReader(table.splitlines()):
            if (row["pxname"], row["svname"]) == (backend, server):
                return row
        raise BenchError(f"HAProxy knows no {backend}/{server}")
