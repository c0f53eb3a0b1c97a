"""A process that can be killed, for a bundle's own tokenizer rules; `tokenizer_worker` is its program.

If a rule takes too much time or memory on a text, the process ends and only that request fails. The next text starts a
new process. The server's own process never compiles such a rule.
"""

from __future__ import annotations

import subprocess
import threading
import weakref
from array import array
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from bertserve.serving.engine.children import module_command
from bertserve.serving.errors import BertserveError, DeadlineExceeded, InternalError, InvalidRequest
from bertserve.serving.inference.requests import Token
from bertserve.serving.records import AlignedText, EncodedChunk, EncodedText

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

CPU_S = 2
"""CPU time limit of a call, in seconds; the kernel ends the process beyond it."""

OPEN_S = 60
"""CPU time limit for reading the tokenizer.json, in seconds."""

MEMORY_BYTES = 512 << 20
"""Memory limit of a call, beyond the memory in use before it."""

MEMORY_PER_BYTE = 32
"""Additional memory limit for reading the tokenizer, for each byte of its file."""

_WALL_S = 20.0
"""Wall-clock limit of a call, in seconds, for a host without free CPU time."""

_REPLY_BYTES = 128 << 20

OPEN, PROBE = "open", "probe"
"""Calls that are not methods of the tokenizer."""


_ARRAY, _NUMBERS, _SPANS = 1, 2, 3
"""MessagePack extension types for int32: an `array`, a vector, and a matrix with two columns."""

_ROWS: Mapping[str, type[msgspec.Struct]] = {
    "encode": EncodedText,
    "encode_bare": EncodedText,
    "encode_aligned": AlignedText,
    "encode_windows": AlignedText,
    "encode_chunks": EncodedChunk,
    "tokens": Token,
}
"""The type of the elements that a method returns."""

_ERRORS: Mapping[str, type[BertserveError]] = {
    kind.__name__: kind for kind in (InvalidRequest, DeadlineExceeded, InternalError)
}


def pack(value: object) -> bytes:
    return msgspec.msgpack.encode(value, enc_hook=_plain)


def _plain(value: object) -> object:
    if isinstance(value, array):
        return msgspec.msgpack.Ext(_ARRAY, value.tobytes())
    if isinstance(value, np.ndarray):
        return msgspec.msgpack.Ext(_NUMBERS if value.ndim == 1 else _SPANS, value.astype(np.int32).tobytes())
    raise NotImplementedError


def unpack(data: bytes) -> Any:  # noqa: ANN401  what was packed
    return msgspec.msgpack.decode(data, ext_hook=_special)


def _special(code: int, data: memoryview) -> object:
    if code == _ARRAY:
        return array("i", bytes(data))
    numbers = np.frombuffer(bytearray(data), np.int32)
    return numbers if code == _NUMBERS else numbers.reshape(-1, 2)


class OverLimitError(Exception):
    """A call took too much time or memory; its process has ended."""


class TokenizerProcess:
    """A tokenizer process. The first call starts it; it ends with this object or the server.

    It runs one call at a time.

    Attributes:
        pid: The latest process; 0 before the first.
    """

    def __init__(self, content: str, arguments: tuple[Any, ...]) -> None:
        """Starts nothing; `arguments` are those of `TextTokenizer` after the tokenizer, which `content` describes."""
        self._first = pack((content, arguments))
        self._lock = threading.Lock()
        self.pid = 0
        self._pipe: Connection | None = None
        self._open = False
        self._end: Callable[[], object] = lambda: None

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  the types of the method
        """Calls a method of the tokenizer in the process and returns its result; blocks.

        Raises:
            OverLimitError: It took too much time or memory.
            BertserveError: The method raised it.
        """
        with self._lock:
            if self._pipe is not None and self._pipe.poll():  # it has ended: it sends nothing unasked
                self._forget()
            pipe = self._pipe or self._start()
            if method not in {OPEN, PROBE} and not self._open:
                self._ask(pipe, OPEN, (), {})
            reply = self._ask(pipe, method, args, kwargs)
            self._open = self._open or method != PROBE
            return reply

    def _start(self) -> Connection:
        pipe, theirs = Pipe()
        with theirs:
            process = subprocess.Popen(
                module_command("bertserve.serving.inference.tokenizer_worker", str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        self.pid = process.pid
        self._end = weakref.finalize(self, _ended, process, pipe)
        self._pipe, self._open = pipe, False
        pipe.send_bytes(self._first)
        return pipe

    def _ask(self, pipe: Connection, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        try:
            pipe.send_bytes(pack((method, args, kwargs)))
            answered = pipe.poll(OPEN_S if method == OPEN else _WALL_S)
            reply = pipe.recv_bytes(_REPLY_BYTES) if answered else b""
        except (OSError, EOFError):
            reply = b""
        if not reply:
            self._forget()
            raise OverLimitError
        error, value = unpack(reply)
        if error:
            raise _ERRORS[error](value)
        return [_ROWS[method](**row) for row in value] if method in _ROWS else value

    def _forget(self) -> None:
        self._pipe = None
        self._end()


def _ended(process: subprocess.Popen[bytes], pipe: Connection) -> None:
    pipe.close()
    process.kill()
    process.wait()
