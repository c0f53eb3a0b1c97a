"""What a model loses when it is cut into parts: its answers, what each process holds, and texts a second.

    python -m export.benchmarks.split --make DIR

writes a checkpoint of BERT-base's size with random weights and exports it whole, in two parts and in four, and in two
ranks. Or it takes the repositories of exports of one checkpoint, the first of them whole, each with one model. Run it
in a source tree.

The engines of all of them are loaded and timed in turns: each is given as many batches at once as it has lanes for
them, for some seconds, on all cores. Memory is that of a server's engine processes after its warm-up, as the kernel
counts it (`Pss`, `Rss` and `Anonymous` of `smaps_rollup`).

    python -m export.benchmarks.split --large DIR --out docs/benchmarks/split-large.json

does the same for one model that is large: Megatron-BERT of 1.3 billion random weights in two parts, with the most
memory that its export and its server take. DIR then holds about 30 GB, which are not removed.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from http import HTTPStatus
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from export.benchmarks import random_checkpoints
from export.cli.export import main as export
from loadtest.benchmarks.processes import descendants
from loadtest.benchmarks.server_process import HOST, BertServer
from loadtest.errors import BenchError
from serving.engine.base import LaneKind
from serving.engine.batches import sample_text
from serving.engine.cpu.ort import OrtCpuBackend
from serving.engine.parts import loading
from serving.host import available_cpus, processor
from serving.models.bundle import open_bundle
from serving.models.forms import form_of
from serving.options import OptionParser
from serving.records import Batch, ModelIndex

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.engine.base import Backend
    from serving.models.forms import ModelForm

_BASE = random_checkpoints.Sizes(layers=12, width=768, heads=12, vocabulary=30522)
_EXPORTS = ((1, "layers"), (2, "layers"), (4, "layers"), (2, "tensors"))
_MEGATRON = random_checkpoints.Sizes(layers=24, width=2048, heads=32, vocabulary=29056)
_CELLS = ((32, 1), (128, 1), (128, 4))
_COMPARED = 64
_MIB = 1 << 20
_TIMEOUT_MS = 60_000
_MOST_MIB = 20 * 1024


def _form(repository: Path) -> ModelForm:
    (model,) = [entry for entry in repository.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    return form_of(open_bundle(model / "1"), "fp32", "ort-cpu", unproven=False)


def _runners(backend: Backend) -> list[Any]:
    """Of the lanes that carry the load: those side by side, or the wide one alone."""
    lanes = backend.lanes()
    busy = [lane for lane, kind in enumerate(lanes) if kind is LaneKind.NARROW] or [0]
    return [backend.runner(lane) for lane in busy]


def _rate(runners: Sequence[Any], batch: Batch, seconds: float) -> float:
    """Texts a second of lanes that are all busy; each finishes the batch that it has begun."""
    done: list[float] = []
    start = threading.Barrier(len(runners))

    def work(runner: Any) -> None:  # noqa: ANN401  of any engine
        runner.run(batch)
        start.wait()
        began = time.perf_counter()
        for batches in count(1):
            runner.run(batch)
            taken = time.perf_counter() - began
            if taken >= seconds:
                done.append(batches * len(batch.texts) / taken)
                return

    threads = [threading.Thread(target=work, args=(runner,)) for runner in runners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(done)


def _answers(backend: Backend, forms: ModelForm) -> np.ndarray[Any, Any]:
    spec, runner = forms.spec(), backend.runner(0)
    lengths = [4 + 7 * number % (spec.max_length - 4) for number in range(_COMPARED)]
    texts = [sample_text(spec, length) for length in lengths]
    return np.concatenate([runner.run(Batch(ModelIndex(0), [text])).arrays[0] for text in texts])


def _cosines(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    one, other = left.astype(np.float64), right.astype(np.float64)
    found: np.ndarray[Any, Any] = (one * other).sum(1) / np.linalg.norm(one, axis=1) / np.linalg.norm(other, axis=1)
    return found


def _server(repository: Path) -> BertServer:
    # A large model on a few cores takes seconds for a text.
    return BertServer(repository, "fp32", available_cpus(), "--default-timeout-ms", str(_TIMEOUT_MS))


def _memory(server: BertServer) -> list[dict[str, float]]:
    """MiB of each engine process of a server, the one that answers the server first."""
    return [_rollup(pid) for pid in server.pids() if b"serving.engine" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def _bare() -> dict[str, float]:
    """MiB of a process that has imported what an engine process needs, and loaded nothing."""
    words = "import serving.engine.process.worker, serving.engine.parts.loading; print(flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", words], **pipes) as process:  # type: ignore[call-overload]
        process.stdout.readline()
        found = _rollup(process.pid)
        process.communicate(b"\n")
        return found


def _rollup(pid: int) -> dict[str, float]:
    lines = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    kept = {words[0].rstrip(":").lower(): round(int(words[1]) / 1024, 1) for words in lines}
    return {name: kept[name] for name in ("rss", "pss", "anonymous")}


class _Peak(threading.Thread):
    """The most memory that a process and all below it hold together, looked at every tenth of a second.

    A process that takes more than `_MOST_MIB` is killed.

    Attributes:
        mib: `pss` and `anonymous`, which leaves out mapped files that the kernel may drop at any time.
    """

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.mib = {"pss": 0.0, "anonymous": 0.0}
        self._pid = pid

    def run(self) -> None:
        while Path(f"/proc/{self._pid}").exists():
            # One that ends while it is looked at has no say.
            with contextlib.suppress(OSError, KeyError, ValueError):
                found = [_rollup(pid) for pid in (self._pid, *descendants(self._pid))]
                self.mib = {name: max(most, sum(one[name] for one in found)) for name, most in self.mib.items()}
            if self.mib["pss"] > _MOST_MIB:
                os.kill(self._pid, signal.SIGKILL)
            time.sleep(0.1)


def _large_export(folder: Path) -> dict[str, Any]:
    """Exports Megatron-LM's BERT of 1.3 billion weights in two parts; the figures of an export that is there."""
    checkpoint, kept = folder / "checkpoint", folder / "export.json"
    if kept.is_file():
        return dict(json.loads(kept.read_text(encoding="utf-8")))
    if not checkpoint.is_dir():
        random_checkpoints.write(checkpoint, "megatron-bert", "embed", _MEGATRON)
    options = ["--name", "large", "--out", str(folder / "2-by-layers"), "--precision", "fp32", "--split", "2"]
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "bertserve.py", "export", str(checkpoint), *options])
    peak = _Peak(process.pid)
    peak.start()
    if process.wait():
        raise SystemExit(1)
    figures = {"seconds": time.perf_counter() - began, "peak_mib": peak.mib}
    kept.write_text(json.dumps(figures), encoding="utf-8")
    return figures


