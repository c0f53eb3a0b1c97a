"""A process that can be ended, in which the rules of a bundle's own tokenizer run; `tokenizer_worker` is its program.

A text on which a rule takes too long or too much memory costs that process, which the next text starts anew, and its
own request. The process of the server never compiles such a rule.
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

from serving.children import module_command
from serving.errors import BertserveError, DeadlineExceeded, InternalError, InvalidRequest
from serving.inference.requests import Token
from serving.records import AlignedText, EncodedChunk, EncodedText

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

CPU_S = 2
"""CPU time of a call; the kernel ends the process beyond it."""

OPEN_S = 60
"""The same of reading the tokenizer.json."""

MEMORY_BYTES = 512 << 20
"""What a call may take beside what is held already."""

MEMORY_PER_BYTE = 32
"""What a tokenizer may take beside that for a byte of its file."""

_WALL_S = 20.0
"""How long a call is waited for on a host that has no CPU time for it."""

_REPLY_BYTES = 128 << 20

OPEN, PROBE = "open", "probe"
"""Calls that are no methods of the tokenizer."""


_ARRAY, _NUMBERS, _SPANS = 1, 2, 3
"""MessagePack's types for arrays of int32: of a list, of a vector, and of one with two columns."""

_ROWS: Mapping[str, type[msgspec.Struct]] = {
    "encode": EncodedText,
    "encode_aligned": AlignedText,
    "encode_windows": AlignedText,
    "encode_chunks": EncodedChunk,
    "tokens": Token,
}
"""What a method returns a list of."""

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
    """The process; the first call starts it, one at a time is made, and it ends with this object or the server.

    Attributes:
        pid: Of the process that was started last; 0 before.
    """

    def __init__(self, content: str, arguments: tuple[Any, ...]) -> None:
        """Starts nothing; `arguments` are those of `TextTokenizer` behind the tokenizer that `content` describes."""
        self._first = pack((content, arguments))
        self._lock = threading.Lock()
        self.pid = 0
        self._pipe: Connection | None = None
        self._open = False
        self._end: Callable[[], object] = lambda: None

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  whatever the method has
        """What a method of the tokenizer returns there; blocks.

        Raises:
            OverLimitError: It took too much.
            BertserveError: What the method raises.
        """
        with self._lock:
            if self._pipe is not None and self._pipe.poll():  # it has ended since: it says nothing unasked
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
                module_command("serving.inference.tokenizer_worker", str(theirs.fileno())),
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
