"""Metrics of the GPUs in use from NVIDIA's management library (NVML), under Triton's names.

A thread polls every other second and a scrape shows the last answer: polling may take milliseconds, and a driver in
trouble does not answer at all. Numbers that a GPU does not report, or reported too long ago, have no sample.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from serving.host import installing
from serving.telemetry import catalogue
from serving.telemetry.metrics import Reading

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from prometheus_client import CollectorRegistry

    from serving.telemetry.catalogue import Metric

    Handle = object

log = logging.getLogger("bertserve")

_PERIOD_S = 2.0
_STALE_S = 5 * _PERIOD_S
_ANSWER_S = 5.0
"""More than a working driver takes."""

_MILLI = 1e-3
_PERCENT = 1e-2
_MEGA = 1e6

THROTTLES = {
    "power_cap": 0x4,
    "hardware": 0x8,
    "software_thermal": 0x20,
    "hardware_thermal": 0x40,
    "power_brake": 0x80,
}
"""Throttle reasons, as the bits of NVML's `nvmlClocksEventReasons`; idling is none."""

Samples = dict[tuple[str, ...], float]


class GpuWatch:
    def __init__(
        self,
        nvml: Any,  # noqa: ANN401  a module without types
        uuids: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Finds the GPUs by `pynvml`; its `NVMLError` says that there is no library or no such GPU."""
        self._nvml = nvml
        nvml.nvmlInit()
        self._gpus = {uuid: nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids}
        self._clock = clock
        self._samples: dict[str, Samples] = {}
        self._asked_at = -math.inf

    @classmethod
    def follow(cls, uuids: Sequence[str], registry: CollectorRegistry) -> GpuWatch | None:
        """Exports the numbers of these GPUs; None if that is impossible, which is logged."""
        if not uuids:
            return None
        try:
            import pynvml  # noqa: PLC0415  an optional library
        except ModuleNotFoundError:
            log.warning("no GPU metrics: install NVIDIA's management library with %s", installing("gpu"))
            return None
        try:
            watch = cls(pynvml, uuids)
        except pynvml.NVMLError as error:
            log.warning("no GPU metrics: %s", error)
            return None
        for metric in catalogue.GPU:
            Reading(metric, registry, watch.reader(metric))
        threading.Thread(target=watch.run, name="gpus", daemon=True).start()
        return watch

    def run(self) -> None:
        """Polls forever."""
        failed = False
        while True:
            try:
                self.ask()
                failed = False
            except Exception:  # the watch's own loop: what a library never foresaw does not end it
                if not failed:
                    log.exception("cannot read GPU metrics; retrying")
                failed = True
            time.sleep(_PERIOD_S)

    def free_bytes(self, uuid: str) -> int | None:
        """Free memory of a GPU now; None if it does not answer within seconds."""
        answers: SimpleQueue[int] = SimpleQueue()

        def ask() -> None:
            with contextlib.suppress(KeyError, self._nvml.NVMLError):
                answers.put(int(self._nvml.nvmlDeviceGetMemoryInfo(self._gpus[uuid]).free))

        # A daemon thread: a hanging driver must not keep the server from exiting.
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(_ANSWER_S)
        return None if answers.empty() else answers.get()

    def reader(self, metric: Metric) -> Callable[[], Samples]:
        return lambda: self._samples.get(metric.name, {}) if self._clock() < self._asked_at + _STALE_S else {}

    def ask(self) -> None:
        samples: dict[str, Samples] = {metric.name: {} for metric in catalogue.GPU}
        for uuid, handle in self._gpus.items():
            for metric, ask in self._questions(handle):
                with contextlib.suppress(self._nvml.NVMLError):  # not every GPU reports everything
                    answer = ask()
                    values = answer if isinstance(answer, dict) else {(): answer}
                    samples[metric.name] |= {(uuid, *labels): float(value) for labels, value in values.items()}
        self._samples, self._asked_at = samples, self._clock()

    def _questions(self, handle: Handle) -> Sequence[tuple[Metric, Callable[[], float | Samples]]]:
        nvml = self._nvml
        return [
            (catalogue.GPU_UTILIZATION, lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu * _PERCENT),
            (catalogue.GPU_MEMORY_TOTAL, lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total),
            (catalogue.GPU_MEMORY_USED, lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used),
            (catalogue.GPU_POWER, lambda: nvml.nvmlDeviceGetPowerUsage(handle) * _MILLI),
            (catalogue.GPU_POWER_LIMIT, lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) * _MILLI),
            (catalogue.GPU_ENERGY, lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) * _MILLI),
            (catalogue.GPU_TEMPERATURE, lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            (
                catalogue.GPU_CLOCK,
                lambda: {
                    ("sm",): nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM) * _MEGA,
                    ("memory",): nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM) * _MEGA,
                },
            ),
            (catalogue.GPU_THROTTLED, lambda: self._throttled(handle)),
        ]

    def _throttled(self, handle: Handle) -> Samples:
        reasons = self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        return {(name,): float(bool(reasons & bit)) for name, bit in THROTTLES.items()}
