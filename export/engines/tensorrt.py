"""TensorRT engines: ahead of time for another GPU, or on the local GPU.

Two flavors of one API. TensorRT for RTX builds for a named target without a GPU and compiles its kernels at load time;
the enterprise library times its kernels on the local GPU. Both take the fp16 graph before the fusions of ONNX Runtime
(see `half`), or that graph with explicit quantization (see `qdq`), and fuse themselves.
"""

from __future__ import annotations

import signal
import subprocess
from itertools import takewhile
from typing import TYPE_CHECKING

import msgspec

from bertserve.export.engines import free_space
from bertserve.export.engines.tensorrt_builder import Answer, Build, Done, Failed, Step
from bertserve.export.errors import ExportError, NoRoomError
from bertserve.serving.engine.children import module_command
from bertserve.serving.engine.specs import DATA_SUFFIX, EngineBuild, ShapeProfile
from bertserve.serving.host import available_cpus
from bertserve.serving.models.manifest import GPUS, Artifact
from bertserve.serving.models.verified_dir import digest
from bertserve.serving.scheduling.cost import BUCKETS, bucket_for

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bertserve.serving.models.manifest import Precision, Target

NATIVE = "native"
CAPABILITIES = {"t4": "SM75", "sm75": "SM75", "sm80": "SM80", "sm86": "SM86", "sm89": "SM89", "sm120": "SM120"}
"""Targets of builds ahead of time."""
TARGETS = (*CAPABILITIES, NATIVE)
"""Targets of engines."""
GRAPH = "graph"
"""No engine, but the graph from which each node builds its own later, without PyTorch."""

LARGEST_TOP_K = 3840
"""The most numbers that TensorRT chooses of a row."""

MAX_BATCH = 32
_OPTIMAL_BATCH = 4
WORKSPACE_BYTES = 2 << 30
"""A T4 has 16 GB, for every model and every lane."""

_MIB = 1 << 20
_MEMORY_BYTES, _MEMORY_FACTOR = 400 * _MIB, 4.5
"""Memory of a build with six profiles; measured for fp16 graphs of 43, 208 and 637 MiB: 491, 1113 and 2699 MiB."""
_DISK_BYTES, _DISK_FACTOR = 64 * _MIB, 1.2
"""Size of the engine; measured for the same: 70, 252 and 717 MiB."""


def profiles(max_length: int) -> tuple[ShapeProfile, ...]:
    """One optimization profile per sequence bucket, up to the bucket of the longest text.

    The sequence length is fixed in each: an engine for 16 tokens was measured a third faster than one for 16 to 128.
    Batches have 1 to `MAX_BATCH` texts.
    """
    last = min(bucket_for(max_length), max_length)
    lengths = [*takewhile(lambda bucket: bucket < last, BUCKETS), last]
    return tuple(ShapeProfile((1, length), (_OPTIMAL_BATCH, length), (MAX_BATCH, length)) for length in lengths)


def build(
    graph: Path,
    engine: Path,
    target: str,
    *,
    max_length: int,
    count: Callable[[int, int], None],
    timing_cache: Path | None = None,
) -> Done:
    """Builds an engine in a separate process, and leaves no file if it fails.

    Args:
        graph: Before ONNX Runtime's fusions, in fp16 or quantized; with inputs [batch, sequence], or [batch, masks] (up
            to `tensorrt_builder.MAX_MASKS`).
        engine: The file to write.
        target: One of `TARGETS`.
        max_length: Tokens of the longest text.
        count: Called with the percentage and 100.
        timing_cache: For `native`: measurements of earlier builds on this GPU; read if it exists, and written.

    Raises:
        ExportError: The engine cannot be built: why, and what to do.
    """
    if target not in TARGETS:
        raise ExportError(f"unknown TensorRT target {target!r}; supported: {', '.join(TARGETS)}")
    size = graph_bytes(graph)
    free_space.check(
        f"building {engine.name}",
        memory_bytes=int(_MEMORY_BYTES + _MEMORY_FACTOR * size),
        folder=engine.parent,
        disk_bytes=int(_DISK_BYTES + _DISK_FACTOR * size),
    )
    partial = engine.with_name(f"{engine.name}.partial")
    order = Build(
        flavour="enterprise" if target == NATIVE else "rtx",
        graph=str(graph),
        engine=str(partial),
        capability=CAPABILITIES.get(target),
        profiles=profiles(max_length),
        workspace_bytes=WORKSPACE_BYTES,
        threads=available_cpus(),
        timing_cache=None if timing_cache is None else str(timing_cache),
    )
    try:
        done = _run(order, f"the TensorRT engine for {target} cannot be built", count)
        partial.replace(engine)
    finally:
        partial.unlink(missing_ok=True)
    return done


def artifact(build: EngineBuild, file: Path, precision: Precision = "fp16") -> Artifact:
    """The manifest's entry of an engine that was not compared with PyTorch yet."""
    return Artifact(
        file=file.name,
        precision=precision,
        target=target_of(build.compute_capability),
        sha256=digest(file),
        size_bytes=file.stat().st_size,
        batch_invariant=False,
        parity=None,
        invariance=None,
        operators={},
        engine=build,
    )


def graph_bytes(graph: Path) -> int:
    """The size of a graph with its weights."""
    beside = graph.with_name(f"{graph.name}{DATA_SUFFIX}")
    return graph.stat().st_size + (beside.stat().st_size if beside.exists() else 0)


def target_of(compute_capability: str) -> Target:
    """The target of a compute capability: `7.5` is `sm75`.

    Raises:
        ExportError: There is no such target.
    """
    wanted = f"sm{compute_capability.replace('.', '')}"
    for target in GPUS:
        if target == wanted:
            return target
    raise ExportError(f"the engine is for compute capability {compute_capability}, which the server does not support")


def _run(order: Build, subject: str, count: Callable[[int, int], None]) -> Done:
    command = module_command("bertserve.export.engines.tensorrt_builder", msgspec.json.encode(order).decode())
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        try:
            answer = _last_answer(process, count)
        finally:
            process.kill()
    if isinstance(answer, Done):
        return answer
    if answer is None and process.returncode == -signal.SIGKILL:
        raise NoRoomError(
            f"{subject}: the system killed the builder, probably for lack of memory; free some, or give the"
            " container more memory"
        )
    raise ExportError(f"{subject}: {answer.reason if answer else _death(process.returncode)}")


def _last_answer(process: subprocess.Popen[bytes], count: Callable[[int, int], None]) -> Done | Failed | None:
    """The last answer of the process; None if it dies without one."""
    for line in process.stdout or ():
        answer: Answer = msgspec.json.decode(line, type=Answer)
        if not isinstance(answer, Step):
            return answer
        count(answer.percent, 100)
    process.wait()
    return None


def _death(code: int) -> str:
    """What the end of a process without an answer means."""
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}"
    return f"the TensorRT process ended {how}; please report this with the model's config.json"
