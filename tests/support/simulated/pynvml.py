"""NVIDIA's management library without a GPU: what a T4 at its power limit tells.

A test compares the names and parameters with those of the real module. `free` in `SIMULATED_GPU` is the memory that
nobody has.
"""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

NVML_TEMPERATURE_GPU = 0
NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2

UUIDS = {"GPU-00000000-0000-0000-0000-000000000000", "GPU-01010101-0101-0101-0101-010101010101"}


class NVMLError(Exception):
    """The library says no."""


def nvmlInit() -> None:
    """Starts."""


def nvmlDeviceGetHandleByUUID(uuid: str) -> Any:
    if uuid not in UUIDS:
        raise NVMLError("Not Found")
    return SimpleNamespace(uuid=uuid)


def nvmlDeviceGetUtilizationRates(handle: Any) -> Any:
    """In percent."""
    assert handle.uuid in UUIDS
    return SimpleNamespace(gpu=87, memory=30)


def nvmlDeviceGetMemoryInfo(handle: Any, version: Any = None) -> Any:
    """In bytes."""
    del version
    assert handle.uuid in UUIDS
    free = json.loads(os.environ.get("SIMULATED_GPU", "{}")).get("free", 13 << 30)
    return SimpleNamespace(total=16 << 30, used=(16 << 30) - free, free=free)


def nvmlDeviceGetPowerUsage(handle: Any) -> int:
    """In milliwatts."""
    assert handle.uuid in UUIDS
    return 69_500


def nvmlDeviceGetEnforcedPowerLimit(handle: Any) -> int:
    """In milliwatts."""
    assert handle.uuid in UUIDS
    return 70_000


def nvmlDeviceGetTotalEnergyConsumption(handle: Any) -> int:
    """In millijoules; not every GPU counts it."""
    raise NVMLError(f"Not Supported: {handle.uuid}")


def nvmlDeviceGetTemperature(handle: Any, sensor: int) -> int:
    """In degrees Celsius."""
    assert handle.uuid in UUIDS
    assert sensor == NVML_TEMPERATURE_GPU
    return 71


def nvmlDeviceGetClockInfo(handle: Any, type: int) -> int:  # noqa: A002  as the real one calls it
    """In MHz."""
    assert handle.uuid in UUIDS
    return {NVML_CLOCK_SM: 900, NVML_CLOCK_MEM: 5000}[type]


def nvmlDeviceGetCurrentClocksThrottleReasons(handle: Any) -> int:
    """Power cap."""
    assert handle.uuid in UUIDS
    return 0x4
