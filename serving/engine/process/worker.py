"""The engine process: loads the models, warms them up and runs one batch per lane at a time.

It inherits its sockets: the control socket, then one for each lane. It ends when the server's end of any of them
closes, so no orphan holds the device. It ignores signals that a terminal or a service manager sends to the whole group:
the server decides when it ends.
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
from typing import TYPE_CHECKING, NoReturn, TypeVar

import msgspec

from bertserve.serving import logs
from bertserve.serving.engine.base import DeviceLost, EngineLoad, LaneKind
from bertserve.serving.engine.batches import OneByOne
from bertserve.serving.engine.cpu.backend import CpuBackend
from bertserve.serving.engine.kinds import ENGINES
from bertserve.serving.engine.process.warm_up import warm_up
from bertserve.serving.engine.process.wire import (
    Channel,
    Kind,
    Ready,
    Refused,
    WireError,
    pack,
    pack_result,
    unpack_run,
)
from bertserve.serving.errors import BundleError, EngineFault
from bertserve.serving.host import can_busy_wait, installing

if TYPE_CHECKING:
    from collections.abc import Callable

    from bertserve.serving.engine.base import Backend, Batch, Runner

log = logging.getLogger("bertserve.engine")

DEVICE_LOST = 70
"""Exit status if the device no longer works in this process; EX_SOFTWARE of sysexits.h."""

_NO_MEMORY = re.compile("bad_alloc|failed to allocate memory|out.of.memory", re.IGNORECASE)
"""Out-of-memory messages of the C++ library, ONNX Runtime and CUDA, which have no error class for it."""

_SPIN_S = 0.0005
"""Seconds that the wide lane polls for a single client's next request: the client reads its result and sends again."""

T = TypeVar("T")


def main(descriptors: list[int], verify: Callable[[list[tuple[str, str]]], None]) -> None:
    """Serves until the server closes a socket; does not return.

    Args:
        descriptors: File descriptors of the control socket and of the maximum number of lane sockets.
        verify: Verifies `EngineLoad.bundles`; raises BundleError if one must not be served.
    """
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    control, *lanes = [Channel(socket.socket(fileno=descriptor)) for descriptor in descriptors]
    load = msgspec.json.decode(_until_the_end(lambda: bytes(control.receive()[3])), type=EngineLoad)
    writer = logs.start(load.log_format, "info")
    try:
        if load.bundles:
            verify(load.bundles)
        backend, ready = prepare(load)
    except BundleError as error:
        refused = Refused(str(error))
        if _lacked_memory(error):
            log.error("%s", error)  # noqa: TRY400  the message is enough
            refused = Refused("out of memory", passing=True)
        answer = pack(Kind.REFUSED, msgspec.json.encode(refused))
        _until_the_end(lambda: control.send(answer))
        writer.flush()
        os._exit(1)
    except DeviceLost as lost:
        _end_without(lost)
    if ENGINES[load.engine].spares_cpu and can_busy_wait():
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
    """Whether models were refused because memory was short."""
    while error is not None:
        if _NO_MEMORY.search(str(error)):
            return True
        error = error.__cause__
    return False


def _until_the_end(speak: Callable[[], T]) -> T:
    """Communicates with the server, and ends this process if the server has ended."""
    try:
        return speak()
    except (EOFError, WireError, OSError):
        os._exit(0)


def prepare(load: EngineLoad) -> tuple[Backend, Ready]:
    """Loads and warms up every model; raises BundleError if an artifact cannot be served."""
    backend, version = open_backend(load)
    costs = warm_up(backend, load.models, load.costs, load.max_batch_tokens)
    if isinstance(backend, CpuBackend):
        costs = backend.labelled(costs)
        backend.trim()
    _trim()
    lanes = list(backend.lanes())
    return backend, Ready(load.engine, lanes, load.threads, version, costs, list(backend.padded_to))


def _trim() -> None:
    """Releases memory that was freed after loading, as far as the C library can: 110 MB of 550 at a first start."""
    with suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def open_backend(load: EngineLoad) -> tuple[Backend, str]:
    """Opens the engine with its models; returns it with its library's version. Raises BundleError on failure."""
    engine = ENGINES[load.engine]
    try:
        return engine.open(load)
    except ModuleNotFoundError as error:
        message = f"the engine {load.engine} is not installed ({error}): {installing(engine.extra)}"
        raise BundleError(message) from error


def _serve(channel: Channel, runner: Runner, nice: int) -> None:
    # On Linux this affects the calling thread alone. Narrow lanes carry the load that the server must be able to
    # reject. Single texts run on the wide lane, which would only lose time to other processes on the machine.
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
        # A retry here would fail too. The end of the process fails all batches in flight, and a new process starts
        # with a clean GPU.
        _end_without(lost)
    except Exception:  # the worker loop: an error fails only its own batch
        log.exception("a batch failed")
        message = "unexpected error in the engine process; its log has the details"
    return pack(Kind.FAULT, message.encode(), batch=number)
