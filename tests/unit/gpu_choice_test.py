"""What is asked of NVIDIA's libraries beside the driver."""

from __future__ import annotations

import inspect

import pytest

from serving.engine import gpu
from serving.telemetry import catalogue
from serving.telemetry.gpus import THROTTLES, GpuWatch
from tests.support.gpus import without_gpu
from tests.support.simulated import pynvml as simulated

UUID = "GPU-00000000-0000-0000-0000-000000000000"


def test_the_simulated_management_library_takes_what_the_real_one_takes() -> None:
    """Each function that is asked exists in NVIDIA's module, with the same parameters; and so do the constants."""
    real = pytest.importorskip("pynvml")
    names = [name for name in vars(simulated) if name.startswith("nvml")]
    assert len(names) > 8
    for name in names:
        if name != "nvmlInit":
            ours, theirs = (inspect.signature(getattr(module, name)).parameters for module in (simulated, real))
            assert list(ours) == list(theirs), name
    for name in ("NVML_TEMPERATURE_GPU", "NVML_CLOCK_SM", "NVML_CLOCK_MEM"):
        assert getattr(simulated, name) == getattr(real, name)
    bits = {
        "power_cap": real.nvmlClocksEventReasonSwPowerCap,
        "hardware": real.nvmlClocksThrottleReasonHwSlowdown,
        "software_thermal": real.nvmlClocksEventReasonSwThermalSlowdown,
        "hardware_thermal": real.nvmlClocksThrottleReasonHwThermalSlowdown,
        "power_brake": real.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
    }
    assert bits == THROTTLES


def test_every_metric_of_a_card_is_asked_for() -> None:
    """And what a card cannot tell has no sample."""
    watch = GpuWatch(simulated, [UUID])
    watch.ask()
    samples = {metric.name: watch.reader(metric)() for metric in catalogue.GPU}
    assert samples.pop("nv_energy_consumption") == {}
    assert all(samples.values())
    assert all(len(labels) == len(metric.labels) for metric in catalogue.GPU for labels in watch.reader(metric)())


def test_a_card_that_is_not_there_is_an_error_of_the_library() -> None:
    """The server then goes on without these metrics."""
    with pytest.raises(simulated.NVMLError):
        GpuWatch(simulated, ["GPU-elsewhere"])


@without_gpu
def test_looking_for_cards_where_there_are_none() -> None:
    """The very process that a server asks, on this machine."""
    found = gpu.look()
    assert found.cards == ()
    assert not found.broken
    assert "no NVIDIA driver is in use here" in found.problem


def test_a_driver_that_does_not_answer_is_not_waited_for() -> None:
    """Whoever asks goes on, and says why there is no GPU."""
    found = gpu.look(limit_s=0.001)
    assert found.broken
    assert "the NVIDIA driver does not answer within 0.001 s" in found.problem
