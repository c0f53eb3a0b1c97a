"""What happens to a server's engine process from outside."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

from tests.support.server import is_running
from tests.support.stopping import stop

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.server import Server


def engine_of(server: Server) -> int:
    engine = server.engine_pid()
    assert engine is not None
    return engine


def kill_engine(server: Server) -> int:
    engine = engine_of(server)
    os.kill(engine, signal.SIGKILL)
    return engine


@contextlib.contextmanager
def stopped_engine(server: Server) -> Iterator[int]:
    """Holds the engine process still while the block runs: what it is sent is under way as long."""
    engine = engine_of(server)
    stop(engine)
    try:
        yield engine
    finally:
        if is_running(engine):
            os.kill(engine, signal.SIGCONT)
