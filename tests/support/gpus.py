"""Whether this machine has a GPU."""

from __future__ import annotations

import contextlib
import ctypes

import pytest


def has_driver() -> bool:
    """Whether this machine has a GPU's driver."""
    with contextlib.suppress(OSError):
        return bool(ctypes.CDLL("libcuda.so.1"))
    return False


without_gpu = pytest.mark.skipif(has_driver(), reason="says what happens where there is no GPU")
