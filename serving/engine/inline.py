"""An engine in the caller's own process: for tests, for tools and for `export`, which checks with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving.errors import EngineFault

if TYPE_CHECKING:
    from serving.engine.base import Backend, Done
    from serving.records import Batch


class InlineEngine:
    """Runs each batch at once, on the caller's thread."""

    def __init__(self, backend: Backend) -> None:
        self.lanes = backend.lanes()
        self._runners = [backend.runner(lane) for lane in range(len(self.lanes))]

    def submit(self, lane: int, batch: Batch, done: Done) -> None:
        """Runs the batch and calls `done` before returning."""
        try:
            output = self._runners[lane].run(batch)
        except EngineFault as fault:
            done(fault)
        else:
            done(output)
