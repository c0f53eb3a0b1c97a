"""The servers that are compared, each configured as its users would at its best."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from loadtest.benchmarks.peers.triton import TritonModel, TritonServer, isolated
from loadtest.benchmarks.server_process import HOST, BertServer, ServerProcess, free_ports
from loadtest.generator.workload import find_bundle
from serving.host import available_cpus

if TYPE_CHECKING:
    from loadtest.generator.workload import Bundle

TRITON_BATCH = 8
"""Texts that Triton's dynamic batcher may put together where that is tried."""

QUEUE_MS = 125
"""Triton's clients of the open loop wait for 250 ms. What it keeps queued for so long is late: of the two limits that
were tried, the whole and the half, the half gave more answers in time."""

LENGTH_STEP = 16
"""OpenVINO prepares its kernels for each length that it meets, so Triton's model pads to multiples of this."""

CACHED = "-cached"
"""What the name of a server with a cache of answers ends with."""

OURS = "ours-"
"""What the names of our servers begin with; the engine follows."""

KINDS = ("ort", "dynamic", "openvino")
"""What Triton is given: our artifact for each engine, and what ONNX Runtime's own tool makes."""


@dataclass(slots=True, frozen=True)
class Peer:
    """A server and where it listens.

    Attributes:
        process: Not started yet.
        http_port: Of HTTP.
        grpc_port: Of gRPC; 0 where it has none.
    """

    process: ServerProcess
    http_port: int
    grpc_port: int = 0


@dataclass(slots=True, frozen=True)
class Kit:
    """What the servers are made from.

    Attributes:
        models: The model repository of ours.
        ort: The bundle with the INT8 artifact for ONNX Runtime.
        openvino: The bundle with the INT8 artifact for OpenVINO; both are the same bundle.
        dynamic: The bundle with what ONNX Runtime's own tool makes of its fp32 artifact.
        environments: Holds a virtual environment for each peer, and infinity's copies of the model.
        threads: Cores that each may use.
    """

    models: Path
    ort: Bundle
    openvino: Bundle
    dynamic: Bundle
    environments: Path
    threads: int

    def facts(self) -> dict[str, str]:
        """What is served, by its digests."""
        digests = {
            bundle.artifact.name: hashlib.sha256(bundle.artifact.read_bytes()).hexdigest()
            for bundle in (self.ort, self.openvino)
        }
        return {"model": self.ort.model, "version": str(self.ort.version), **digests}


def kit_of(models: Path, environments: Path) -> Kit:
    """What is there to compare.

    Raises:
        BenchError: The repository lacks an INT8 artifact of one of the engines.
    """
    ort, openvino = (find_bundle(models, "int8", target) for target in ("cpu", "openvino"))
    dynamic = replace(ort, artifact=environments / "dynamic.onnx")
    return Kit(models, ort, openvino, dynamic, environments, available_cpus())


def peer(kit: Kit, name: str) -> Peer:
    """The server of that name, one of `subjects.SERVERS`.

    Raises:
        BenchError: Its environment is not there.
    """
    match name:
        case _ if name.startswith(OURS):
            return _ours(kit, name.removeprefix(OURS))
        case "triton":
            triton = TritonServer(kit.environments / "triton", kit.environments / "work-triton", triton_models(kit))
            return Peer(triton, triton.http_port, triton.grpc_port)
        case "infinity-torch":
            return _infinity(kit, "torch")
        case "infinity-onnx":
            return _infinity(kit, "optimum")
        case "fastapi":
            return _fastapi(kit)
        case other:
            raise ValueError(other)


def triton_models(kit: Kit) -> list[TritonModel]:
    """The models for one connection and for many, as `subjects` names them.

    `one` and `many` are the fastest that answer the same in every company (docs/benchmarks/decisions.md).
    """
    found = []
    for kind in KINDS:
        single = partial(triton_model, kit, kind=kind, instances=kit.threads, threads=1)
        found.append(triton_model(kit, f"{kind}-one", kind, instances=1, threads=kit.threads))
        if kind == "dynamic":
            found.append(single(f"{kind}-many", batch=TRITON_BATCH))
            found.append(single(f"{kind}-batched", batch=TRITON_BATCH, together=True))
        else:
            found.append(single(f"{kind}-many", batch=TRITON_BATCH, together=True))
            found.append(single(f"{kind}-plain"))
    return found


