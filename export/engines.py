"""The engines that prove artifacts: the very ones that will serve them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving.engine.inline import InlineEngine
from serving.engine.ort import OrtCpuBackend

if TYPE_CHECKING:
    from serving.engine.base import Engine, ModelSpec
    from serving.manifest import Target


def open_engine(spec: ModelSpec, target: Target, threads: int) -> Engine:
    """An engine in this process that runs one artifact.

    Args:
        spec: The artifact. Say `batch_invariant` in it, so that one wide lane takes padding and batches.
        target: What the artifact is made for.
        threads: Cores to use.

    Raises:
        BundleError: The artifact does not load, or is not what the specification says.
    """
    if target != "openvino":
        return InlineEngine(OrtCpuBackend([spec], threads))
    from serving.engine.openvino import OpenVinoBackend  # noqa: PLC0415  an optional library

    return InlineEngine(OpenVinoBackend([spec], threads))