def _large(folder: Path, requests: int) -> dict[str, Any]:
    """What that model takes to export and to serve."""
    exported, form = _large_export(folder), _form(folder / "2-by-layers")
    parity = form.artifact.parity
    with _server(folder / "2-by-layers") as server:
        serving = _Peak(server.pids()[0])
        serving.start()
        latency = {tokens: _latency(server.http_port, form, tokens, requests) for tokens in (32, 128)}
        memory = _memory(server)
    return {
        "machine": {"processor": processor(), "cores": available_cpus()},
        "weights_bytes": form.artifact.total_bytes,
        "share_of_bytes": [sum(map(_bytes, graphs)) / form.artifact.total_bytes for graphs in form.artifact.processes],
        "export": exported,
        "beside_pytorch": None if parity is None else {"texts": parity.texts, "cosine_min": parity.cosine_min},
        "memory_mib": memory,
        "serving_peak_mib": serving.mib,
        "lone_text_ms": latency,
    }


def _latency(port: int, form: ModelForm, tokens: int, requests: int) -> dict[str, float]:
    """Of a lone text over HTTP, as the client sees it."""
    ids = list(sample_text(form.spec(), tokens).ids)
    body = json.dumps({"inputs": [ids]}).encode()
    connection, taken = http.client.HTTPConnection(HOST, port), []
    for _ in range(1 + requests):
        began = time.perf_counter()
        connection.request("POST", "/embed", body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        content = reply.read()
        if reply.status != HTTPStatus.OK:
            raise SystemExit(content.decode())
        taken.append(1e3 * (time.perf_counter() - began))
    connection.close()
    return {"p50": statistics.median(taken[1:]), "min": min(taken[1:]), "max": max(taken[1:]), "requests": requests}


def _measured(repositories: Sequence[Path], rounds: int, seconds: float) -> dict[str, Any]:
    forms = [_form(repository) for repository in repositories]
    threads = available_cpus()
    memory = []
    for repository in repositories:
        with _server(repository) as server:
            memory.append(_memory(server))
    backends = [OrtCpuBackend([form.spec()], threads, loading.load) for form in forms]
    answers = [_answers(backend, form) for backend, form in zip(backends, forms, strict=True)]
    whole = forms[0].artifact.total_bytes
    rates: dict[tuple[int, int, int], list[float]] = {}
    for _ in range(rounds):
        for tokens, size in _CELLS:
            for index, (backend, form) in enumerate(zip(backends, forms, strict=True)):
                batch = Batch(ModelIndex(0), [sample_text(form.spec(), tokens)] * size)
                rates.setdefault((index, tokens, size), []).append(_rate(_runners(backend), batch, seconds))
    return {
        "machine": {"processor": processor(), "cores": threads},
        "whole_bytes": whole,
        "bare_mib": _bare(),
        "exports": [
            {
                "parts": len(form.artifact.processes),
                "split_by": form.artifact.split_by,
                "share_of_bytes": [sum(map(_bytes, graphs)) / whole for graphs in form.artifact.processes],
                "memory_mib": memory[index],
                "cosine_min": float(_cosines(answers[index], answers[0]).min()),
                "max_abs_difference": float(np.abs(answers[index] - answers[0]).max()),
                "beside_pytorch": None if form.artifact.parity is None else form.artifact.parity.cosine_min,
                "texts_per_s": [
                    {
                        "tokens": tokens,
                        "batch": size,
                        "median": statistics.median(rates[index, tokens, size]),
                        "all": rates[index, tokens, size],
                        "of_the_whole": statistics.median(
                            own / other
                            for own, other in zip(rates[index, tokens, size], rates[0, tokens, size], strict=True)
                        ),
                    }
                    for tokens, size in _CELLS
                ],
            }
            for index, form in enumerate(forms)
        ],
    }


def _bytes(graph: Any) -> int:  # noqa: ANN401  an artifact or a part
    return int(graph.size_bytes + (0 if graph.data is None else graph.data.size_bytes))


def _made(folder: Path) -> list[Path]:
    """Repositories of exports of one checkpoint; those that are there are kept."""
    checkpoint = folder / "checkpoint"
    if not checkpoint.is_dir():
        random_checkpoints.write(checkpoint, "bert", "embed", _BASE)
    repositories = [folder / f"{parts}-by-{kind}" for parts, kind in _EXPORTS]
    for (parts, kind), repository in zip(_EXPORTS, repositories, strict=True):
        options = ["--name", "base", "--precision", "fp32", "--split", str(parts), "--split-by", kind, "--if-changed"]
        if export([str(checkpoint), "--out", str(repository), *options]):
            raise SystemExit(1)
    return repositories


def main() -> int:
    """Measures, and writes the figures."""
    parser = OptionParser(prog="python -m export.benchmarks.split", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "repositories", nargs="*", type=Path, metavar="REPOSITORY", help="of exports; the whole one first"
    )
    parser.add_argument("--make", type=Path, metavar="DIR", help="export a random checkpoint there, and measure that")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks/split.json"), metavar="FILE")
    parser.add_argument("--rounds", type=int, default=6, help="in which exports are timed in turns")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each cell")
    parser.add_argument("--large", type=Path, metavar="DIR", help="export and serve 1.3 billion weights there instead")
    parser.add_argument("--requests", type=int, default=10, help="lone texts of each length, with --large")
    options = parser.parse_args()
    try:
        if options.large is not None:
            figures = _large(options.large, options.requests)
        else:
            repositories = options.repositories or _made(options.make)
            figures = _measured(repositories, options.rounds, options.seconds)
    except BenchError as error:
        raise SystemExit(f"python -m export.benchmarks.split: {error}") from error
    options.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
