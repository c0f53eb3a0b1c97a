"""The CUDA layer, on a driver that is made up and on the machine's own where it has none."""

from __future__ import annotations

import inspect
import re
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from bertserve.serving.engine.base import DeviceLost
from bertserve.serving.engine.gpu import cuda_driver
from bertserve.serving.engine.gpu.cuda import Buffer, Device
from bertserve.serving.engine.gpu.cuda_driver import CudaError, Driver
from bertserve.serving.engine.gpu.model import GraphBudget
from tests.support.gpus import without_gpu
from tests.support.simulated.cuda.bindings import driver as simulated

if TYPE_CHECKING:
    from tests.support.simulated.cuda.bindings.driver import Machine


@pytest.fixture
def machine() -> Machine:
    return simulated.reset()


@pytest.fixture
def device(machine: Machine) -> Device:
    assert machine.gpus
    return Device(Driver(simulated), 0)


def functions() -> list[str]:
    return [name for name in vars(simulated) if re.match("cu[A-Z]", name)]


@pytest.mark.parametrize("name", functions())
def test_the_simulated_driver_takes_what_the_real_bindings_take(name: str) -> None:
    """Each function exists in NVIDIA's bindings, with as many parameters."""
    real = pytest.importorskip("cuda.bindings.driver")
    said = (getattr(real, name).__doc__ or "").splitlines()[0]
    taken = [word for word in re.sub(r".*\((.*)\).*", r"\1", said).split(",") if word.strip()]
    names = [word.split(":")[0].split()[-1] for word in taken]
    ours = list(inspect.signature(getattr(simulated, name)).parameters)
    assert [word.lower() for word in names] == [word.lower() for word in ours]


def test_every_call_of_the_layer_is_simulated() -> None:
    """And so compared with the real bindings: nothing is called that a test has never seen."""
    called = set(re.findall(r'"(cu[A-Z]\w+)"', inspect.getsource(cuda_driver)))
    assert called | {"cuGetErrorName"} == set(functions())


@without_gpu
def test_a_machine_without_a_driver_says_so() -> None:
    """The real bindings, on this machine: one sentence with what to do, and no trace of Python's."""
    with pytest.raises(CudaError) as error:
        cuda_driver.load()
    assert error.value.code == cuda_driver.NO_DRIVER
    assert "no NVIDIA driver found" in cuda_driver.explained(error.value)
    assert "run this on the machine with the GPU" in cuda_driver.explained(error.value)


