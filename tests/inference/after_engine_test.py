"""Work after the engine: in blocks, up to the deadline, and no longer than its client waits."""

from __future__ import annotations

import asyncio
import threading
from array import array
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from bertserve.serving.errors import DeadlineExceeded, Overloaded
from bertserve.serving.inference.after_engine import EndedError, Until
from bertserve.serving.inference.pipeline import Pipeline
from bertserve.serving.inference.requests import InferRequest, Outcome
from bertserve.serving.inference.served_models import Repository
from bertserve.serving.records import EncodedText
from bertserve.serving.tasks import TASK_ROUTES
from bertserve.serving.tasks.answer import AnswerOptions
from bertserve.serving.tasks.base import TaskOptions, TaskRoute, Work
from bertserve.serving.tasks.chunks import LateChunkOptions
from bertserve.serving.tasks.classify import ClassifyOptions
from bertserve.serving.tasks.embed_sparse import EmbedSparseOptions
from bertserve.serving.tasks.embed_tokens import EmbedTokensOptions
from bertserve.serving.tasks.maxsim import MaxSimOptions
from bertserve.serving.tasks.tag import TagOptions
from bertserve.serving.tasks.windows import Windows
from tests.support.dispatching import BATCHED, Bench
from tests.support.virtual_time import asynchronous, now

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bertserve.serving.models.manifest import Manifest
    from bertserve.serving.tasks.base import Check

TEXT = "Rosa saw Bern and the lake. " * 400
LONG = Windows()
WORKS = [
    (TagOptions(windows=LONG), [TEXT], 20),
    (TagOptions("simple", windows=LONG, by_window=True), [TEXT], 20),
    (AnswerOptions(), [("Who?", TEXT)], 20),
    (AnswerOptions(max_answer_tokens=1000), [("Who?", TEXT)], 20),
    (LateChunkOptions(tokens=16), [("", TEXT)], 200),
    (EmbedTokensOptions(), ["Bern"] * 40, 40),
    (ClassifyOptions(), ["Bern"] * 160, 10),
    (EmbedSparseOptions(), ["Bern"] * 40, 40),
]
"""Options, inputs, and a number of blocks that the work has at least."""


class Blocks:
    """A check that ends the work before one of its blocks."""

    def __init__(self, last: int = 1 << 30) -> None:
        self.begun = 0
        self._last = last

    def __call__(self) -> None:
        self.begun += 1
        if self.begun > self._last:
            raise EndedError


def rows_of(manifest: Manifest, texts: list[EncodedText]) -> list[Any]:
    random = np.random.default_rng(0)
    return [
        tuple(
            np.arange(spec.shape[-1], dtype=np.int32)
            if spec.dtype == "int32"
            else random.random([len(text.ids) if dim < 0 else dim for dim in spec.shape[1:]], np.float32)
            for spec in manifest.outputs
        )
        for text in texts
    ]


@pytest.mark.parametrize(("options", "inputs", "blocks"), WORKS, ids=lambda value: type(value).__name__)
def test_long_work_ends_at_its_next_block(
    options: TaskOptions[Any], inputs: list[Any], blocks: int, tasks_repository: Path
) -> None:
    """And comes to the same answer if it may go on. Its unit was measured as the model was opened."""
    way = TASK_ROUTES[type(options)]
    model = Repository.open(tasks_repository).find(None, task=way.task)
    texts = list(way.encode(model.tokenizer, inputs, options, truncate=True))
    rows = rows_of(model.manifest, texts)

    def finish(check: Check) -> Any:
        return way.finish(Work(inputs, options, texts, rows, model.manifest, model.tokenizer, check))

    unhindered, some = Blocks(), Blocks(2)
    assert len(finish(unhindered)) == len(inputs)
    assert unhindered.begun >= blocks
    with pytest.raises(EndedError):
        finish(some)
    assert some.begun == 3
    if way.after is not None:
        assert model.after_us[type(options)] > 0
        assert way.after(inputs, [len(text.ids) for text in texts], options, model.manifest) >= len(texts)


def test_maxsim_ends_between_blocks_of_a_query() -> None:
    """A single pair of long texts has many; the work is the products of its vectors."""
    way = TASK_ROUTES[MaxSimOptions]
    texts = [EncodedText(array("i", range(count))) for count in (1000, 1000)]
    rows = [(np.ones((len(text.ids), 8), np.float32),) for text in texts]
    manifest: Any = SimpleNamespace(multi_vector=None, outputs=[SimpleNamespace(name="token_embeddings")])
    inputs, check = [("a", "b")], Blocks()
    work = partial(Work, inputs, MaxSimOptions(), texts, rows, manifest, SimpleNamespace())
    assert way.finish(work(check)) == pytest.approx([8000.0])
    assert check.begun == 2 + 4
    with pytest.raises(EndedError):
        way.finish(work(Blocks(4)))
    assert way.after is not None
    assert way.after([*inputs, ("c", "b"), ("a", "d")], [10, 20, 3, 4, 5], MaxSimOptions(), manifest) == 30 + 80 + 50


def test_work_goes_on_until_its_deadline_and_while_somebody_waits() -> None:
    """Whatever ends it first."""
    clock = iter([1.0, 2.0, 2.1])
    check = Until(2.0, lambda: next(clock))
    check()
    check()
    with pytest.raises(EndedError):
        check()
    left = Until()
    left()
    left.left = True
    with pytest.raises(EndedError):
        left()


class EndlessOptions(TaskOptions[list[int]], frozen=True):
    """Options of a task whose work after the engine has no end."""


