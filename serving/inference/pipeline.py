"""The life of a request, knowing no protocol: admit, tokenise, queue, compute, finish, record."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from serving.errors import EmptyInput, InvalidRequest
from serving.inference.tasks import TASKS
from serving.inference.tasks.base import Work
from serving.records import Outcome, Timings
from serving.scheduling.admission import estimate_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from serving.inference.dispatcher import Dispatcher
    from serving.inference.served_models import Repository, ServedModel
    from serving.inference.tasks.base import Task
    from serving.inference.tokenizer import TextTokenizer
    from serving.lifecycle import Lifecycle
    from serving.records import A, EncodedText, InferRequest, ModelIndex, TextInput, Totals
    from serving.settings import Settings

R = TypeVar("R")

_INLINE_BYTES = 2048
"""Texts up to this size are tokenised on the event loop (about a millisecond); a thread hop costs more."""

_INLINE_TOKENS = 1024
"""A task that looks at every token finishes so many of them on the event loop (about a millisecond)."""


class AnswerCounts(Protocol):
    @property
    def totals(self) -> Mapping[tuple[str, str], Totals]:
        """What each model has answered, by its name and version."""

    def answered(self, outcome: Outcome[Any]) -> None: ...

    def batches(self, model: ServedModel) -> int: ...


class Pipeline:
    def __init__(
        self,
        *,
        settings: Settings,
        repository: Repository,
        lifecycle: Lifecycle,
        dispatcher: Dispatcher,
        metrics: AnswerCounts,
    ) -> None:
        self._settings = settings
        self._repository = repository
        self._lifecycle = lifecycle
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._tokenizer_turn = asyncio.Lock()
        self._users: Counter[ModelIndex] = Counter()

    async def infer(self, request: InferRequest[A]) -> Outcome[A]:
        """Answers a request, or raises the one error that its client gets; it holds nothing afterwards."""
        trace = request.trace
        if trace is not None:
            trace.decoded = time.perf_counter()
        if not self._lifecycle.accepting:
            raise self._lifecycle.refusal()
        task: Task[Any, A] = TASKS[type(request.options)]
        model = self._repository.find(request.model, request.version, task.name)
        _check_count(request)
        task.check(request.options, model.manifest)
        prompted = model.with_prompt_apart if task.prompt_apart else model.prompted
        inputs: Sequence[TextInput] = prompted(request.inputs, request.prompt_name, request.input_type)
        if task.expand is not None:
            inputs = task.expand(inputs, request.options)
        cut = self._settings.auto_truncate if request.truncate is None else request.truncate
        sizes = task.sizes_bytes(model.tokenizer, inputs, request.options, truncate=cut)
        size = sum(sizes)
        longest = None if task.windows(request.options) else model.manifest.max_length
        self._users[model.index] += 1
        try:
            with self._dispatcher.admission.admit(
                *(model.index, sizes),
                longest=longest,
                arrival=request.arrival,
                timeout_ms=request.timeout_ms,
                priority=request.priority,
                now=time.perf_counter(),
            ) as permit:
                started = time.perf_counter()
                encode: Callable[[], Sequence[EncodedText]]
                if task.encode is None:
                    encode = partial(model.tokenizer.encode, inputs, truncate=cut)
                else:
                    encode = partial(task.encode, model.tokenizer, inputs, request.options, truncate=cut)
                if size <= _INLINE_BYTES:
                    texts = encode()
                else:
                    permit.expect(sizes, longest)
                    texts = await self._in_turn(encode, permit.deadline)
                    permit.expect_no_more()
                tokenize_us = (time.perf_counter() - started) * 1e6
                pending = await self._dispatcher.run(permit, texts)
                tokens = permit.tokens
                computed = 0.0 if trace is None else time.perf_counter()
                work = Work(inputs, request.options, texts, pending.result(), model.manifest, model.tokenizer)
                if task.token_outputs and tokens > _INLINE_TOKENS:
                    answer = await asyncio.to_thread(task.finish, work)
                else:
                    answer = task.finish(work)
        finally:
            self._users[model.index] -= 1
        total_us = (time.perf_counter() - request.arrival) * 1e6
        outcome = Outcome(
            answer=answer,
            model=model.name,
            version=model.version,
            timings=Timings(tokenize_us, pending.queue_us, pending.compute_us, total_us),
            tokens=tokens,
            truncated_tokens=sum([text.truncated for text in texts]),
        )
        if trace is not None:
            trace.answered(outcome, pending.submitted, computed)
        # After the reply, not before it: the client waits for one of them only.
        asyncio.get_running_loop().call_soon(self._metrics.answered, outcome)
        return outcome

    def users(self, model: ModelIndex) -> int:
        """Requests under way that use this model."""
        return self._users[model]

    def totals(self, model: ServedModel) -> Totals:
        return self._metrics.totals[model.name, model.version]

    def batches(self, model: ServedModel) -> int:
        return self._metrics.batches(model)

    async def read(self, model: ServedModel, size: int, work: Callable[[TextTokenizer], R]) -> R:
        """Reads texts with a model's tokenizer: at once if short, else in its turn in a thread.

        `size` is in bytes, which count as tokens under way meanwhile. Raises `Overloaded` where too much is.
        """
        if size <= _INLINE_BYTES:
            return work(model.tokenizer)
        with self._dispatcher.admission.reserve(estimate_tokens([size], None), time.perf_counter()):
            return await self._in_turn(lambda: work(model.tokenizer), None)

    async def _in_turn(self, work: Callable[[], R], deadline: float | None) -> R:
        """Tokenises in a thread, once no other request does; raises `DeadlineExceeded` if its turn is late."""
        try:
            async with asyncio.timeout_at(deadline):
                await self._tokenizer_turn.acquire()
        except TimeoutError:
            raise self._dispatcher.missed() from None
        # The turn ends with the thread, which goes on when the client leaves: else others would start beside it.
        running = asyncio.get_running_loop().run_in_executor(None, work)
        running.add_done_callback(lambda _: self._tokenizer_turn.release())
        return await asyncio.shield(running)


def _check_count(request: InferRequest[A]) -> None:
    if not request.inputs:
        raise EmptyInput("the list of inputs is empty; send at least one")
    if len(request.inputs) > request.max_inputs:
        raise InvalidRequest(f"{len(request.inputs)} inputs in one request; at most {request.max_inputs} are taken")
