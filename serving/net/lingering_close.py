"""The end of a connection that takes nothing back of what was said on it (RFC 9112, 9.6)."""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
from typing import TYPE_CHECKING

from serving.unawaited import guarded

if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_BYTES = 64 << 20
"""So much is read and thrown away: several bodies of the largest size that honest clients send before they listen."""

TAKEN_BYTES = 4096
"""A peer that takes so much in the time for it is slow; one that takes less is gone."""

_INT = struct.Struct("i")


def unsent_bytes(transport: asyncio.Transport) -> int:
    """What the peer has not received yet: in the transport's buffer and in the system's."""
    return transport.get_write_buffer_size() + _queued(transport, termios.TIOCOUTQ)


def unread_bytes(transport: asyncio.Transport) -> int:
    """What the peer has sent and the system has received, and what nobody has read yet; over TLS, as it is encrypted.

    A loop that stood still can find a timer due before it has read what came in time.
    """
    return _queued(transport, termios.FIONREAD)


def _queued(transport: asyncio.Transport, request: int) -> int:
    opened = transport.get_extra_info("socket")
    try:
        return int(_INT.unpack(fcntl.ioctl(opened.fileno(), request, bytes(_INT.size)))[0])
    except (AttributeError, OSError, ValueError):  # closed, or nothing that the system can tell of
        return 0


class SendProgress:
    """Whether a peer takes what is sent to it: one that takes some in time is slow, one that does not is gone."""

    __slots__ = ("_least", "_unsent", "waited_s")

    def __init__(self, unsent: int, least: int = TAKEN_BYTES) -> None:
        """Begins to wait for a peer to take at least so many of the unsent bytes, or all of them."""
        self._unsent, self._least = unsent, least
        self.waited_s = 0.0

    def wait(self, unsent: int, seconds: float) -> float:
        """So many seconds later: how long the peer has taken less than it should."""
        self.waited_s += seconds
        if self._unsent and unsent <= max(0, self._unsent - self._least):
            self._unsent, self.waited_s = unsent, 0.0
        return self.waited_s


class LingeringClose:
    """Closes a connection's own half, reads on, and closes the rest once the peer has, or has had its time.

    What is unread when a socket closes, or arrives later, makes the system reset the connection, which takes back all
    that the peer has not read yet. TLS half-closes and reads on by itself: its end waits for the peer's.
    """

    __slots__ = ("_abort", "_left", "_loop", "_pace_s", "_progress", "_quiet_s", "_timer", "_transport")

    def __init__(self, transport: asyncio.Transport, *, quiet_s: float, pace_s: float, heard_all: bool = False) -> None:
        """Begins.

        Args:
            transport: The connection's; what is in its buffer is still sent.
            quiet_s: How long it reads on when the peer has received everything.
            pace_s: How long it waits for a peer that takes nothing of what it has not received.
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
        self._timer = self._loop.call_later(quiet_s, guarded, self._abort, self._look)

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
            self._timer = self._loop.call_later(self._quiet_s, guarded, self._abort, self._look)