class Endless:
    """Work that only its check ends.

    Attributes:
        begun: Set in its first block.
        ended: Set as it has ended.
    """

    def __init__(self) -> None:
        self.begun, self.ended = threading.Event(), threading.Event()

    def run(self, check: Check) -> list[int]:
        try:
            while True:
                check()
                self.begun.set()
        finally:
            self.ended.set()

    def finish(self, work: Work[EndlessOptions]) -> list[int]:
        return self.run(work.check)


class Served:
    """A pipeline over an engine that answers at once, with one task: `units` seconds of work after the engine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, units: float = 1e-3) -> None:
        self.work, self.bench = Endless(), Bench()
        way: TaskRoute[Any, Any] = TaskRoute(
            EndlessOptions,
            None,
            self.work.finish,
            token_outputs=True,
            after=lambda *_: units,  # type: ignore[arg-type]
        )
        monkeypatch.setitem(TASK_ROUTES, EndlessOptions, way)
        tokenizer = SimpleNamespace(
            turn=None,
            sizes_bytes=lambda inputs, **_: [4] * len(inputs),
            encode=lambda inputs, **_: [EncodedText(array("i", [1, 2]))] * len(inputs),
        )
        manifest = SimpleNamespace(max_length=512, outputs=[], default_prompt=None)
        model = SimpleNamespace(index=BATCHED, name="a", version="1", manifest=manifest, tokenizer=tokenizer)
        model.after_us = {EndlessOptions: 1e6}
        self.pipeline = Pipeline(
            settings=SimpleNamespace(auto_truncate=True, max_client_batch_size=8, max_timeout_ms=60_000.0),  # type: ignore[arg-type]
            repository=SimpleNamespace(find=lambda *_: model, compute_type="cpu"),  # type: ignore[arg-type]
            lifecycle=SimpleNamespace(accepting=True),  # type: ignore[arg-type]
            dispatcher=self.bench.dispatcher,
        )

    async def ask(self, timeout_ms: float | None) -> asyncio.Task[Outcome[Any]]:
        """A request whose texts the engine has answered, if it was admitted."""
        request = InferRequest(["a"], EndlessOptions(), timeout_ms=timeout_ms, arrival=now())
        task = asyncio.create_task(self.pipeline.infer(request))
        await asyncio.sleep(0)
        self.bench.engine.finish_all()
        return task

    async def has(self, event: threading.Event) -> bool:
        return await asyncio.to_thread(event.wait, 30)

    @property
    def misses(self) -> dict[str, int]:
        return dict(self.bench.dispatcher.load().misses)


@asynchronous
async def finished_too_late(served: Served) -> None:
    task = await served.ask(1000.0)
    with pytest.raises(DeadlineExceeded):
        await task
    assert await served.has(served.work.ended)
    assert served.misses == {"queue": 0, "engine": 0, "finish": 1}
    assert served.bench.dispatcher.load().admitted_tokens == 0
    assert served.pipeline._after_us == 0


@asynchronous
async def left(served: Served) -> None:
    task = await served.ask(None)
    assert await served.has(served.work.begun)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await served.has(served.work.ended)
    assert served.misses == {"queue": 0, "engine": 0, "finish": 0}
    assert served.pipeline._after_us == 0


@pytest.mark.parametrize("case", [finished_too_late, left])
def test_work_after_the_engine_ends_at_the_deadline_or_with_its_client(
    case: Callable[[Served], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread ends, and nothing of the request stays; only a missed deadline counts as one."""
    case(Served(monkeypatch))


@asynchronous
async def written_too_late(served: Served) -> None:
    permit: Any = SimpleNamespace(deadline=now() + 0.3, priority=2, shortened="")
    with pytest.raises(DeadlineExceeded):
        await served.pipeline.write(SimpleNamespace(permit=permit), 1 << 20, served.work.run)  # type: ignore[arg-type]
    assert await served.has(served.work.ended)
    assert served.misses["finish"] == 1


@asynchronous
async def left_while_written(served: Served) -> None:
    writing = served.pipeline.write(SimpleNamespace(permit=None), 1 << 20, served.work.run)  # type: ignore[arg-type]
    task = asyncio.create_task(writing)
    assert await served.has(served.work.begun)
    assert served.pipeline._after_us > 0
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await served.has(served.work.ended)
    assert served.pipeline._after_us == 0


@pytest.mark.parametrize("case", [written_too_late, left_while_written])
def test_the_writing_of_a_large_reply_ends_at_the_deadline_or_with_its_client(
    case: Callable[[Served], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the work before it does."""
    case(Served(monkeypatch))


@asynchronous
async def hopeless(served: Served) -> None:
    with pytest.raises(DeadlineExceeded, match=r"takes about 5000\.1 ms on an idle server"):
        await (await served.ask(4000.0))
    assert served.bench.dispatcher.load().refusals["hopeless"] == 1


@asynchronous
async def behind_others(served: Served) -> None:
    first = await served.ask(60_000.0)
    assert await served.has(served.work.begun)
    with pytest.raises(Overloaded) as refused:
        await (await served.ask(9000.0))
    assert (refused.value.retry_after_s or 0) >= 5
    assert served.bench.dispatcher.load().refusals["predicted_late"] == 1
    first.cancel()


@asynchronous
async def in_its_own_time(served: Served) -> None:
    task = await served.ask(None)
    assert await served.has(served.work.begun)
    assert served.pipeline._after_us == 5e6
    task.cancel()


@pytest.mark.parametrize(("case", "batches"), [(hopeless, 0), (behind_others, 1), (in_its_own_time, 1)])
def test_admission_counts_the_work_after_the_engine(
    case: Callable[[Served], None], batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it or that of others makes late is rejected before the engine; a default deadline leaves time for it."""
    served = Served(monkeypatch, units=5.0)
    case(served)
    assert len(served.bench.engine.started) == batches
