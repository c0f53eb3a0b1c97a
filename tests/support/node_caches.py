"""What a node's cache holds, made by hand for tests: the proof of an artifact, and an engine that is only a head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bertserve.serving import host
from bertserve.serving.engine.specs import EngineBuild, ShapeProfile
from bertserve.serving.models import node_cache
from bertserve.serving.models.manifest import Artifact, Invariance, Parity
from bertserve.serving.models.node_cache import CacheWriter, Proof
from bertserve.serving.models.verified_dir import digest
from tests.support.poison import ENGINE, ENGINE_BYTES

if TYPE_CHECKING:
    from pathlib import Path

    from bertserve.serving.models.bundle import Bundle
    from bertserve.serving.models.node_cache import CacheEntry

FP32 = "model.fp32.onnx"
TIMINGS = "tensorrt.timings"


def proof(file: str = FP32) -> Proof:
    return Proof(
        file=file,
        device=host.cpu(),
        libraries=node_cache.libraries_of("cpu"),
        parity=Parity(256, 1e-6, None, None, None, 1.0),
        invariance=Invariance(256, 1e-6, None),
        batch_invariant=True,
    )


def engine(file: Path, max_length: int) -> Artifact:
    """Writes an engine for a T4 that has a head and nothing behind it; what a manifest says of it."""
    file.write_bytes(ENGINE_BYTES)
    profile = ShapeProfile((1, max_length), (4, max_length), (32, max_length))
    return Artifact(
        file=file.name,
        precision="fp16",
        target="sm75",
        sha256=digest(file),
        size_bytes=len(ENGINE_BYTES),
        batch_invariant=False,
        parity=None,
        invariance=None,
        operators={},
        engine=EngineBuild("rtx", "1.7.1.116", "7.5", (profile,)),
    )


def fill(root: Path, bundle: Bundle) -> CacheEntry:
    with CacheWriter(root, bundle.manifest.model, bundle.manifest.version) as writer:
        made = engine(writer.path / ENGINE, bundle.manifest.max_length)
        (writer.path / TIMINGS).write_bytes(b"timings")
        return writer.publish(bundle, proofs={FP32: proof()}, engines=[made], files=[TIMINGS])
