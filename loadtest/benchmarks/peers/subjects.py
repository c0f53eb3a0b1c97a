"""What is compared: the raw engine, our server and the servers that a user would pick instead."""

from __future__ import annotations

from dataclasses import dataclass

from loadtest.generator.client import GRPC

ONE, MANY = 1, 32
"""Connections at which latency and throughput are measured."""

ORT, OPENVINO, TORCH = "ORT INT8", "OpenVINO INT8", "PyTorch fp32"
BEST = "best of both INT8"
ENGINES = {"ort-cpu": ORT, "cpu": BEST, "openvino": OPENVINO}
"""Our engines as `--engine` has them."""

DYNAMIC = "ORT dynamic INT8"
"""ONNX Runtime with the file that its own tool makes, which is what one has without our export; one text at a time,
since in company it answers another thing (../int8.md)."""
DYNAMIC_BATCHED = "ORT dynamic INT8, batched"
"""The same in batches all the same, as a Triton that is told nothing computes it."""

_TRITON_MODELS = {ORT: {ORT: "ort", DYNAMIC: "dynamic"}, OPENVINO: {OPENVINO: "openvino"}}
"""What Triton is asked for beside an engine of ours: engine, and the name of its model."""

TRITON, TRITON_PLAIN = "Triton", "Triton, no batcher"
"""The second is what one has before one tunes it: a single-threaded instance a core, one text at a time."""

HTTP, V2, GRPC_NAME = "HTTP", "HTTP v2", "gRPC"
"""V2 is the Open Inference Protocol with binary tensors; HTTP is a server's own route, with JSON."""


@dataclass(slots=True, frozen=True)
class Subject:
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
        """What it is called in tables and in the file of samples."""
        return " ".join(filter(None, [self.system, self.engine, self.protocol]))

    def key(self, connections: int) -> str:
        """The name of its samples under so many connections."""
        return f"{self.name} {connections}"

    def endpoint(self, connections: int) -> str:
        """Where it is asked under so many connections."""
        return self.endpoints[connections != ONE]


SERVERS = (*(f"ours-{option}" for option in ENGINES), "triton", "infinity-torch", "infinity-onnx", "fastapi")

RAW = Subject("raw engine", ORT, "", "", "", ("wide", "narrow"))
"""Places of the raw engine are the ways that `loadtest.benchmarks.raw_engine` knows."""


def subjects(model: str) -> tuple[Subject, ...]:
    """Everything that is compared, in the order of a round: what is put into a ratio stands side by side.

    Args:
        model: Its name, the same on every server that has names.
    """
    found = [RAW]
    for option, engine in ENGINES.items():
        ours, theirs = f"ours-{option}", _TRITON_MODELS.get(engine, {})
        same = [name for theirs_engine, name in theirs.items() if theirs_engine == engine]
        found += [
            Subject("bertserve", engine, HTTP, ours, "embed", ("/embed", "/embed")),
            Subject("bertserve", engine, V2, ours, "v2", _infer(model, model)),
            *(_triton(model, engine, name, V2) for engine, name in theirs.items()),
            *(_triton(model, engine, name, V2, many="plain", system=TRITON_PLAIN) for name in same),
            Subject("bertserve", engine, GRPC_NAME, ours, GRPC, (model, model)),
            *(_triton(model, engine, name, GRPC_NAME) for engine, name in theirs.items()),
        ]
    found.append(_triton(model, DYNAMIC_BATCHED, "dynamic", V2, many="batched"))
    found += [
        Subject("FastAPI", ORT, HTTP, "fastapi", "embed", ("/embed", "/embed-threads")),
        Subject("infinity", ORT, HTTP, "infinity-onnx", "openai", ("/embeddings", "/embeddings")),
        Subject("infinity", TORCH, HTTP, "infinity-torch", "openai", ("/embeddings", "/embeddings")),
    ]
    return tuple(found)


def _triton(model: str, engine: str, name: str, protocol: str, *, many: str = "many", system: str = TRITON) -> Subject:
    models = (f"{model}-{name}-one", f"{model}-{name}-{many}")
    form, endpoints = (GRPC, models) if protocol == GRPC_NAME else ("v2", _infer(*models))
    return Subject(system, engine, protocol, "triton", form, endpoints)


def _infer(one: str, many: str) -> tuple[str, str]:
    return f"/v2/models/{one}/infer", f"/v2/models/{many}/infer"


def find(model: str, system: str, engine: str, protocol: str) -> Subject:
    """The subject of that system, engine and protocol."""
    [found] = [
        subject
        for subject in subjects(model)
        if (subject.system, subject.engine, subject.protocol) == (system, engine, protocol)
    ]
    return found
