"""Engines that prove artifacts: the same as for serving."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from bertserve.serving.engine.base import EngineLoad, InlineEngine
from bertserve.serving.engine.gpu import discovery
from bertserve.serving.engine.kinds import engine_for
from bertserve.serving.engine.process.worker import open_backend

if TYPE_CHECKING:
    from bertserve.serving.engine.base import Engine
    from bertserve.serving.engine.specs import ModelSpec
    from bertserve.serving.models.manifest import Artifact, Target

_look = cache(discovery.look)

MAX_TOKENS = 4096
"""Tokens of a batch on a GPU: 32 texts of 128 tokens."""


def open_engine(spec: ModelSpec, target: Target, threads: int) -> Engine:
    """An engine in this process that runs one artifact.

    Args:
        spec: The artifact. Set `batch_invariant`, so that one wide lane takes padding and batches.
        target: The target of the artifact.
        threads: Cores to use.

    Raises:
        BundleError: The artifact does not load, or differs from the specification.
    """
    engine = engine_for(target)
    load = EngineLoad(engine.name, [spec], threads, max_batch_tokens=MAX_TOKENS)
    return InlineEngine(open_backend(load)[0])


def gpu_obstacle(artifact: Artifact) -> str | None:
    """Why no GPU here can run an artifact for GPUs; None if one can."""
    machine = _look()
    if machine.problem:
        return machine.problem
    library = machine.libraries["ort-cuda" if artifact.engine is None else artifact.engine.flavour]
    if artifact.target != "cuda" and artifact.target != machine.gpus[0].target:
        return f"it is for {artifact.target}, and this {machine.gpus[0].name} is {machine.gpus[0].target}"
    return library.problem or None
