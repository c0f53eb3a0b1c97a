"""The engine process: loads the models, warms them up and runs one batch a lane at a time.

It is started with inherited sockets: the control socket, then one for each lane. It ends when the server's end of any
of them closes, so that no orphan holds the device. It ignores signals that a terminal or a service manager sends to the
whole group: the server decides when it ends.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import signal
import socket
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Literal, NoReturn, TypeVar

import msgspec

from serving import logs
from serving.engine.base import DeviceLost, LaneKind, lanes_for
from serving.engine.batches import OneByOne
from serving.engine.cpu.backend import CpuBackend
from serving.engine.fake import FakeBackend, Fault
from serving.engine.gpu import cuda_driver
from serving.engine.gpu.cuda import Device
from serving.engine.process.warm_up import warm_up
from serving.engine.process.wire import (
    Channel,
    Kind,
    Load,
    Ready,
    Refused,
    WireError,
    pack,
    pack_result,
    unpack_run,
)
from serving.errors import BundleError, EngineFault
from serving.host import installing
from serving.records import OFF_THE_CPU

if TYPE_CHECKING:
    from collections.abc import Callable

    from serving.engine.base import Backend, Runner
    from serving.engine.gpu.model import BackendModel
    from serving.records import Batch, ModelSpec

log = logging.getLogger("bertserve.engine")

DEVICE_LOST = 70
"""Exit status where the device works no more in this process; EX_SOFTWARE of sysexits.h."""

_NO_MEMORY = re.compile("bad_alloc|failed to allocate memory|out.of.memory", re.IGNORECASE)
"""Libraries have no class of errors for it, only words: the C++ library's, ONNX Runtime's, CUDA's."""

_SPIN_S = 0.0005
"""For which the wide lane looks for a lone client's next request: it must read its answer and send that."""

T = TypeVar("T")


def main(descriptors: list[int], verify: Callable[[list[tuple[str, str]]], None]) -> None:
    """Serves until the server closes a socket; does not return.

    Args:
        descriptors: File descriptors of the control socket and of as many lane sockets as there can be.
        verify: Verifies `Load.bundles`; raises BundleError where one must not be served.
    """
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    control, *lanes = [Channel(socket.socket(fileno=descriptor)) for descriptor in descriptors]
    load = msgspec.json.decode(_until_the_end(lambda: bytes(control.receive()[3])), type=Load)
    writer = logs.start(load.log_format, "info")
    try:
        if load.bundles:
            verify(load.bundles)
            # Only now may it take memory for a model.
            _until_the_end(lambda: control.send(pack(Kind.VERIFIED, b"")))
            _until_the_end(control.receive)
        backend, ready = prepare(load)
    except BundleError as error:
        refused = Refused(str(error))
        if _lacked_memory(error):
            log.error("%s", error)  # noqa: TRY400  says it all
            refused = Refused("there was not enough memory for it", passing=True)
        answer = pack(Kind.REFUSED, msgspec.json.encode(refused))
        _until_the_end(lambda: control.send(answer))
        writer.flush()
        os._exit(1)
    except DeviceLost as lost:
        _end_without(lost)
    if load.engine in OFF_THE_CPU:
        lanes[0].spin_s = _SPIN_S
    for lane, kind in enumerate(backend.lanes()):
        runner = OneByOne(backend.runner(lane), load.models)
        nice = load.nice if kind is LaneKind.NARROW else 0
        threading.Thread(target=_serve, args=(lanes[lane], runner, nice), daemon=True).start()
    _until_the_end(lambda: control.send(pack(Kind.READY, msgspec.json.encode(ready))))
    _until_the_end(control.receive)
    log.error("an unexpected frame on the control socket")
    writer.flush()
    os._exit(1)


def _end_without(lost: DeviceLost) -> NoReturn:
    log.error("the device is lost: %s", lost)
    for handler in logging.root.handlers:
        handler.flush()
    os._exit(DEVICE_LOST)


def _lacked_memory(error: BaseException | None) -> bool:
    """Whether models were refused because there was no room for them now."""
    while error is not None:
        if _NO_MEMORY.search(str(error)):
            return True
        error = error.__cause__
    return False


def _until_the_end(speak: Callable[[], T]) -> T:
    """Speaks with the server; when the server has ended, this process ends."""
    try:
        return speak()
    except (EOFError, WireError, OSError):
        os._exit(0)


def prepare(load: Load) -> tuple[Backend, Ready]:
    """Loads and warms every model; raises BundleError where an artifact cannot be served."""
    backend, version = open_backend(load)
    costs = warm_up(backend, load.models, load.costs, load.max_batch_tokens)
    if isinstance(backend, CpuBackend):
        costs = backend.labelled(costs)
    _trim()
    lanes = list(backend.lanes())
    return backend, Ready(backend.name, lanes, load.threads, version, costs, list(backend.padded_to))


