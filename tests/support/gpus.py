"""Whether this machine has a GPU, and a model on one without its graphs."""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.skips import excused

if TYPE_CHECKING:
    from collections.abc import Iterator


def has_driver() -> bool:
    with contextlib.suppress(OSError):
        return bool(ctypes.CDLL("libcuda.so.1"))
    return False


without_gpu = pytest.mark.skipif(has_driver(), reason=excused("says what happens where there is no GPU"))


@contextlib.contextmanager
def without_graphs(model: Any) -> Iterator[None]:
    """A `GpuModel` that queues its work piece by piece; TensorRT for RTX keeps graphs that nobody else sees."""
    holders = [holder for holder in (model, model._program) if hasattr(holder, "_graphs")]
    graphs = [holder._graphs for holder in holders]
    for holder in holders:
        holder._graphs = {}
    try:
        yield
    finally:
        for holder, kept in zip(holders, graphs, strict=True):
            holder._graphs = kept
