"""Who is compared where texts of mixed lengths arrive at random, and how each is asked."""

from __future__ import annotations

from dataclasses import dataclass

from loadtest.benchmarks.peers.servers import CACHED, OURS
from loadtest.benchmarks.peers.subjects import ENGINES, OPENVINO, ORT
from loadtest.benchmarks.server_process import HOST
from loadtest.generator.messages import Target

DEADLINE_MS = 250
"""What the clients allow; an answer that took longer is good for nobody."""

SHARES = (0.2, 0.6, 1.0, 1.5, 2.0)
"""Offered rates, of the texts a second that ours answers with the same engine to a few clients in a closed loop."""

JUDGED_SHARES = TAIL_SHARE, OVERLOAD_SHARE = 0.6, 1.5

ZIPF_SHARES = (2.0,)
"""The same of what ours carries of texts that do not repeat."""

CACHE_MB = 64
KNOWN_TEXTS = 500
"""So many of the most frequent texts are asked for before a server with a cache is measured."""

_ENDPOINTS = {"fastapi": ("http", "/embed-threads"), "infinity-onnx": ("openai", "/embeddings")}


@dataclass(slots=True, frozen=True)
class Entrant:
    """Who is asked.

    Attributes:
        name: In tables and in the file of the figures.
        engine: One of the names of `subjects`.
        server: The process that answers, as `servers.open_loop_peer` calls it.
        model: What the name of Triton's model ends with.
        shares: The rates at which it is asked.
    """

    name: str
    engine: str
    server: str
    model: str = ""
    shares: tuple[float, ...] = SHARES

    @property
    def is_ours(self) -> bool:
        return self.server.startswith(OURS)

    @property
    def takes_deadlines(self) -> bool:
        """Whether it reads v2's parameter `timeout`."""
        return self.server not in _ENDPOINTS

    def target(self, port: int, model: str) -> Target:
        """How it is asked at a port for a model."""
        if endpoint := _ENDPOINTS.get(self.server):
            protocol, path = endpoint
            return Target(protocol, HOST, port, model, endpoint=path)
        return Target("v2", HOST, port, f"{model}-{self.model}" if self.model else model, timeout_ms=DEADLINE_MS)


def groups() -> dict[str, list[Entrant]]:
    """Who is compared at the same rates, by the engine of ours that sets them; ours in front."""
    ours: dict[str, list[Entrant]] = {ORT: [], OPENVINO: []}
    for option, engine in ENGINES.items():
        ours[ORT if engine == ORT else OPENVINO].append(Entrant(f"bertserve, {option}", engine, f"{OURS}{option}"))
    return {
        ORT: [
            *ours[ORT],
            *_tritons("ORT", ORT, "ort", JUDGED_SHARES),
            Entrant("Triton, ORT, padded batches", ORT, "triton", "ort-padded", JUDGED_SHARES),
        ],
        OPENVINO: [
            *ours[OPENVINO],
            *_tritons("OpenVINO", OPENVINO, "openvino", SHARES),
            Entrant("FastAPI, ORT", ORT, "fastapi"),
            Entrant("infinity, ORT", ORT, "infinity-onnx"),
        ],
    }


def _tritons(name: str, engine: str, kind: str, shares: tuple[float, ...]) -> list[Entrant]:
    return [
        Entrant(f"Triton, {name}, one by one", engine, "triton", f"{kind}-single"),
        Entrant(f"Triton, {name}, ragged batches", engine, "triton", f"{kind}-ragged", shares),
    ]


REPEATING = (
    Entrant("bertserve, ort-cpu", ORT, f"{OURS}ort-cpu"),
    Entrant("bertserve, ort-cpu, with its cache", ORT, f"{OURS}ort-cpu{CACHED}"),
    Entrant("Triton, ORT, one by one", ORT, "triton", "ort-single"),
    Entrant("Triton, ORT, one by one, with its cache", ORT, f"triton{CACHED}", "ort-single"),
)
"""Who is asked for texts that repeat."""