def _trim() -> None:
    """Gives back what loading and measuring have freed, as far as the C library can: 110 MB of 550 at a first start."""
    with suppress(AttributeError):  # of glibc alone
        ctypes.CDLL(None).malloc_trim(0)


def open_backend(load: Load) -> tuple[Backend, str]:
    """The engine with its models, and the version of its library; a library is imported where it is used."""
    if load.engine == "fake":
        faults = {token: Fault(fault) for token, fault in load.fake_faults.items()}
        return FakeBackend(load.models, load.threads, load.fake_ms, faults, load.fake_batch_ms, load.fake_token_us), ""
    if load.engine in {"tensorrt", "ort-cuda"}:
        return _gpu(load)
    if load.engine in {"ort-cpu", "cpu"}:
        from serving.engine.parts import loading  # noqa: PLC0415

        load_model = partial(loading.load, nice=load.nice)
    if load.engine == "ort-cpu":
        from serving.engine.cpu import ort  # noqa: PLC0415

        return ort.OrtCpuBackend(load.models, load.threads, load_model), ort.VERSION
    try:
        from serving.engine.cpu.openvino import VERSION, OpenVinoBackend  # noqa: PLC0415
    except ModuleNotFoundError:
        message = f"the engine {load.engine} is not installed: {installing('openvino')}"
        raise BundleError(message) from None
    if load.engine == "cpu":
        from serving.engine.cpu import best  # noqa: PLC0415

        backend = best.BestCpuBackend(load.models, load.threads, load.costs, load.kernels, load_model)
        return backend, best.VERSION
    return OpenVinoBackend(load.models, load.threads), VERSION


def _gpu(load: Load) -> tuple[Backend, str]:
    """An engine on a GPU; what cannot be had of the GPU refuses the models."""
    try:
        device = Device(cuda_driver.load(), load.gpus[0] if load.gpus else 0)
        load_split = partial(_load_split, load, device)
        if load.engine == "tensorrt":
            from serving.engine.gpu.tensorrt import TensorRtBackend  # noqa: PLC0415

            backend = TensorRtBackend(load.models, device, load.max_batch_tokens, load.kernels, load_split)
            return backend, backend.version
        from serving.engine.gpu.ort_cuda import VERSION, OrtCudaBackend  # noqa: PLC0415

        return OrtCudaBackend(load.models, device, load.max_batch_tokens, load_split), VERSION
    except cuda_driver.CudaError as error:
        raise BundleError(f"the engine {load.engine} cannot run here: {cuda_driver.explained(error)}") from error
    except ModuleNotFoundError as error:
        message = f"the engine {load.engine} is not installed ({error}): {installing('gpu')}"
        raise BundleError(message) from error


def _load_split(load: Load, device: Device, model: ModelSpec) -> BackendModel:
    """A model split by layers, whose first part is on this process's device."""
    from serving.engine.parts import devices  # noqa: PLC0415  needs ONNX Runtime
    from serving.engine.parts.processes import Place  # noqa: PLC0415  likewise

    engine: Literal["tensorrt", "ort-cuda"] = "tensorrt" if load.engine == "tensorrt" else "ort-cuda"
    gpus = devices.gpus_of(model.stages, load.gpus or [device.gpu.ordinal])
    places = [Place(engine, gpu, load.max_batch_tokens) for gpu in gpus]
    return devices.load(model, places, device, len(lanes_for(load.models, 1)))


def _serve(channel: Channel, runner: Runner, nice: int) -> None:
    # Of this thread alone, as Linux has it. Narrow lanes carry the load that the server must be able to refuse; lone
    # texts run on the wide one, and would only lose by it to whatever else runs on the machine.
    os.nice(nice)
    try:
        while True:
            _, model, number, payload = channel.receive()
            batch = unpack_run(model, payload)
            del payload
            channel.send(_answer(runner, batch, number))
    except (EOFError, WireError, OSError):
        os._exit(0)


def _answer(runner: Runner, batch: Batch, number: int) -> bytes:
    try:
        return pack_result(number, runner.run(batch))
    except EngineFault as fault:
        message = fault.message
    except DeviceLost as lost:
        # Another try here would fail too: the end of the process fails what is under way, and a new process finds the
        # GPU as it was.
        _end_without(lost)
    except Exception:  # the worker loop: whatever a batch provokes costs that batch alone
        log.exception("a batch failed")
        message = "unexpected error in the engine process; its log has the details"
    return pack(Kind.FAULT, message.encode(), batch=number)
