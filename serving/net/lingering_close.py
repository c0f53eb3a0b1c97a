"""Closes a connection so that the peer receives all that was sent (RFC 9112, 9.6)."""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
from typing import TYPE_CHECKING

from bertserve.serving.unawaited import run_guarded

if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_BYTES = 64 << 20
"""Maximum bytes to discard: several bodies of the largest size, which honest clients may send before they read."""

TAKEN_BYTES = 4096
"""Bytes that a slow peer must take within the time limit. A peer that takes less counts as gone."""

_INT = struct.Struct("i")


def unsent_bytes(transport: asyncio.Transport) -> int:
    """Bytes that the peer has not received, in the buffers of the transport and of the system."""
    return transport.get_write_buffer_size() + _queued(transport, termios.TIOCOUTQ)


def unread_bytes(transport: asyncio.Transport) -> int:
    """Bytes that the system has received and nobody has read; over TLS, encrypted bytes.

    After a stall of the event loop, a timer may fire before data that arrived in time has been read.
    """
    return _queued(transport, termios.FIONREAD)


def _queued(transport: asyncio.Transport, request: int) -> int:
    opened = transport.get_extra_info("socket")
    try:
        return int(_INT.unpack(fcntl.ioctl(opened.fileno(), request, bytes(_INT.size)))[0])
    except (AttributeError, OSError, ValueError):  # closed, or not supported by the system
        return 0


class SendProgress:
    """Tells slow peers from those that are gone: a slow peer takes some bytes within the time limit."""

    __slots__ = ("_least", "_unsent", "waited_s")

    def __init__(self, unsent: int, least: int = TAKEN_BYTES) -> None:
        """Waits for a peer to take at least `least` of the unsent bytes, or all of them."""
        self._unsent, self._least = unsent, least
        self.waited_s = 0.0

    def wait(self, unsent: int, seconds: float) -> float:
        """Adds elapsed seconds; returns how long the peer has taken less than required."""
        self.waited_s += seconds
        if self._unsent and unsent <= max(0, self._unsent - self._least):
            self._unsent, self.waited_s = unsent, 0.0
        return self.waited_s


class LingeringClose:
    """Closes the write side, reads on, and closes the rest once the peer has closed or the time is over.

    Data that is unread at the close, or that arrives later, makes the system reset the connection. A reset destroys all
    that the peer has not read. TLS half-closes and reads on by itself: its shutdown waits for the peer's.
    """

    __slots__ = ("_abort", "_left", "_loop", "_pace_s", "_progress", "_quiet_s", "_timer", "_transport")

    def __init__(self, transport: asyncio.Transport, *, quiet_s: float, pace_s: float, heard_all: bool = False) -> None:
        """Starts to close.

        Args:
            transport: The connection's transport; buffered data is still sent.
            quiet_s: Seconds to read on after the peer has received everything.
            pace_s: Seconds to wait for a peer that takes none of its unsent data.
            heard_all: Whether the peer has closed its own half.
        """
        self._transport = transport
        self._abort: Callable[[], None] = transport.abort
        self._quiet_s, self._pace_s = quiet_s, max(quiet_s, pace_s)
        self._left = _MAX_BYTES
        self._loop = asyncio.get_running_loop()
        self._progress = SendProgress(unsent_bytes(transport))
        if heard_all or not transport.can_write_eof():
            transport.close()
        elif not transport.is_closing():
            transport.write_eof()
            transport.resume_reading()
        self._timer = self._loop.call_later(quiet_s, run_guarded, self._abort, self._look)

    def received(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            self._abort()

    def cancel(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        unsent = unsent_bytes(self._transport)
        if self._progress.wait(unsent, self._quiet_s) >= (self._pace_s if unsent else self._quiet_s):
            self._abort()
        else:
            self._timer = self._loop.call_later(self._quiet_s, run_guarded, self._abort, self._look)
