"""SIGINT and SIGTERM as an exception, so that `with` blocks clean up."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import FrameType, TracebackType


class Interrupted(BaseException):
    """A signal asked the export to stop. Like `KeyboardInterrupt`, not an `Exception`."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.number = number

    @property
    def exit_code(self) -> int:
        """What a shell reports for a process that the signal ended."""
        return 128 + self.number


class Interrupts:
    """Raises `Interrupted` on the main thread while its `with` block runs; restores the handlers after it.

    An exception raised inside a finaliser or a C callback is lost, so the signal is also remembered and
    `check` raises it again.
    """

    def __init__(self) -> None:
        self._received: int | None = None

    def __enter__(self) -> Self:
        """Installs the handlers."""
        self._before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Puts the earlier handlers back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raises what a library has swallowed.

        Raises:
            Interrupted: A signal arrived.
        """
        if self._received is not None:
            raise Interrupted(self._received)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._received = number
        raise Interrupted(number)
