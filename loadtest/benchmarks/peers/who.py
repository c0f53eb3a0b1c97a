"""Who is compared: our server and those that a user would pick instead, each configured at its best.

`Subject` is a system with an engine over a protocol, `Peer` a process that answers, `Kit` what they are made from.
"""

from __future__ import annotations

import hashlib
import subprocess
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from loadtest.benchmarks.peers.triton import TritonModel, TritonServer, isolated
from loadtest.benchmarks.runner import Benchmark, Option
from loadtest.benchmarks.server_process import HOST, BertServer, ServerProcess, free_ports
from loadtest.errors import BenchError
from loadtest.generator.client import GRPC
from loadtest.generator.workload import find_bundle
from serving.host import available_cpus

if TYPE_CHECKING:
    from loadtest.benchmarks.store import Store
    from loadtest.generator.workload import Bundle

ONE, MANY = 1, 32
"""Connections at which latency and throughput are measured."""

ORT, OPENVINO, TORCH, BEST = "ORT INT8", "OpenVINO INT8", "PyTorch fp32", "best of both INT8"
ENGINES = {"ort-cpu": ORT, "cpu": BEST, "openvino": OPENVINO}
"""Our engines as `--engine` has them."""

DYNAMIC, DYNAMIC_BATCHED = "ORT dynamic INT8", "ORT dynamic INT8, batched"
"""ONNX Runtime with the file of its own tool, which is what one has without our export; one text at a time, since in
company it answers another thing (docs/int8.md), and in batches all the same, as a Triton that is told nothing does."""

TRITON, TRITON_PLAIN = "Triton", "Triton, no batcher"
"""The second is what one has before one tunes it: a single-threaded instance a core, one text at a time."""

HTTP, V2, GRPC_NAME = "HTTP", "HTTP v2", "gRPC"
"""V2 is the Open Inference Protocol with binary tensors; HTTP is a server's own route, with JSON."""

TRITON_BATCH = 8
"""Texts that Triton's dynamic batcher may put together where that is tried."""
QUEUE_MS = 125
"""Triton's clients of the open loop wait for 250 ms. Of the two limits on its queue that were tried, the whole and the
half of that, the half gave more answers in time."""
LENGTH_STEP = 16
"""OpenVINO prepares its kernels for each length that it meets, so Triton's model pads to multiples of this."""

CACHED, OURS = "-cached", "ours-"
"""What the names of servers with a cache of answers end with, and what ours begin with; the engine follows."""
SERVERS = (*(f"{OURS}{option}" for option in ENGINES), "triton", "infinity-torch", "infinity-onnx", "fastapi")

_PACKAGES = {
    "triton": ("nvidia-pytriton", "numpy", "onnxruntime", "openvino", "tokenizers"),
    "infinity": ("infinity_emb", "torch", "transformers", "sentence-transformers", "optimum-onnx", "onnxruntime"),
    "fastapi": ("fastapi", "uvicorn", "onnxruntime", "tokenizers"),
}


class Subject(NamedTuple):
    """One system with one engine over one protocol.

    Attributes:
        system: Who answers.
        engine: What computes.
        protocol: How it is asked; empty for the raw engine.
        server: The process that answers, one of `SERVERS`; empty for the raw engine.
        form: How the client asks, one of its forms.
        endpoints: The path of HTTP or the model of gRPC, at `ONE` connection and at `MANY`: where a server's best
            configuration differs between the two, it is given both.
    """

    system: str
    engine: str
    protocol: str
    server: str
    form: str
    endpoints: tuple[str, str]

    @property
    def name(self) -> str:
        return " ".join(filter(None, [self.system, self.engine, self.protocol]))

    def key(self, connections: int) -> str:
        """The name of its samples under so many connections."""
        return f"{self.name} {connections}"

    def endpoint(self, connections: int) -> str:
        return self.endpoints[connections != ONE]


RAW = Subject("raw engine", ORT, "", "", "", ("wide", "narrow"))
"""Places of the raw engine are the ways that `loadtest.benchmarks.raw_engine` knows."""


def subjects(model: str) -> tuple[Subject, ...]:
    """Everything that is compared, in the order of a round: what is put into a ratio stands side by side."""
    found = [RAW]
    triton = partial(_triton, model)
    for option, engine in ENGINES.items():
        theirs = {ORT: {ORT: "ort", DYNAMIC: "dynamic"}, OPENVINO: {OPENVINO: "openvino"}}.get(engine, {})
        ours, same = f"{OURS}{option}", [name for its, name in theirs.items() if its == engine]
        found += [
            Subject("bertserve", engine, HTTP, ours, "embed", ("/embed", "/embed")),
            Subject("bertserve", engine, V2, ours, "v2", _infer(model, model)),
            *(triton(its, name, V2) for its, name in theirs.items()),
            *(triton(engine, name, V2, "plain", TRITON_PLAIN) for name in same),
            Subject("bertserve", engine, GRPC_NAME, ours, GRPC, (model, model)),
            *(triton(its, name, GRPC_NAME) for its, name in theirs.items()),
        ]
    found += [
        triton(DYNAMIC_BATCHED, "dynamic", V2, "batched"),
        Subject("FastAPI", ORT, HTTP, "fastapi", "embed", ("/embed", "/embed-threads")),
        Subject("infinity", ORT, HTTP, "infinity-onnx", "openai", ("/embeddings", "/embeddings")),
        Subject("infinity", TORCH, HTTP, "infinity-torch", "openai", ("/embeddings", "/embeddings")),
    ]
    return tuple(found)


