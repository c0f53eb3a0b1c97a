"""NCCL: sums and messages between GPUs, each of which has a process of its own.

It has run on no GPU, only against a library that tests make up; docs/split.md says what it is for. What it relies on is
in NVIDIA's "NCCL User Guide", chapters "Communicator Creation and Management Functions", "Collective Communication
Functions", "Point To Point Communication Functions" and "Types", and in nccl.h: a call puts its work into a stream and
returns, a sum may be computed in place, and what fails later is told by `ncclCommGetAsyncError`, after which a
communicator can only be aborted.
"""

from __future__ import annotations

import ctypes
import importlib.util
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import Any

ID_BYTES = 128
"""NCCL_UNIQUE_ID_BYTES of nccl.h."""

IN_PROGRESS = 7
"""ncclInProgress: no error, of a communicator that does not block."""

_TYPES = {"int8": 0, "int32": 2, "float16": 6, "float32": 7}
_SUM = 0
"""Numbers of ncclDataType_t and ncclRedOp_t."""

_LIBRARY = "libnccl.so.2"
_PACKAGE = "nvidia.nccl"

Native = Any
"""The library, or what answers as it does."""


class UniqueId(ctypes.Structure):
    """What the ranks of one communicator share; passed by value."""

    _fields_ = (("internal", c_char * ID_BYTES),)


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (POINTER(c_int),),
    "ncclGetUniqueId": (POINTER(UniqueId),),
    "ncclCommInitRank": (POINTER(c_void_p), c_int, UniqueId, c_int),
    "ncclCommDestroy": (c_void_p,),
    "ncclCommAbort": (c_void_p,),
    "ncclCommGetAsyncError": (c_void_p, POINTER(c_int)),
    "ncclAllReduce": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclSend": (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclRecv": (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
}


class NcclError(Exception):
    """A call failed; `code` is a number of ncclResult_t, and -1 where the library itself is missing."""

    def __init__(self, call: str, code: int, reason: str) -> None:
        super().__init__(f"{call}: {reason}" if code < 0 else f"{call}: {reason} (NCCL error {code})")
        self.call, self.code = call, code


class Nccl:
    """The library; every failure is an `NcclError`."""

    def __init__(self, native: Native) -> None:
        self._native = native
        for name, arguments in _SIGNATURES.items():
            function = getattr(native, name)
            function.argtypes, function.restype = arguments, c_int
        for name, arguments in (("ncclGetErrorString", (c_int,)), ("ncclGetLastError", (c_void_p,))):
            function = getattr(native, name)
            function.argtypes, function.restype = arguments, c_char_p

    def version(self) -> tuple[int, int, int]:
        number = c_int()
        self.call("ncclGetVersion", byref(number))
        return number.value // 10_000, number.value // 100 % 100, number.value % 100

    def unique_id(self) -> bytes:
        """The name of a new communicator: made by one rank, and sent to all others before any of them joins."""
        made = UniqueId()
        self.call("ncclGetUniqueId", byref(made))
        return bytes(made)

    def join(self, unique_id: bytes, ranks: int, rank: int) -> Communicator:
        """Waits until every rank has joined, each with the GPU that its thread uses."""
        handle = c_void_p()
        self.call("ncclCommInitRank", byref(handle), ranks, UniqueId.from_buffer_copy(unique_id), rank)
        return Communicator(self, handle)

    def call(self, name: str, *arguments: Native) -> None:
        if code := getattr(self._native, name)(*arguments):
            raise self.error(name, code)

    def error(self, name: str, code: int) -> NcclError:
        what, last = self._native.ncclGetErrorString(code), self._native.ncclGetLastError(None)
        words = [each.decode("utf-8", "replace") for each in (what, last) if each]
        return NcclError(name, code, ": ".join(words) or "no reason given")


class Communicator:
    """One rank's end. Ranks must queue the same sums in the same order; addresses are on the rank's own GPU."""

    def __init__(self, nccl: Nccl, handle: c_void_p) -> None:
        self._nccl, self._handle = nccl, handle

    def add_up(self, address: int, count: int, dtype: str, stream: int) -> None:
        """Queues the sum of what lies at each rank's address, which then lies at all of them."""
        self._nccl.call("ncclAllReduce", address, address, count, _TYPES[dtype], _SUM, self._handle, stream)

    def send(self, address: int, count: int, dtype: str, peer: int, stream: int) -> None:
        """Queues a message to a rank, which must queue its `receive`."""
        self._nccl.call("ncclSend", address, count, _TYPES[dtype], peer, self._handle, stream)

    def receive(self, address: int, count: int, dtype: str, peer: int, stream: int) -> None:
        self._nccl.call("ncclRecv", address, count, _TYPES[dtype], peer, self._handle, stream)

    def check(self) -> None:
        """Raises NcclError where queued work has failed, as when another rank is gone."""
        state = c_int()
        self._nccl.call("ncclCommGetAsyncError", self._handle, byref(state))
        if state.value not in {0, IN_PROGRESS}:
            raise self._nccl.error("ncclCommGetAsyncError", state.value)

    def abort(self) -> None:
        """Gives up what is queued: the only way to end a communicator that has failed."""
        self._nccl.call("ncclCommAbort", self._handle)

    def close(self) -> None:
        """Ends a communicator whose work is done."""
        self._nccl.call("ncclCommDestroy", self._handle)


def load() -> Nccl:
    """The library of the package nvidia-nccl-cu12 or -cu13, or else the system's; raises NcclError without one."""
    try:
        return Nccl(ctypes.CDLL(_path()))
    except (OSError, AttributeError) as error:
        raise NcclError("dlopen", -1, f"{error}; pip install nvidia-nccl-cu13, or -cu12 for CUDA 12") from error


def _path() -> str:
    try:
        found = importlib.util.find_spec(_PACKAGE)
    except ModuleNotFoundError:  # not even `nvidia`
        found = None
    folders = [] if found is None else list(found.submodule_search_locations or [])
    files = [file for folder in folders if (file := Path(folder) / "lib" / _LIBRARY).is_file()]
    return str(files[0]) if files else _LIBRARY
