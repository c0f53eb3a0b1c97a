"""What `make bench-gpu` measures of a server on the GPU: one client, many clients, and what bounds those."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from export.errors import ExportError
from loadtest.benchmarks.exports.gpu_cells import LENGTHS, MOST_TOKENS, SERVED_TOKENS
from loadtest.benchmarks.processes import cpu_s

if TYPE_CHECKING:
    from collections.abc import Sequence

CLIENTS = 32
_SERVER_START_S = 120.0
_LOAD_S = 8.0


class Served(NamedTuple):
    """What a server was seen to do.

    Attributes:
        http_us: Times of requests of one client over HTTP.
        grpc_us: The same over gRPC; empty where that could not be measured.
        compute_us: What the engine took of them, as the replies say.
        per_s: Answers a second to many clients.
        bottleneck: What bounds that.
        status: `/status` after it, which the simulator reads.
    """

    http_us: list[float]
    grpc_us: list[float]
    compute_us: list[float]
    per_s: float
    bottleneck: str
    status: dict[str, Any]


def serve(folder: Path, engine: str, until: float) -> Served:
    """Exports BERT-base with its proof, serves it on the GPU and asks it.

    Raises:
        ExportError: It cannot be exported or served, or there is no time left for it.
    """
    models = folder / "models"
    source = str(folder / "base" / "checkpoint")
    asked = ("--name", "bench", "--precision", "fp16", "--max-length", str(LENGTHS[-1]))
    _within(["export", source, "--out", str(models), *asked], until)
    command = [sys.executable, "bertserve.py", "serve", "--models", str(models), "--engine", engine]
    ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", "--max-batch-tokens", str(MOST_TOKENS)]
    with subprocess.Popen([*command, *ports], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            http_at, grpc_at = _announced(server, min(until, time.monotonic() + _SERVER_START_S))
            return _asked(server.pid, http_at, grpc_at)
        finally:
            server.terminate()


def _within(words: Sequence[str], until: float) -> None:
    left = until - time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "bertserve.py", *words],
            capture_output=True,
            text=True,
            timeout=max(1.0, left),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ExportError(f"`bertserve {words[0]}` did not end in the {left:.0f} s that were left for it") from None
    if done.returncode:
        raise ExportError((done.stderr.strip().splitlines() or ["it failed without a word"])[-1])


def _announced(server: subprocess.Popen[str], until: float) -> tuple[str, str]:
    """The addresses of HTTP and gRPC, once the server is ready."""
    alarm = threading.Timer(max(1.0, until - time.monotonic()), server.kill)
    alarm.start()
    lines = []
    try:
        for line in server.stdout or ():
            lines.append(line)
            if line.startswith("  metrics "):
                text = "".join(lines)
                found = re.search(r"HTTP +https?://(\S+).*?gRPC +(\S+)", text, re.DOTALL)
                if found:
                    return found[1], found[2]
    finally:
        alarm.cancel()
    raise ExportError(f"the server did not become ready: {(lines or ['no word'])[-1].strip()}")


def _text() -> str:
    return " ".join(["server"] * (SERVED_TOKENS - 2))


def _asked(pid: int, http_at: str, grpc_at: str) -> Served:
    body = json.dumps({"inputs": _text()}).encode()
    one = _http(http_at, body, _LOAD_S / 2)
    engine_pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()[0])
    before = [cpu_s(each) for each in (pid, engine_pid)]
    results: list[list[tuple[float, float]]] = [[] for _ in range(CLIENTS)]

    def client(index: int) -> None:
        results[index] = _http(http_at, body, _LOAD_S)

    threads = [threading.Thread(target=client, args=(index,)) for index in range(CLIENTS)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    time.sleep(_LOAD_S / 2)
    utilisation = _gpu_utilisation(http_at)
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - started
    busy = [(cpu_s(each) - was) / seconds for each, was in zip((pid, engine_pid), before, strict=True)]
    status = json.loads(_get(http_at, "/status"))
    return Served(
        http_us=[total for total, _ in one],
        grpc_us=_grpc(grpc_at, _LOAD_S / 2),
        compute_us=[compute for _, compute in one],
        per_s=sum(map(len, results)) / seconds,
        bottleneck=_bottleneck(utilisation, *busy),
        status=status,
    )


def _http(address: str, body: bytes, seconds: float) -> list[tuple[float, float]]:
    """Times of requests one after another, and what the engine took of each, in microseconds."""
    connection = http.client.HTTPConnection(address, timeout=30)
    found = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        started = time.perf_counter()
        connection.request("POST", "/embed", body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        reply.read()
        total = 1e6 * (time.perf_counter() - started)
        compute = re.search(r"compute;dur=([0-9.]+)", reply.headers.get("Server-Timing", ""))
        if reply.status == http.client.OK:
            found.append((total, 1e3 * float(compute[1]) if compute else 0.0))
    connection.close()
    return found


def _grpc(address: str, seconds: float) -> list[float]:
    """The same over gRPC, with Triton's own client; empty where that is not installed."""
    try:
        import numpy as np  # noqa: PLC0415
        import tritonclient.grpc as triton  # noqa: PLC0415  an optional library
    except ModuleNotFoundError:
        return []
    client = triton.InferenceServerClient(address)
    texts = triton.InferInput("text", [1], "BYTES")
    texts.set_data_from_numpy(np.array([_text().encode()], dtype=object))
    found = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        started = time.perf_counter()
        client.infer("bench", [texts])
        found.append(1e6 * (time.perf_counter() - started))
    return found


def _get(address: str, path: str) -> bytes:
    connection = http.client.HTTPConnection(address, timeout=30)
    connection.request("GET", path)
    content = connection.getresponse().read()
    connection.close()
    return content


def _gpu_utilisation(address: str) -> float:
    """Share of time in which a kernel ran, as the server's metrics say it; 0 where they do not."""
    found = re.search(rb"^nv_gpu_utilization\{[^}]*\} ([0-9.e+-]+)$", _get(address, "/metrics"), re.MULTILINE)
    return float(found[1]) if found else 0.0


def _bottleneck(gpu_share: float, server: float, engine: float) -> str:
    """What bounds the throughput: whatever is nearest to doing nothing else."""
    shares = {
        "the GPU": gpu_share,
        "the server process's event loop": server,
        "the engine process's one thread": engine,
    }
    name = max(shares, key=shares.__getitem__)
    said = ", ".join(f"{each} {100 * share:.0f}%" for each, share in shares.items())
    return f"{name} ({said} busy)"
