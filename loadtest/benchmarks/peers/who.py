"""The compared servers: ours and popular alternatives, each in its best configuration.

`Subject` is a system with an engine over a protocol, `Kit` holds the parts of the servers.
"""

from __future__ import annotations

import hashlib
import subprocess
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bertserve.loadtest.benchmarks.peers.triton import TritonModel, TritonServer
from bertserve.loadtest.benchmarks.runner import Benchmark, Option
from bertserve.loadtest.benchmarks.server_process import HOST, BertServer, ServerProcess, free_ports, isolated
from bertserve.loadtest.errors import BenchError
from bertserve.loadtest.generator.client import GRPC
from bertserve.loadtest.generator.workload import find_bundle
from bertserve.serving.host import available_cpus

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from bertserve.loadtest.generator.workload import Bundle

ONE, MANY = 1, 32
"""Connections at which latency and throughput are measured."""

ORT, OPENVINO, TORCH, BEST = "ORT INT8", "OpenVINO INT8", "PyTorch fp32", "best of both INT8"
ENGINES = {"ort-cpu": ORT, "cpu": BEST, "openvino": OPENVINO}
"""Our engines, as in `--engine`."""

DYNAMIC, DYNAMIC_BATCHED = "ORT dynamic INT8", "ORT dynamic INT8, batched"
"""ONNX Runtime with the file of its own tool, the alternative to our export. `DYNAMIC` runs one text at a time, because
its answers depend on the batch (docs/design/int8.md); `DYNAMIC_BATCHED` batches all the same, as Triton does."""

TRITON, TRITON_PLAIN = "Triton", "Triton, no batcher"
"""`TRITON_PLAIN` is an untuned Triton: a single-threaded instance per core, one text at a time."""

HTTP, V2, GRPC_NAME = "HTTP", "HTTP v2", "gRPC"
"""V2 is the Open Inference Protocol with binary tensors; HTTP is a server's own route, with JSON."""

OURS = "ours-"
"""Prefix of our servers' names, before the engine."""
_INFINITY = (
    "{environments}/infinity/bin/infinity_emb v2 --model-id . --served-model-name {model} --engine {engine}"
    # Its ONNX engine does not read the pooling from the model and would take the first token's vector.
    " --device cpu --pooling-method mean --no-bettertransformer --log-level warning --host {host} --port {port}"
)
_QUIET = {
    "DO_NOT_TRACK": "1",
    "INFINITY_ANONYMOUS_USAGE_STATS": "0",
    "HF_HUB_OFFLINE": "1",
    "HF_HOME": "{environments}/hub",
}
_FASTAPI = (
    "{environments}/fastapi/bin/python -m uvicorn --app-dir {inside} fastapi_app:app --host {host} --port {port}"
    " --no-access-log --loop uvloop --http httptools"
)
_FILES = {"ARTIFACT": "{artifact}", "TOKENIZER": "{tokenizer}", "THREADS": "{threads}"}
_PROGRAMS: dict[str, tuple[str, str, Mapping[str, str], str]] = {
    "infinity-torch": (_INFINITY.replace("{engine}", "torch"), "/health", _QUIET, "checkpoint"),
    "infinity-onnx": (_INFINITY.replace("{engine}", "optimum"), "/health", _QUIET, "infinity-model"),
    "fastapi": (_FASTAPI, "/ready", _FILES, "."),
}
"""For each server: command line, readiness path, variables, and working directory in the environments. infinity finds
its model in that directory: it turns a full path into one that its ONNX engine does not find."""
SERVERS = (*(f"{OURS}{option}" for option in ENGINES), "triton", *_PROGRAMS)

TRITON_WAYS = {"one": (1, False), "plain": (1, False), "apart": (8, False), "many": (8, True), "padded": (4, True)}
"""Maximum batch of Triton's dynamic batcher, and whether it is computed as one batch. `one` is an instance on all
cores; the others have a single-threaded instance per core."""
CLOSED_LOOP = {
    "ort": ("one", "many", "plain"),
    "dynamic": ("one", "apart", "many"),
    "openvino": ("one", "many", "plain"),
}
"""Triton's models by artifact: the fastest for one connection and for many whose answers do not depend on the batch
(docs/benchmarks/decisions.md), and those shown beside them."""
OPEN_LOOP = {"ort": ("plain", "apart", "padded"), "openvino": ("plain", "apart")}
QUEUE_MS = 125
"""Queue limit of Triton in the open loop, where clients wait for 250 ms. Two limits were tried, the whole deadline and
half of it; half gave more answers in time."""
_LENGTH_STEP = 16
"""OpenVINO prepares its kernels for each new length, so Triton's model pads mixed lengths to multiples of this."""