def open_loop_peer(kit: Kit, name: str, cache_mb: int) -> Peer:
    """The server of that name for texts of mixed lengths: `ours-ENGINE`, `triton`, either with `-cached`, or a peer.

    Args:
        kit: What it is made from.
        name: Of the server.
        cache_mb: MiB of a cache of answers, where the name asks for one.

    Raises:
        BenchError: Its environment is not there.
    """
    plain = name.removesuffix(CACHED)
    cache_mb = 0 if plain == name else cache_mb
    if plain.startswith(OURS):
        cache = ("--response-cache-mb", str(cache_mb)) if cache_mb else ()
        return _ours(kit, plain.removeprefix(OURS), *cache)
    if plain != "triton":
        return peer(kit, name)
    models = open_loop_models(kit, cached=bool(cache_mb))
    triton = TritonServer(kit.environments / "triton", kit.environments / f"work-open-{name}", models, cache_mb)
    return Peer(triton, triton.http_port, triton.grpc_port)


def open_loop_models(kit: Kit, *, cached: bool) -> list[TritonModel]:
    """Triton's ways to serve texts of mixed lengths, each with a single-threaded instance a core.

    `KIND-single` computes the texts one by one, `KIND-ragged` has the dynamic batcher hand an instance several, which
    it computes one after the other, and `KIND-padded` computes those as one batch.
    """
    found = []
    for kind in ("ort", "openvino"):
        made = partial(
            triton_model,
            kit,
            kind=kind,
            instances=kit.threads,
            threads=1,
            multiple=LENGTH_STEP if kind == "openvino" else 1,
            queue_ms=QUEUE_MS,
            cached=cached,
        )
        found.append(made(f"{kind}-single"))
        if not cached:
            found.append(made(f"{kind}-ragged", batch=TRITON_BATCH))
        if not cached and kind == "ort":
            found.append(made(f"{kind}-padded", batch=TRITON_BATCH // 2, together=True))
    return found


def triton_model(
    kit: Kit,
    name: str,
    kind: str,
    *,
    instances: int,
    threads: int,
    batch: int = 1,
    together: bool = False,
    multiple: int = 1,
    queue_ms: int = 0,
    cached: bool = False,
) -> TritonModel:
    """A model of one of the `KINDS`, called `<model>-<name>`; the rest as `TritonModel` has it."""
    bundle = {"ort": kit.ort, "dynamic": kit.dynamic, "openvino": kit.openvino}[kind]
    return TritonModel(
        name=f"{bundle.model}-{name}",
        engine="openvino" if kind == "openvino" else "onnxruntime",
        artifact=bundle.artifact,
        tokenizer=bundle.path / "tokenizer.json",
        hidden_size=bundle.hidden_size,
        instances=instances,
        threads=threads,
        batch=batch,
        together=together,
        multiple=multiple,
        max_tokens=bundle.max_length,
        queue_ms=queue_ms,
        cached=cached,
    )


def _ours(kit: Kit, engine: str, *options: str) -> Peer:
    server = BertServer(kit.models, "int8", kit.threads, "--engine", engine, *options)
    return Peer(server, server.http_port, server.grpc_port)


def _infinity(kit: Kit, engine: str) -> Peer:
    [port] = free_ports(1)
    home = kit.environments / "infinity"
    command = [
        str(home.absolute() / "bin" / "infinity_emb"),
        # Relative to where it runs: of a model's full path it makes a path that its ONNX engine does not find.
        *("v2", "--model-id", ".", "--served-model-name", kit.ort.model, "--engine", engine, "--device", "cpu"),
        # Its ONNX engine does not read the pooling from the model and takes the first token's vector otherwise.
        *("--pooling-method", "mean", "--no-bettertransformer", "--log-level", "warning"),
        *("--host", HOST, "--port", str(port)),
    ]
    variables = {
        "DO_NOT_TRACK": "1",
        "INFINITY_ANONYMOUS_USAGE_STATS": "0",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str((kit.environments / "hub").absolute()),
    }
    folder = kit.environments / ("infinity-model" if engine == "optimum" else "checkpoint")
    return Peer(ServerProcess(command, isolated(variables), (port, "/health"), folder), port)


def _fastapi(kit: Kit) -> Peer:
    [port] = free_ports(1)
    home = (kit.environments / "fastapi").absolute()
    command = [
        str(home / "bin" / "python"),
        *("-m", "uvicorn", "--app-dir", str(Path(__file__).parent / "inside"), "fastapi_app:app"),
        *("--host", HOST, "--port", str(port), "--no-access-log", "--loop", "uvloop", "--http", "httptools"),
    ]
    variables = {
        "ARTIFACT": str(kit.ort.artifact.absolute()),
        "TOKENIZER": str((kit.ort.path / "tokenizer.json").absolute()),
        "THREADS": str(kit.threads),
    }
    return Peer(ServerProcess(command, isolated(variables), (port, "/ready")), port)
