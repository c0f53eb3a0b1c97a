"""Where texts are tokenized: short ones on the event loop, others in a thread, one request at a time.

A tokenizer in a process of its own has a turn of its own, and blocks a thread too.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from bertserve.serving.records import BULK
from bertserve.serving.scheduling.admission import estimate_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from bertserve.serving.inference.device import Admitted, Device
    from bertserve.serving.inference.tokenizer import TextTokenizer

R = TypeVar("R")

_INLINE_BYTES = 2048
"""Maximum size of texts that are tokenized on the event loop (about a millisecond); a thread hop costs more."""


class Tokenizing:
    """Runs the work of tokenizers."""

    def __init__(self, device: Device[Any]) -> None:
        self._device = device
        self._turn = asyncio.Lock()
        self._bulk_turn = asyncio.Lock()

    @staticmethod
    def is_inline(tokenizer: TextTokenizer, size: int) -> bool:
        """Whether texts of so many bytes are tokenized on the event loop."""
        return size <= _INLINE_BYTES and tokenizer.turn is None

    async def read(self, tokenizer: TextTokenizer, size: int, work: Callable[[], R]) -> R:
        """Runs work that needs no engine on texts of so many bytes.

        The estimated tokens count as in flight while it is not inline. Raises `Overloaded` if too many are.
        """
        if self.is_inline(tokenizer, size):
            return work()
        permit = await self._device.reserve(estimate_tokens([size], None))
        try:
            return await self.run(tokenizer, work, permit)
        finally:
            permit.release()

    async def run(self, tokenizer: TextTokenizer, work: Callable[[], R], permit: Admitted) -> R:
        """Runs work in a thread; raises `DeadlineExceeded` if its turn comes after the deadline.

        Bulk work has a turn of its own, because one request of it may take a second.
        """
        turn = tokenizer.turn or (self._bulk_turn if permit.priority == BULK else self._turn)
        try:
            async with asyncio.timeout_at(permit.deadline):
                await turn.acquire()
        except TimeoutError:
            raise self._device.missed(permit) from None
        # The thread releases the turn, because it continues after the client leaves; otherwise others would run beside
        # it.
        running = asyncio.get_running_loop().run_in_executor(None, work)
        running.add_done_callback(lambda _: turn.release())
        return await asyncio.shield(running)
