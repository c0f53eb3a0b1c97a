"""How a benchmark ends when a supervisor of its run gives up waiting."""

from __future__ import annotations

import contextlib
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def in_order() -> Iterator[None]:
    """Lets SIGTERM leave this block as an exception does: servers and children are ended on the way."""
    former = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)
