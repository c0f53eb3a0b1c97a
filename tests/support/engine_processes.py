"""Real engine processes with the fake engine in them, and what stands for their owner."""

from __future__ import annotations

import asyncio
from array import array
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from bertserve.serving.engine.base import Batch, BatchOutput, EngineLoad
from bertserve.serving.engine.fake import fake_vector
from bertserve.serving.errors import EngineFailed
from bertserve.serving.records import EncodedText, ModelIndex
from tests.support.specs import model_spec

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping

    from bertserve.serving.engine.process.remote_engine import RemoteEngine
    from bertserve.serving.engine.process.supervisor import Supervisor
    from bertserve.serving.errors import BertserveError

T = TypeVar("T")

SIZE = 8
FIRST = ModelIndex(0)
NAN, RAISE, EXIT, HANG = 1001, 1002, 1003, 1004
FAULTS = {NAN: "nan", RAISE: "raise", EXIT: "exit", HANG: "hang"}
LIMIT_S = 60.0
BATCHED = model_spec("batched", size=SIZE)
TEXT_BY_TEXT = model_spec("text-by-text", size=SIZE, batch_invariant=False)


def faulty(faults: Mapping[int, str]) -> dict[str, float | str]:
    return {"fake_faults": ",".join(f"{token}:{fault}" for token, fault in faults.items())}


LOAD = EngineLoad("fake", [BATCHED], threads=1, options=faulty(FAULTS))


async def soon(awaited: Awaitable[T]) -> T:
    """What is awaited, or a failure instead of a test that never ends."""
    return await asyncio.wait_for(awaited, LIMIT_S)


def batch(*texts: list[int]) -> Batch:
    return Batch(FIRST, [EncodedText(array("i", ids)) for ids in texts], alone=True)


def submit(engine: RemoteEngine, *texts: list[int], lane: int = 0) -> asyncio.Future[BatchOutput | BertserveError]:
    """Starts a batch; the future's second result would be an error of the test."""
    outcome: asyncio.Future[BatchOutput | BertserveError] = asyncio.get_running_loop().create_future()
    engine.submit(lane, batch(*texts), outcome.set_result)
    return outcome


def right(outcome: BatchOutput | BertserveError, *texts: list[int]) -> bool:
    expected = [fake_vector(text, SIZE) for text in batch(*texts).texts]
    return isinstance(outcome, BatchOutput) and np.array_equal(outcome.arrays[0], expected, equal_nan=True)


class Listener:
    def __init__(self) -> None:
        self.news: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self.lost = 0

    def engine_up(self, engine: RemoteEngine) -> None:
        self.news.put_nowait(("up", engine))

    def engine_down(self) -> None:
        self.news.put_nowait(("down", None))

    def engine_lost(self) -> None:
        """One has ended before it was ready."""
        self.lost += 1

    def device_lost(self) -> None:
        """It is one process."""

    async def run(self, supervisor: Supervisor) -> None:
        try:
            await supervisor.run(self)
        except EngineFailed as failed:
            self.crashed = failed.crashed
            self.news.put_nowait(("failed", str(failed)))

    async def next(self, expected: str) -> Any:
        """What comes with the next piece of news, which is of the kind expected."""
        kind, what = await soon(self.news.get())
        assert kind == expected
        return what


async def cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await soon(asyncio.gather(task, return_exceptions=True))