_PACKAGES = {
    "triton": ("nvidia-pytriton", "numpy", "onnxruntime", "openvino", "tokenizers"),
    "infinity": ("infinity_emb", "torch", "transformers", "sentence-transformers", "optimum-onnx", "onnxruntime"),
    "fastapi": ("fastapi", "uvicorn", "onnxruntime", "tokenizers"),
}


class Subject(NamedTuple):
    """One system with one engine over one protocol.

    Attributes:
        system: The server.
        engine: The engine.
        protocol: The protocol; empty for the raw engine.
        server: The process that answers, one of `SERVERS`; empty for the raw engine.
        form: The client's form of request.
        endpoints: The path of HTTP or the model of gRPC, at `ONE` connection and at `MANY`: a server whose best
            configuration differs between the two gets both.
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
        """Name of its samples at this number of connections."""
        return f"{self.name} {connections}"

    def endpoint(self, connections: int) -> str:
        return self.endpoints[connections != ONE]


RAW = Subject("raw engine", ORT, "", "", "", ("wide", "narrow"))
"""Ways of the raw engine that `loadtest.benchmarks.raw_engine` knows."""


def subjects(model: str) -> tuple[Subject, ...]:
    """All subjects in the order of a round; the two sides of a ratio are neighbors."""
    found = [RAW]
    triton = partial(_triton, model)
    for option, engine in ENGINES.items():
        ours = f"{OURS}{option}"
        theirs = {
            ORT: (("ort", ORT, "many"), ("dynamic", DYNAMIC, "apart")),
            OPENVINO: (("openvino", OPENVINO, "many"),),
        }
        found += [
            Subject("bertserve", engine, HTTP, ours, "embed", ("/embed", "/embed")),
            Subject("bertserve", engine, V2, ours, "v2", _infer(model, model)),
            *(triton(*tuned, V2) for tuned in theirs.get(engine, ())),
            *(triton(kind, its, "plain", V2, TRITON_PLAIN) for kind, its, _ in theirs.get(engine, ())[:1]),
            Subject("bertserve", engine, GRPC_NAME, ours, GRPC, (model, model)),
            *(triton(*tuned, GRPC_NAME) for tuned in theirs.get(engine, ())),
        ]
    found += [
        triton("dynamic", DYNAMIC_BATCHED, "many", V2),
        Subject("FastAPI", ORT, HTTP, "fastapi", "embed", ("/embed", "/embed-threads")),
        Subject("infinity", ORT, HTTP, "infinity-onnx", "openai", ("/embeddings", "/embeddings")),
        Subject("infinity", TORCH, HTTP, "infinity-torch", "openai", ("/embeddings", "/embeddings")),
    ]
    return tuple(found)


def _triton(model: str, kind: str, engine: str, many: str, protocol: str, system: str = TRITON) -> Subject:
    models = (f"{model}-{kind}-one", f"{model}-{kind}-{many}")
    form, endpoints = (GRPC, models) if protocol == GRPC_NAME else ("v2", _infer(*models))
    return Subject(system, engine, protocol, "triton", form, endpoints)


def _infer(one: str, many: str) -> tuple[str, str]:
    return f"/v2/models/{one}/infer", f"/v2/models/{many}/infer"


def find(model: str, system: str, engine: str, protocol: str) -> Subject:
    """The subject of that system, engine and protocol."""
    [found] = [subject for subject in subjects(model) if subject[:3] == (system, engine, protocol)]
    return found


@dataclass(slots=True, frozen=True)
class Kit:
    """The parts of the servers.

    Attributes:
        models: Our model repository.
        bundles: The bundle with the INT8 artifact `ort`, `openvino`, or `dynamic`, which ONNX Runtime's tool made.
        environments: A virtual environment for each peer, and infinity's copies of the model.
        threads: Cores for each server.
    """

    models: Path
    bundles: Mapping[str, Bundle]
    environments: Path
    threads: int

    @classmethod
    def of(cls, models: Path, environments: Path) -> Kit:
        """Collects the parts; raises BenchError if the repository lacks an artifact of one of the engines."""
        ort, openvino = (find_bundle(models, "int8", target) for target in ("cpu", "openvino"))
        dynamic = replace(ort, artifact=environments / "dynamic.onnx")
        bundles = {"ort": ort, "openvino": openvino, "dynamic": dynamic}
        return cls(models, bundles, environments.absolute(), available_cpus())

    @property
    def ort(self) -> Bundle:
        return self.bundles["ort"]

    def server(self, name: str, kinds: Mapping[str, Sequence[str]] = CLOSED_LOOP, queue_ms: int = 0) -> ServerProcess:
        """The server of that name, one of `SERVERS`; the other arguments configure Triton, as in `triton_models`."""
        if name.startswith(OURS):
            return BertServer(self.models, "int8", self.threads, "--engine", name.removeprefix(OURS))
        if name == "triton":
            work = self.environments / f"work-triton{'-open' if queue_ms else ''}"
            return TritonServer(self.environments / "triton", work, triton_models(self, kinds, queue_ms))
        command, ready, variables, folder = _PROGRAMS[name]
        [port] = free_ports(1)
        values = {
            "environments": self.environments,
            "inside": Path(__file__).parent / "inside",
            "model": self.ort.model,
            "artifact": self.ort.artifact.absolute(),
            "tokenizer": self.ort.path.absolute() / "tokenizer.json",
            "threads": self.threads,
            "host": HOST,
            "port": port,
        }
        words = [word.format(**values) for word in command.split()]
        environment = isolated({name: value.format(**values) for name, value in variables.items()})
        return ServerProcess(words, environment, (port, ready), self.environments / folder)


def triton_models(kit: Kit, kinds: Mapping[str, Sequence[str]], queue_ms: int = 0) -> Iterator[TritonModel]:
    """`<model>-<artifact>-<way>` for each artifact and its ways; `queue_ms` for texts of mixed lengths."""
    for kind, ways in kinds.items():
        engine = "openvino" if kind == "openvino" else "onnxruntime"
        multiple = _LENGTH_STEP if queue_ms and kind == "openvino" else 1
        for way in ways:
            bundle, (batch, together) = kit.bundles[kind], TRITON_WAYS[way]
            lanes = (1, kit.threads) if way == "one" else (kit.threads, 1)
            yield TritonModel(
                f"{bundle.model}-{kind}-{way}", engine, bundle, *lanes, batch, together, multiple, queue_ms
            )


ENVIRONMENTS = Option(
    "--environments", Path("build/peers"), "Directory of the peers' environments (default: %(default)s)."
)


def versions_in(environment: Path, packages: Sequence[str]) -> dict[str, str]:
    """The versions of packages in an environment, as its own interpreter reports them.

    Raises:
        BenchError: It is not installed.
    """
    code = "import importlib.metadata as m, sys; print(*[m.version(name) for name in sys.argv[1:]])"
    python = environment / "bin" / "python"
    if not python.exists():
        made = f"make build/peers/{environment.name}/.installed"
        raise BenchError(f"{environment} is no virtual environment; make it with `{made}`")
    shown = subprocess.run([python, "-c", code, *packages], check=True, capture_output=True, text=True)
    return dict(zip(packages, shown.stdout.split(), strict=True))


class PeerBenchmark(Benchmark):
    """A benchmark over the environments that `make bench-peers` installs."""

    models = "build/peers/models"
    own = (ENVIRONMENTS,)

    @cached_property
    def kit(self) -> Kit:
        return Kit.of(self.options.models, self.options.environments)

    def model_facts(self) -> dict[str, str]:
        files = (self.kit.ort.artifact, self.kit.bundles["openvino"].artifact)
        digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
        return {"model": self.kit.ort.model, "version": str(self.kit.ort.version), **digests}

    def versions(self) -> dict[str, dict[str, str]]:
        """A step: the installed packages of each peer."""
        return {name: versions_in(self.options.environments / name, packages) for name, packages in _PACKAGES.items()}
