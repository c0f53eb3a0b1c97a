"""The life of a request, independent of the protocol: admit, tokenize, queue, compute, finish, record."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from bertserve.serving.errors import EmptyInput, empty_input, too_late, too_many_inputs
from bertserve.serving.inference.after_engine import EndedError, Until, number_us
from bertserve.serving.inference.answer_cache import CachedRows
from bertserve.serving.inference.requests import Outcome, Timings
from bertserve.serving.inference.tokenizing import Tokenizing
from bertserve.serving.records import DEFAULT_PRIORITY
from bertserve.serving.scheduling.admission import DEADLINE_COST_FACTOR
from bertserve.serving.tasks import TASK_ROUTES
from bertserve.serving.tasks.base import A, Work, check_answer, go_on

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bertserve.serving.inference.answer_cache import AnswerCache
    from bertserve.serving.inference.device import Admitted, Device, Rows
    from bertserve.serving.inference.requests import InferRequest
    from bertserve.serving.inference.served_models import Repository, ServedModel
    from bertserve.serving.inference.tokenizer import TextTokenizer
    from bertserve.serving.lifecycle import Lifecycle
    from bertserve.serving.records import EncodedText, ModelIndex, TextInput, Truncate
    from bertserve.serving.settings import Settings
    from bertserve.serving.tasks.base import Check, TaskOptions, TaskRoute

R = TypeVar("R")

_TRUNCATED = attrgetter("truncated")

_INLINE_TOKENS = 1024
"""Maximum tokens that a task with outputs per token finishes on the event loop (about a millisecond)."""

INLINE_NUMBERS = 32_768
"""Maximum numbers of an answer that are written on the event loop (about a millisecond)."""

_INLINE_US = 1000.0
"""Minimum predicted time of work after the engine that counts in admission, and that needs a thread."""

_FEW_TEXTS = 8
"""Maximum texts of a request whose work after the engine is not predicted, if it does not grow with their tokens."""

_EMPTY: Sequence[object] = ("", [], ("", ""))


class _Job(msgspec.Struct, Generic[A]):
    """A validated request on its way to its answer.

    Attributes:
        inputs: As the model reads them, as are the options.
        sizes: Sizes of the inputs, in bytes.
        cut: Whether inputs that are too long are truncated.
        texts: For the engine.
        tokens: Tokens of the texts.
        rows: The engine's answers to the texts.
        computed_at: In seconds of the clock.
    """

    request: InferRequest[A]
    way: TaskRoute[Any, A]
    model: ServedModel
    inputs: Sequence[TextInput]
    options: TaskOptions[A]
    sizes: Sequence[int]
    cut: Truncate
    texts: Sequence[EncodedText] = ()
    tokens: int = 0
    tokenize_us: float = 0.0
    permit: Admitted | None = None
    rows: Rows = CachedRows((), cached=False)
    computed_at: float = 0.0

    def encode(self, since: float) -> None:
        """Tokenizes the inputs; raises `InvalidRequest` if the answer would take too much memory."""
        way, model, options = self.way, self.model, self.options
        self.texts = way.encode(model.tokenizer, self.inputs, options, truncate=self.cut)
        self.tokens = sum([len(text.ids) for text in self.texts])
        if way.token_outputs:
            check_answer(self.tokens * way.token_numbers(options, model.manifest))
        self.tokenize_us = (time.perf_counter() - since) * 1e6

    def after_us(self) -> float:
        """Predicted time of finishing and of writing the numbers of the answer; 0 if it is short."""
        way, options, model = self.way, self.options, self.model
        if not way.token_outputs and len(self.texts) <= _FEW_TEXTS:
            return 0.0
        us = 0.0
        if way.after is not None:
            units = way.after(self.inputs, [len(text.ids) for text in self.texts], options, model.manifest)
            us = units * model.after_us.get(way.options, 0.0)
        if not self.request.as_bytes:
            numbers = self.tokens * way.token_numbers(options, model.manifest)
            us += (numbers + len(self.texts) * way.text_numbers(options, model.manifest)) * number_us()
        return us if us >= _INLINE_US else 0.0

    def finish(self, check: Check = go_on) -> A:
        model, rows = self.model, self.rows.rows
        return self.way.finish(
            Work(self.inputs, self.options, self.texts, rows, model.manifest, model.tokenizer, check)
        )


class Pipeline:
    """See the module."""

    def __init__(
        self,
        *,
        settings: Settings,
        repository: Repository,
        lifecycle: Lifecycle,
        dispatcher: Device[Any],
        cache: AnswerCache | None = None,
    ) -> None:
        self._settings = settings
        self._repository = repository
        self._lifecycle = lifecycle
        self._dispatcher = dispatcher
        self._cache = cache
        self._tokenizing = Tokenizing(dispatcher)
        self._users: Counter[ModelIndex] = Counter()
        self._after_us = 0.0

    async def infer(self, request: InferRequest[A]) -> Outcome[A]:
        """Answers a request, or raises the one error that its client gets; it holds no resources afterwards."""
        trace = request.trace
        if trace is not None:
            trace.decoded = time.perf_counter()
        if not self._lifecycle.accepting:
            raise self._lifecycle.refusal()
        way: TaskRoute[Any, A] = TASK_ROUTES[type(request.options)]
        model = self._repository.find(request.model, request.version, way.task)
        if trace is not None:
            trace.model = model.name
        check_count(len(request.inputs), self._settings.max_client_batch_size)
        facts = model.manifest
        way.check(request.options, facts)
        inputs, options, engineless = way.prepare(
            request.inputs, request.options, facts, request.prompt_name, request.input_type
        )
        cut = self._settings.auto_truncate if request.truncate is None else request.truncate
        sizes = way.sizes_bytes(model.tokenizer, inputs, options, truncate=cut)
        job = _Job(request, way, model, inputs, options, sizes, cut)
        self._users[model.index] += 1
        try:
            answer = await (self._looked_up(job) if engineless else self._computed(job))
        finally:
            self._users[model.index] -= 1
        total_us = (time.perf_counter() - request.arrival) * 1e6
        rows = job.rows
        outcome = Outcome(
            answer=answer,
            model=model.name,
            version=model.version,
            timings=Timings(job.tokenize_us, rows.queue_us, rows.compute_us, total_us),
            tokens=job.tokens,
            truncated_tokens=sum(map(_TRUNCATED, job.texts)),
            compute_type=self._repository.compute_type,
            cached=rows.cached,
            priority=request.priority or DEFAULT_PRIORITY,
            permit=job.permit,
        )
        if trace is not None:
            trace.add_outcome(outcome, rows.submitted, job.computed_at)
        return outcome

    def users(self, model: ModelIndex) -> int:
        """Requests of this process that use a model."""
        return self._users[model]

    async def _looked_up(self, job: _Job[A]) -> A:
        """The answer of a request that needs no engine."""

        def look_up() -> A:
            job.encode(time.perf_counter())
            return job.finish()

        answer = await self._tokenizing.read(job.model.tokenizer, sum(job.sizes), look_up)
        job.computed_at = time.perf_counter()
        return answer

    async def _computed(self, job: _Job[A]) -> A:
        """The engine's answer, or the cache's if it holds all rows of short texts.

        Short texts are tokenized before the request is admitted, unless work after the engine needs its deadline.
        """
        request, model, tokenizer, cache = job.request, job.model, job.model.tokenizer, self._cache
        started, after_us, permit = time.perf_counter(), 0.0, None
        is_inline = self._tokenizing.is_inline(tokenizer, sum(job.sizes))
        if is_inline:
            job.encode(started)
            if cache is not None and (rows := cache.recall(model.index, job.texts)) is not None:
                job.rows, job.computed_at = rows, time.perf_counter()
                return job.finish()
            after_us = job.after_us()
            if not after_us:
                priority = request.priority or DEFAULT_PRIORITY
                permit = self._dispatcher.permit(
                    model.index, job.tokens, len(job.texts), request.arrival, request.timeout_ms, priority
                )
        if permit is None:
            permit = await self._admit(job)
        job.permit = permit
        try:
            if not is_inline:
                await self._tokenizing.run(tokenizer, partial(job.encode, started), permit)
                after_us = job.after_us()
            if after_us:
                self._expect_after(job, permit, after_us)
            if cache is None:
                job.rows = await self._dispatcher.run(permit, job.texts)
            else:
                permit.reserve(job.tokens, time.perf_counter())  # it may wait for a row of another request
                job.rows = await cache.run(self._dispatcher, permit, job.texts, model.manifest.outputs)
            job.computed_at = time.perf_counter()
            if tokenizer.turn is not None:
                with self._until(permit) as check:
                    return await self._tokenizing.run(tokenizer, partial(job.finish, check), permit)
            if after_us or (job.way.token_outputs and job.tokens > _INLINE_TOKENS):
                return await self._in_thread(job.finish, permit)
            return job.finish()
        finally:
            self._after_us -= after_us
            permit.release()

    async def _admit(self, job: _Job[A]) -> Admitted:
        """Admits a request by an estimate."""
        request = job.request
        permit: Admitted = await self._dispatcher.admit(
            job.model.index,
            job.sizes,
            longest=None if job.way.windows(job.options) else job.model.manifest.max_length,
            arrival=request.arrival,
            timeout_ms=request.timeout_ms,
            priority=request.priority or DEFAULT_PRIORITY,
        )
        return permit

    def _expect_after(self, job: _Job[A], permit: Admitted, after_us: float) -> None:
        """Adds the work after the engine to what the permit confirms."""
        deadline = permit.deadline
        if job.request.timeout_ms is None:
            latest = job.request.arrival + self._settings.max_timeout_ms / 1e3
            deadline = max(deadline, min(latest, deadline + DEADLINE_COST_FACTOR * after_us / 1e6))
        permit.add_after(after_us, self._after_us, deadline)
        self._after_us += after_us

    async def write(self, outcome: Outcome[Any], numbers: int, work: Callable[[Check], R]) -> R:
        """Makes the reply from an answer, up to the request's deadline: in a thread if it has many numbers."""
        if numbers <= INLINE_NUMBERS:
            return work(go_on)
        after_us = numbers * number_us()
        self._after_us += after_us
        try:
            return await self._in_thread(work, outcome.permit)
        finally:
            self._after_us -= after_us

    async def _in_thread(self, work: Callable[[Check], R], permit: Admitted | None) -> R:
        """Does work after the engine in a thread.

        Raises `DeadlineExceeded` at the deadline. The thread then ends at the next block of its work, as it does if the
        client leaves.
        """
        with self._until(permit) as check:
            async with asyncio.timeout_at(check.deadline):
                return await asyncio.get_running_loop().run_in_executor(None, work, check)

    @contextmanager
    def _until(self, permit: Admitted | None) -> Iterator[Until]:
        """The check of work that must end with this block, and at the deadline."""
        check = Until() if permit is None else Until(permit.deadline)
        try:
            yield check
        except (EndedError, TimeoutError):
            raise (too_late("") if permit is None else self._dispatcher.missed(permit, "finish")) from None
        finally:
            check.left = True

    async def read(self, model: ServedModel, size: int, work: Callable[[TextTokenizer], R]) -> R:
        """Reads texts of `size` bytes with a model's tokenizer, as `Tokenizing.read`."""
        return await self._tokenizing.read(model.tokenizer, size, partial(work, model.tokenizer))


def check_count(count: int, most: int, listed: str = "the list of inputs") -> None:
    """Rejects no inputs, and more than `most`. `listed` is their list, for the message."""
    if not count:
        raise EmptyInput(f"{listed} is empty; send at least one", param="input")
    if count > most:
        raise too_many_inputs(count, most)


def check_not_empty(inputs: Sequence[object], field: str = "inputs") -> None:
    """Rejects an empty text, empty token ids, and a pair of two empty texts.

    Prompts make no difference, and a text of blanks is not empty.

    Raises:
        EmptyInput: One of the inputs is empty.
    """
    for empty in _EMPTY:
        if empty in inputs:
            raise empty_input(field, inputs.index(empty), len(inputs))
