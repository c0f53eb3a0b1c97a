"""The life of a request as far as no engine is needed for it."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from bertserve.serving.errors import DeadlineExceeded
from bertserve.serving.inference.dispatcher import Dispatcher
from bertserve.serving.inference.pipeline import Pipeline
from bertserve.serving.inference.requests import InferRequest
from bertserve.serving.records import ModelIndex
from bertserve.serving.scheduling.admission import AdmissionLimits
from bertserve.serving.scheduling.batcher import Policy
from bertserve.serving.tasks.embed import EmbedOptions
from tests.support.costs import constant, model_costs
from tests.support.virtual_time import now

LONG = "word " * 1000


class Blocked:
    """A tokenizer that works on its first text until it is let go, and counts those that it began."""

    turn = None

    def __init__(self) -> None:
        self.began = 0
        self.has_begun, self.go_on = threading.Event(), threading.Event()

    def sizes_bytes(self, texts: list[str], **_: object) -> list[int]:
        return list(map(len, texts))

    def encode(self, _: object, **__: object) -> list[Any]:
        self.began += 1
        self.has_begun.set()
        self.go_on.wait(60)
        return []


def test_a_deadline_runs_while_a_request_waits_for_the_tokenizer() -> None:
    """The one that passes there gets its 504 then, and not when its turn would come; nothing of it stays."""
    tokenizer = Blocked()
    manifest = SimpleNamespace(max_length=512, hidden_size=8, default_prompt=None)
    model = SimpleNamespace(
        index=ModelIndex(0),
        name="a",
        version="1",
        manifest=manifest,
        tokenizer=tokenizer,
    )

    async def main() -> None:
        dispatcher = Dispatcher(Policy(64, [True], [False]), AdmissionLimits(10_000), SimpleNamespace(), now)
        dispatcher.engine_up(SimpleNamespace(lanes=[0]), [model_costs(constant(100))])
        pipeline = Pipeline(
            settings=SimpleNamespace(auto_truncate=True, max_client_batch_size=8),
            repository=SimpleNamespace(find=lambda *_: model),
            lifecycle=SimpleNamespace(accepting=True),
            dispatcher=dispatcher,
        )

        def ask(timeout_ms: float) -> asyncio.Task[Any]:
            request = InferRequest([LONG], EmbedOptions(), timeout_ms=timeout_ms, arrival=now())
            return asyncio.create_task(pipeline.infer(request))

        first = ask(60_000.0)
        await asyncio.to_thread(tokenizer.has_begun.wait, 30)
        second = ask(50.0)
        with pytest.raises(DeadlineExceeded):
            await asyncio.wait_for(second, 30)
        assert (tokenizer.began, first.done()) == (1, False)
        assert dispatcher.load().misses == {"queue": 1, "engine": 0, "finish": 0}
        assert dispatcher.load().admitted_tokens == 512
        first.cancel()
        await asyncio.wait({first})
        assert pipeline._tokenizing._turn.locked(), "its thread goes on, and no other begins beside it"
        tokenizer.go_on.set()
        async with asyncio.timeout(30), pipeline._tokenizing._turn:
            pass
        assert dispatcher.load().admitted_tokens == 0
        assert dispatcher.load().wait_s == 0

    asyncio.run(main())
