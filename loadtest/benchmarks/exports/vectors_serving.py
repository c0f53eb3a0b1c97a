"""A sparse model on the server beside Sentence Transformers' `SparseEncoder` with its ONNX backend, over HTTP."""

from __future__ import annotations

import subprocess
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from export.tasks.decisions import cosine
from loadtest.benchmarks import peers
from loadtest.benchmarks.server_process import HOST, BertServer, ServerProcess, free_ports, isolated
from loadtest.benchmarks.turns import Samples, measure_round
from loadtest.errors import BenchError
from loadtest.generator.workload import different_texts, make_texts
from loadtest.report.sample import Sample
from serving.host import available_cpus

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from loadtest.benchmarks.runner import Benchmark

PEER = "sentence-transformers"
"""Name of its environment."""

PACKAGES = ("sentence-transformers", "optimum-onnx", "transformers", "onnxruntime", "torch", "fastapi", "uvicorn")
CONNECTIONS = 32
TOKENS, MIXED = 32, 0
"""The loads, by tokens of a text. `MIXED` stands for texts of `_WORDS` words."""

LOADS = {TOKENS: "32 tokens", MIXED: "6 to 250 words"}
PRECISIONS = {"fp32": "onnx/model.onnx", "INT8": "onnx/model_qint8_avx512_vnni.onnx"}
"""The file of the peer by precision."""

OURS = "bertserve"
THEIRS = {f"SparseEncoder, batch {size}": size for size in (1, 8)}
"""Maximum texts that the peer encodes together: more are slower where their lengths differ."""

_INSIDE = Path(peers.__file__).parent / "inside"
_ROUNDS, _TEXTS, _COMPARED = 4, 200, 4
_WORDS = (6, 250)
_PATIENCE_MS = "60000"
_MIN_COSINE = {"fp32": 0.9999, "INT8": 0.9}


def key(system: str, precision: str) -> str:
    """Name of a server, and of its samples."""
    return f"{system}, {precision}"


def measure(benchmark: Benchmark, source: Path, bundle: Path, words: int, environment: Path) -> dict[str, Any]:
    """Measures all servers in turns; returns JSON values.

    Args:
        benchmark: Its client sends the texts.
        source: The checkpoint, in a folder for temporary files.
        bundle: Its bundle with fp32 and INT8.
        words: Size of its vocabulary.
        environment: The peer's.

    Raises:
        BenchError: The peer does not export the model, or a server's vectors are not the model's.
    """
    folder, python = source.with_name("peer"), environment.absolute() / "bin" / "python"
    benchmark.say(f"exporting for {PEER}")
    made = [python, _INSIDE / "sparse_encoder_model.py", source, folder]
    done = subprocess.run(made, capture_output=True, text=True, env=isolated({}), check=False)
    if done.returncode != 0:
        raise BenchError(f"{PEER} does not export the model:\n{done.stderr[-1000:]}")
    texts = {
        TOKENS: [text.text for text in make_texts(bundle, TOKENS, _TEXTS)],
        MIXED: different_texts(*_WORDS, _TEXTS),
    }
    asked, vectors = {}, {}
    with ExitStack() as stack:
        for name, made_server in _servers(bundle.parents[1], folder, python).items():
            benchmark.say(f"starting {name}")
            server = stack.enter_context(made_server)
            asked[name] = benchmark.asked(name, server, ("sparse", server.http_port, "/embed_sparse"), words, texts)
            found = [benchmark.client.ask("vectors", way=name, tokens=tokens, count=_COMPARED) for tokens in LOADS]
            vectors[name] = np.concatenate(found)
        cosines = least_cosines(vectors)
        rounds: dict[int, list[dict[str, Any]]] = {tokens: [] for tokens in LOADS}
        for _ in range(_ROUNDS):
            for tokens, measured in rounds.items():
                turns = [replace(turn(tokens, CONNECTIONS), subject=name) for name, turn in asked.items()]
                measured.append(measure_round(turns, benchmark.say))
    return {"cosines": cosines, "rounds": rounds}


def least_cosines(vectors: Mapping[str, NDArray[np.float64]]) -> dict[str, float]:
    """The minimum cosine of each server's vectors to those of the peer's fp32, one text at a time.

    Raises:
        BenchError: One is too low.
    """
    exact = key(next(iter(THEIRS)), "fp32")
    found = {name: float(cosine(each, vectors[exact]).min()) for name, each in vectors.items()}
    for name, least in found.items():
        if least < _MIN_COSINE[name.rpartition(" ")[2]]:
            raise BenchError(f"{name} returns other vectors than {exact} (cosine {least:.5f})")
    return found


def figures(step: Mapping[str, Any]) -> dict[str, Any]:
    """Values for the template."""
    samples = Samples(
        {
            int(tokens): [{name: Sample(*figures) for name, figures in each.items()} for each in measured]
            for tokens, measured in step["rounds"].items()
        }
    )

    def per_s(tokens: int, system: str, precision: str) -> float:
        return samples.spread(tokens, key(system, precision), "per_s").median

    def ratio(tokens: int, precision: str, other: str) -> float:
        """Our texts per second in a precision, divided by those of the peer's faster way in another."""
        best = max(THEIRS, key=lambda system: per_s(tokens, system, other))
        return samples.ratio(tokens, key(OURS, precision), key(best, other), "per_s").median

    cells = [(tokens, precision) for precision in PRECISIONS for tokens in LOADS]
    return {
        "samples": samples,
        "columns": [f"{precision}, {LOADS[tokens]}" for tokens, precision in cells],
        "rates": {system: [per_s(tokens, system, each) for tokens, each in cells] for system in (OURS, *THEIRS)},
        "ratios": [ratio(tokens, each, each) for tokens, each in cells],
        "int8_over": {other: [ratio(tokens, "INT8", other) for tokens in LOADS] for other in PRECISIONS},
    }


def _servers(models: Path, folder: Path, python: Path) -> dict[str, ServerProcess]:
    """Both sides of a ratio are neighbors."""
    cores = available_cpus()
    found: dict[str, ServerProcess] = {}
    for precision, file in PRECISIONS.items():
        found[key(OURS, precision)] = BertServer(models, precision.lower(), cores, "--default-timeout-ms", _PATIENCE_MS)
        for system, batch in THEIRS.items():
            [port] = free_ports(1)
            command = [str(python), "-m", "uvicorn", "sparse_encoder_app:app", "--app-dir", str(_INSIDE)]
            command += ["--host", HOST, "--port", str(port), "--workers", str(cores), "--no-access-log"]
            # The client waits for the last replies on all connections.
            command += ["--loop", "uvloop", "--http", "httptools", "--timeout-keep-alive", "60"]
            variables = {"FOLDER": str(folder), "FILE": file, "BATCH": str(batch), "HF_HUB_OFFLINE": "1"}
            found[key(system, precision)] = ServerProcess(command, isolated(variables), (port, "/ready"))
    return found