@pytest.mark.parametrize(
    ("status", "words"),
    [(100, "finds no GPU (CUDA error 100)"), (803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (CUDA error 803)")],
)
def test_a_driver_that_does_not_start_says_why(status: int, words: str) -> None:
    """No GPU, or a driver whose parts are of several versions."""
    simulated.reset(f'{{"init": {status}}}')
    with pytest.raises(CudaError) as error:
        Driver(simulated)
    assert words in cuda_driver.explained(error.value)


def test_what_the_driver_says_of_cards() -> None:
    """Name, identity, compute capability and memory of each that may be used, and the newest CUDA."""
    gpus = (
        '[{"name": "Tesla T4", "capability": [7, 5], "memory": 16}, {"name": "B", "capability": [8, 9], "memory": 5}]'
    )
    simulated.reset(f'{{"driver": 12040, "gpus": {gpus}}}')
    driver = Driver(simulated)
    assert driver.version() == (12, 4)
    first, second = driver.gpus()
    assert (first.ordinal, first.name, first.compute_capability, first.memory_bytes) == (0, "Tesla T4", "7.5", 16)
    assert (second.ordinal, second.uuid) == (1, "GPU-01010101-0101-0101-0101-010101010101")


def test_numbers_come_back_once_somebody_has_waited(device: Device) -> None:
    """Copies are queued: before the wait nothing has happened, after it all has, and only what was asked for."""
    there = Buffer(device, "int32", 6)
    there.view((2, 3))[...] = [[1, 2, 3], [4, 5, 6]]
    there.send((2, 3))
    device.wait()
    there.view((6,))[...] = 0
    there.fetch((2, 2))
    assert there.view((6,)).tolist() == [0] * 6
    device.wait()
    assert there.view((6,)).tolist() == [1, 2, 3, 4, 0, 0]


def test_a_graph_does_again_what_was_written_down(device: Device) -> None:
    """Nothing runs while it is captured; each launch then reads what lies at the addresses by then."""
    buffer = Buffer(device, "float32", 2)

    def work() -> None:
        buffer.send((2,))
        simulated.give(device.stream, lambda: double(buffer.address))
        buffer.fetch((2,))

    buffer.view((2,))[...] = 1
    graph = device.capture(work)
    device.wait()
    assert buffer.view((2,)).tolist() == [1, 1]
    for expected in (2, 4, 8):
        device.launch(graph)
        device.wait()
        assert buffer.view((2,)).tolist() == [expected] * 2


def double(address: int) -> None:
    values: Any = np.frombuffer(simulated.MACHINE.memory[address], np.float32)
    values *= 2


def test_a_capture_that_breaks_leaves_the_stream_usable(machine: Machine, device: Device) -> None:
    """What the work raised goes on to the caller, and the next capture succeeds."""

    def broken() -> None:
        raise KeyError("no such shape")

    with pytest.raises(KeyError):
        device.capture(broken)
    graph = device.capture(lambda: None)
    device.launch(graph)
    device.wait()
    assert list(machine.graphs) == [graph]


def test_a_thread_without_the_card_is_refused_until_it_enters(device: Device) -> None:
    """A GPU is a thread's own: what serves is not what loaded."""
    seen: list[object] = []

    def work() -> None:
        try:
            device.wait()
        except CudaError as error:
            seen.append(error.name)
        device.enter()
        device.wait()
        seen.append("fine")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == ["CUDA_ERROR_INVALID_CONTEXT", "fine"]


def test_scratch_memory_is_one(machine: Machine, device: Device) -> None:
    """It grows to the largest that is asked for, and holds nothing beside that."""
    before = machine.used
    small, large = device.scratch(1000), device.scratch(5000)
    assert device.scratch(10) == large != small
    assert machine.used - before == 5000


def test_no_room_on_the_card_is_said_with_numbers(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    """What was wanted and what is free; the error is known for what it is."""
    with pytest.raises(CudaError) as error:
        device.allocate(2 << 30)
    assert error.value.out_of_memory
    assert not error.value.sticky
    assert "out of GPU memory: 2048 MiB needed, 1024 MiB of 1024 free" in caplog.text


@pytest.mark.parametrize("status", [214, 700, 719])
def test_an_error_that_stays_loses_the_device(machine: Machine, device: Device, status: int) -> None:
    """The driver's number says so, and so does every later call."""
    machine.fail["cuStreamSynchronize"] = status
    with pytest.raises(CudaError) as error:
        device.wait()
    assert error.value.sticky
    with pytest.raises(DeviceLost, match=f"CUDA error {status}"):
        device.check("a library's word", lost=False)


def test_an_error_that_passes_loses_nothing(machine: Machine, device: Device) -> None:
    """A bad argument is that call's own business."""
    machine.fail["cuMemAlloc"] = 1
    with pytest.raises(CudaError, match="cuMemAlloc: CUDA_ERROR_INVALID_VALUE") as error:
        device.allocate(1)
    assert not error.value.sticky
    device.check(str(error.value), lost=False)


@pytest.mark.parametrize(
    ("limit", "share", "expected"),
    [
        # Each is counted by what the GPU has less afterwards; the next one must fit too.
        (10_000, 4000, 2),
        # Whatever they may take, a twentieth of the GPU stays free for what libraries take while they run.
        (1 << 40, (1 << 30) // 10, 9),
    ],
)
def test_graphs_stop_where_their_memory_ends(
    machine: Machine, device: Device, limit: int, share: int, expected: int
) -> None:
    """At their limit, or where the GPU would have too little left."""
    budget = GraphBudget(device, limit=limit)
    machine.graph_bytes = share
    made = 0
    while budget.allows:
        free, _ = device.driver.memory()
        device.capture(lambda: None)
        budget.spend(free)
        made += 1
    assert (made, budget.used) == (expected, expected * share)
    assert machine.total - machine.used > machine.total / 20
