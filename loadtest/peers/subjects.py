"""What is compared: the raw engine, our server and the servers that a user would pick instead."""

from __future__ import annotations

from dataclasses import dataclass

from loadtest.peers.client import GRPC

ONE, MANY = 1, 32
"""Connections at which latency and throughput are measured."""

ORT, OPENVINO, TORCH = "ORT INT8", "OpenVINO INT8", "PyTorch fp32"
HTTP, GRPC_NAME = "HTTP", "gRPC"


@dataclass(slots=True, frozen=True)
class Subject:
    """One system with one engine over one protocol.

    Attributes:
        system: Who answers.
        engine: What computes.
        protocol: How it is asked; empty for the raw engine.
        server: The process that answers, one of `SERVERS`; empty for the raw engine.
        form: How the client asks, one of its forms.
        places: The path of HTTP or the model of gRPC, at `ONE` connection and at `MANY`: where a server's best
            configuration differs between the two, it is given both.
    """

    system: str
    engine: str
    protocol: str
    server: str
    form: str
    places: tuple[str, str]

    @property
    def name(self) -> str:
        """What it is called in tables and in the file of samples."""
        return " ".join(filter(None, [self.system, self.engine, self.protocol]))

    def place(self, connections: int) -> str:
        """Where it is asked under so many connections."""
        return self.places[connections != ONE]


SERVERS = ("ours-ort", "ours-openvino", "triton", "infinity-torch", "infinity-onnx", "fastapi")

RAW = Subject("raw engine", ORT, "", "", "", ("wide", "narrow"))
"""Places of the raw engine are the ways that `loadtest.raw` knows."""


def subjects(model: str) -> tuple[Subject, ...]:
    """Everything that is compared, in the order of a round: what is put into a ratio stands side by side.

    Args:
        model: Its name, the same on every server that has names.
    """
    found = [RAW]
    for engine, ours, name in ((ORT, "ours-ort", "ort"), (OPENVINO, "ours-openvino", "openvino")):
        models = (f"{model}-{name}-one", f"{model}-{name}-many")
        paths = (f"/v2/models/{models[0]}/infer", f"/v2/models/{models[1]}/infer")
        found += [
            Subject("bertserve", engine, HTTP, ours, "embed", ("/embed", "/embed")),
            Subject("Triton", engine, HTTP, "triton", "v2", paths),
            Subject("bertserve", engine, GRPC_NAME, ours, GRPC, (model, model)),
            Subject("Triton", engine, GRPC_NAME, "triton", GRPC, models),
        ]
    found += [
        Subject("FastAPI", ORT, HTTP, "fastapi", "embed", ("/embed", "/embed-threads")),
        Subject("infinity", ORT, HTTP, "infinity-onnx", "openai", ("/embeddings", "/embeddings")),
        Subject("infinity", TORCH, HTTP, "infinity-torch", "openai", ("/embeddings", "/embeddings")),
    ]
    return tuple(found)


def find(model: str, system: str, engine: str, protocol: str) -> Subject:
    """The subject of that system, engine and protocol."""
    [found] = [
        subject
        for subject in subjects(model)
        if (subject.system, subject.engine, subject.protocol) == (system, engine, protocol)
    ]
    return found