def _triton(model: str, engine: str, name: str, protocol: str, many: str = "many", system: str = TRITON) -> Subject:
    models = (f"{model}-{name}-one", f"{model}-{name}-{many}")
    form, endpoints = (GRPC, models) if protocol == GRPC_NAME else ("v2", _infer(*models))
    return Subject(system, engine, protocol, "triton", form, endpoints)


def _infer(one: str, many: str) -> tuple[str, str]:
    return f"/v2/models/{one}/infer", f"/v2/models/{many}/infer"


def find(model: str, system: str, engine: str, protocol: str) -> Subject:
    """The subject of that system, engine and protocol."""
    [found] = [subject for subject in subjects(model) if subject[:3] == (system, engine, protocol)]
    return found


class Peer(NamedTuple):
    """A server that is not started yet, and where it listens; 0: nowhere."""

    process: ServerProcess
    http_port: int
    grpc_port: int = 0


@dataclass(slots=True, frozen=True)
class Kit:
    """What the servers are made from.

    Attributes:
        models: The model repository of ours.
        ort: The bundle with the INT8 artifact for ONNX Runtime.
        openvino: The same bundle with the INT8 artifact for OpenVINO.
        dynamic: The same with what ONNX Runtime's own tool makes of its fp32 artifact.
        environments: Holds a virtual environment for each peer, and infinity's copies of the model.
        threads: Cores that each may use.
    """

    models: Path
    ort: Bundle
    openvino: Bundle
    dynamic: Bundle
    environments: Path
    threads: int

    @classmethod
    def of(cls, models: Path, environments: Path) -> Kit:
        """What is there to compare; raises BenchError where the repository lacks an artifact of one of the engines."""
        ort, openvino = (find_bundle(models, "int8", target) for target in ("cpu", "openvino"))
        dynamic = replace(ort, artifact=environments / "dynamic.onnx")
        return cls(models, ort, openvino, dynamic, environments, available_cpus())

    def facts(self) -> dict[str, str]:
        """What is served, by its digests."""
        files = (self.ort.artifact, self.openvino.artifact)
        digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
        return {"model": self.ort.model, "version": str(self.ort.version), **digests}

    def peer(self, name: str) -> Peer:
        """The server of that name, one of `SERVERS`."""
        if name.startswith(OURS):
            return self._ours(name.removeprefix(OURS))
        if name == "triton":
            return self._triton("work-triton", triton_models(self))
        return self._fastapi() if name == "fastapi" else self._infinity("torch" if "torch" in name else "optimum")

    def open_loop_peer(self, name: str, cache_mb: int) -> Peer:
        """The same for texts of mixed lengths; a name that ends with `CACHED` gets a cache of answers of that size."""
        plain = name.removesuffix(CACHED)
        cache_mb = 0 if plain == name else cache_mb
        if plain.startswith(OURS):
            return self._ours(plain.removeprefix(OURS), *(("--response-cache-mb", str(cache_mb)) if cache_mb else ()))
        if plain == "triton":
            return self._triton(f"work-open-{name}", open_loop_models(self, cached=bool(cache_mb)), cache_mb)
        return self.peer(name)

    def triton_model(self, name: str, kind: str, instances: int, threads: int, **more: Any) -> TritonModel:  # noqa: ANN401  its own fields
        """A model of the artifact `kind`, called `<model>-<name>`; the rest as `TritonModel` has it."""
        bundle: Bundle = getattr(self, kind)
        engine, tokenizer = "openvino" if kind == "openvino" else "onnxruntime", bundle.path / "tokenizer.json"
        made = partial(TritonModel, f"{bundle.model}-{name}", engine, bundle.artifact, tokenizer, bundle.hidden_size)
        return made(instances, threads, max_tokens=bundle.max_length, **more)

    def _triton(self, work: str, models: list[TritonModel], cache_mb: int = 0) -> Peer:
        server = TritonServer(self.environments / "triton", self.environments / work, models, cache_mb)
        return Peer(server, server.http_port, server.grpc_port)

    def _ours(self, engine: str, *options: str) -> Peer:
        server = BertServer(self.models, "int8", self.threads, "--engine", engine, *options)
        return Peer(server, server.http_port, server.grpc_port)

    def _infinity(self, engine: str) -> Peer:
        [port] = free_ports(1)
        command = [
            str((self.environments / "infinity").absolute() / "bin" / "infinity_emb"),
            # Relative to where it runs: of a model's full path it makes a path that its ONNX engine does not find.
            *("v2", "--model-id", ".", "--served-model-name", self.ort.model, "--engine", engine, "--device", "cpu"),
            # Its ONNX engine does not read the pooling from the model and takes the first token's vector otherwise.
            *("--pooling-method", "mean", "--no-bettertransformer", "--log-level", "warning"),
            *("--host", HOST, "--port", str(port)),
        ]
        quiet = {"DO_NOT_TRACK": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0", "HF_HUB_OFFLINE": "1"}
        variables = {**quiet, "HF_HOME": str((self.environments / "hub").absolute())}
        folder = self.environments / ("infinity-model" if engine == "optimum" else "checkpoint")
        return Peer(ServerProcess(command, isolated(variables), (port, "/health"), folder), port)

    def _fastapi(self) -> Peer:
        [port] = free_ports(1)
        command = [
            str((self.environments / "fastapi").absolute() / "bin" / "python"),
            *("-m", "uvicorn", "--app-dir", str(Path(__file__).parent / "inside"), "fastapi_app:app"),
            *("--host", HOST, "--port", str(port), "--no-access-log", "--loop", "uvloop", "--http", "httptools"),
        ]
        files = {"ARTIFACT": self.ort.artifact, "TOKENIZER": self.ort.path / "tokenizer.json"}
        variables = {name: str(file.absolute()) for name, file in files.items()} | {"THREADS": str(self.threads)}
        return Peer(ServerProcess(command, isolated(variables), (port, "/ready")), port)


def triton_models(kit: Kit) -> list[TritonModel]:
    """The models for one connection and for many, as `subjects` names them.

    `one` and `many` are the fastest that answer the same in every company (docs/benchmarks/decisions.md).
    """
    found = []
    for kind in ("ort", "dynamic", "openvino"):
        single = partial(kit.triton_model, kind=kind, instances=kit.threads, threads=1)
        found.append(kit.triton_model(f"{kind}-one", kind, 1, kit.threads))
        if kind == "dynamic":
            found.append(single(f"{kind}-many", batch=TRITON_BATCH))
            found.append(single(f"{kind}-batched", batch=TRITON_BATCH, together=True))
        else:
            found.append(single(f"{kind}-many", batch=TRITON_BATCH, together=True))
            found.append(single(f"{kind}-plain"))
    return found


def open_loop_models(kit: Kit, *, cached: bool) -> list[TritonModel]:
    """Triton's ways to serve texts of mixed lengths, each with a single-threaded instance a core.

    `KIND-single` computes the texts one by one, `KIND-ragged` has the dynamic batcher hand an instance several, which
    it computes one after the other, and `KIND-padded` computes those as one batch.
    """
    found = []
    for kind, multiple in (("ort", 1), ("openvino", LENGTH_STEP)):
        made = partial(kit.triton_model, kind=kind, instances=kit.threads, threads=1)
        queued: dict[str, Any] = {"multiple": multiple, "queue_ms": QUEUE_MS, "cached": cached}
        found.append(made(f"{kind}-single", **queued))
        if not cached:
            found.append(made(f"{kind}-ragged", batch=TRITON_BATCH, **queued))
        if not cached and kind == "ort":
            found.append(made(f"{kind}-padded", batch=TRITON_BATCH // 2, together=True, **queued))
    return found


class PeerBenchmark(Benchmark):
    """A benchmark over the environments that `make bench-peers` installs."""

    models = "build/peers/models"
    own = (Option("--environments", Path("build/peers"), "the peers' environments (%(default)s)"),)

    @cached_property
    def kit(self) -> Kit:
        return Kit.of(self.options.models, self.options.environments)

    def model_facts(self) -> dict[str, str]:
        return self.kit.facts()

    def versions(self) -> dict[str, dict[str, str]]:
        """What is installed for each peer, package by package: a step."""
        return {name: _versions(self.options.environments / name, packages) for name, packages in _PACKAGES.items()}


def versions_of(store: Store) -> dict[str, str]:
    """The same as facts of a page."""
    return {
        name: ", ".join(f"{package} {version}" for package, version in versions.items())
        for name, versions in store.steps["versions"].items()
    }


def _versions(environment: Path, packages: tuple[str, ...]) -> dict[str, str]:
    """The versions in another environment, as its own interpreter reports them."""
    python = environment / "bin" / "python"
    if not python.exists():
        raise BenchError(f"{environment} is no virtual environment; make it with `make bench-peers`")
    code = "import importlib.metadata as m, sys; print(*[m.version(name) for name in sys.argv[1:]])"
    shown = subprocess.run([python, "-c", code, *packages], check=True, capture_output=True, text=True)
    return dict(zip(packages, shown.stdout.split(), strict=True))
