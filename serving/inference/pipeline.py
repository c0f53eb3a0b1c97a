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
from bertserve.serving.records import BULK, DEFAULT_PRIORITY
from bertserve.serving.scheduling.admission import DEADLINE_COST_FACTOR, estimate_tokens
from bertserve.serving.tasks import WAYS
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
    from bertserve.serving.tasks.base import Check, Way

R = TypeVar("R")

_TRUNCATED = attrgetter("truncated")

_INLINE_BYTES = 2048
"""Maximum size of texts that are tokenized on the event loop (about a millisecond); a thread hop costs more."""

_INLINE_TOKENS = 1024
"""Maximum tokens that a task with outputs per token finishes on the event loop (about a millisecond)."""

INLINE_NUMBERS = 32_768
"""Maximum numbers of an answer that are written on the event loop (about a millisecond)."""

_INLINE_US = 1000.0
"""Minimum predicted time of work after the engine that counts in admission, and that needs a thread."""

_FEW_TEXTS = 8
"""Maximum texts of a request whose work after the engine is not predicted, if it does not grow with their tokens."""

_EMPTY: Sequence[object] = ("", [], ("", ""))


class _Job(msgspec.Struct, Generic[A], frozen=True):
    """A validated request.

    Attributes:
        sizes: Sizes of its inputs, in bytes.
        cut: Whether inputs that are too long are truncated.
    """

    request: InferRequest[A]
    way: Way[Any, A]
    model: ServedModel
    inputs: Sequence[TextInput]
    sizes: Sequence[int]
    cut: Truncate

    def encode(self) -> Sequence[EncodedText]:
        """The texts for the engine; raises `InvalidRequest` if the answer would take too much memory."""
        way, model, options = self.way, self.model, self.request.options
        if way.encode is None:
            texts: Sequence[EncodedText] = model.tokenizer.encode(self.inputs, truncate=self.cut)
        else:
            texts = way.encode(model.tokenizer, self.inputs, options, truncate=self.cut)
        if way.token_outputs:
            check_answer(_tokens(texts) * way.token_numbers(options, model.manifest))
        return texts

    def after_us(self, texts: Sequence[EncodedText]) -> float:
        """Predicted time of the work after the engine: finishing, and writing the numbers of the answer."""
        way, options, model = self.way, self.request.options, self.model
        lengths = [len(text.ids) for text in texts]
        us = 0.0
        if way.after is not None:
            units = way.after(self.inputs, lengths, options, model.manifest)
            us = units * model.after_us.get(way.options, 0.0)
        if not self.request.as_bytes:
            numbers = sum(lengths) * way.token_numbers(options, model.manifest)
            us += (numbers + len(texts) * way.text_numbers(options, model.manifest)) * number_us()
        return us

    def finish(self, texts: Sequence[EncodedText], rows: Rows, check: Check = go_on) -> A:
        model = self.model
        return self.way.finish(
            Work(self.inputs, self.request.options, texts, rows.result(), model.manifest, model.tokenizer, check)
        )


class _Done(msgspec.Struct, Generic[A], frozen=True):
    """An answered request. `computed_at` is in seconds of the clock."""

    texts: Sequence[EncodedText]
    tokenize_us: float
    rows: Rows
    tokens: int
    computed_at: float
    answer: A
    permit: Admitted | None = None


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
        self._tokenizer_turn = asyncio.Lock()
        self._bulk_turn = asyncio.Lock()
        self._users: Counter[ModelIndex] = Counter()
        self._after_us = 0.0

    async def infer(self, request: InferRequest[A]) -> Outcome[A]:
        """Answers a request, or raises the one error that its client gets; it holds no resources afterwards."""
        trace = request.trace
        if trace is not None:
            trace.decoded = time.perf_counter()
        if not self._lifecycle.accepting:
            raise self._lifecycle.refusal()
        way: Way[Any, A] = WAYS[type(request.options)]
        model = self._repository.find(request.model, request.version, way.task)
        if trace is not None:
            trace.model = model.name
        check_count(len(request.inputs), self._settings.max_client_batch_size)
        engineless = False
        if way.for_side is not None:
            request.options = way.for_side(request.options, request.input_type or request.prompt_name)
            engineless = way.engineless(request.options, model.manifest)
        way.check(request.options, model.manifest)
        prompted: Callable[..., Sequence[TextInput]]
        prompted = model.with_prompt_apart if way.prompt_apart else model.prompted
        if way.prompts_by_side:
            prompted = model.with_prompts_by_side
        inputs = prompted(request.inputs, request.prompt_name, request.input_type)
        if way.expand is not None:
            inputs = way.expand(inputs, request.options)
        cut = self._settings.auto_truncate if request.truncate is None else request.truncate
        sizes = way.sizes_bytes(model.tokenizer, inputs, request.options, truncate=cut)
        job = _Job(request, way, model, inputs, sizes, cut)
        self._users[model.index] += 1
        try:
            if engineless:
                done = await self._tokenized(job)
            else:
                done = await (self._computed(job) if self._cache is None else self._recalled(job, self._cache))
        finally:
            self._users[model.index] -= 1
        total_us = (time.perf_counter() - request.arrival) * 1e6
        rows = done.rows
        outcome = Outcome(
            answer=done.answer,
            model=model.name,
            version=model.version,
            timings=Timings(done.tokenize_us, rows.queue_us, rows.compute_us, total_us),
            tokens=done.tokens,
            truncated_tokens=sum(map(_TRUNCATED, done.texts)),
            compute_type=self._repository.compute_type,
            cached=rows.cached,
            priority=request.priority or DEFAULT_PRIORITY,
            permit=done.permit,
        )
        if trace is not None:
            trace.add_outcome(outcome, rows.submitted, done.computed_at)
        return outcome

    def users(self, model: ModelIndex) -> int:
        """Requests of this process that use a model."""
        return self._users[model]

    async def _recalled(self, job: _Job[A], cache: AnswerCache) -> _Done[A]:
        """Answers from the cache if it holds all rows, without admission control; otherwise computes the answer."""
        if job.model.tokenizer.turn is not None or sum(job.sizes) > _INLINE_BYTES:
            return await self._computed(job)
        started = time.perf_counter()
        texts = job.encode()
        tokenize_us = (time.perf_counter() - started) * 1e6
        rows = cache.recall(job.model.index, texts)
        if rows is None:
            return await self._computed(job, texts, tokenize_us)
        return _Done(texts, tokenize_us, rows, _tokens(texts), time.perf_counter(), job.finish(texts, rows))

    async def _computed(
        self, job: _Job[A], texts: Sequence[EncodedText] | None = None, tokenize_us: float = 0.0
    ) -> _Done[A]:
        """The engine's answer; `texts` and `tokenize_us` are given if the inputs are already tokenized."""
        request, model, sizes = job.request, job.model, job.sizes
        longest = None if job.way.windows(request.options) else model.manifest.max_length
        with self._dispatcher.admit(
            model.index,
            sizes,
            longest=longest,
            arrival=request.arrival,
            timeout_ms=request.timeout_ms,
            priority=request.priority or DEFAULT_PRIORITY,
            now=time.perf_counter(),
        ) as permit:
            if texts is None:
                short = sum(sizes) <= _INLINE_BYTES and model.tokenizer.turn is None
                if permit.must_ask(short=short):
                    await permit.ask()
                started = time.perf_counter()
                if short:
                    texts = job.encode()
                else:
                    permit.expect(sizes, longest)
                    texts = await self._in_turn(job.encode, permit, model.tokenizer.turn)
                    permit.expect_no_more()
                tokenize_us = (time.perf_counter() - started) * 1e6
            after_us = 0.0
            if job.way.token_outputs or len(texts) > _FEW_TEXTS:
                after_us = await self._expect_after(job, texts, permit)
            rows: Rows
            try:
                if self._cache is None:
                    rows = await self._dispatcher.run(permit, texts)
                    tokens = permit.tokens
                else:
                    rows = await self._cache.run(self._dispatcher, permit, texts, model.manifest.outputs)
                    tokens = _tokens(texts)
                computed_at = 0.0 if request.trace is None else time.perf_counter()
                if model.tokenizer.turn is not None:
                    with self._until(permit) as check:
                        finish = partial(job.finish, texts, rows, check)
                        answer = await self._in_turn(finish, permit, model.tokenizer.turn)
                elif after_us or (job.way.token_outputs and tokens > _INLINE_TOKENS):
                    answer = await self._in_thread(partial(job.finish, texts, rows), permit)
                else:
                    answer = job.finish(texts, rows)
            finally:
                if after_us:
                    self._after_us -= after_us
        return _Done(texts, tokenize_us, rows, tokens, computed_at, answer, permit)

    async def _expect_after(self, job: _Job[A], texts: Sequence[EncodedText], permit: Admitted) -> float:
        """Adds the work after the engine to what the permit confirms, and returns its time; 0 if it is short."""
        after_us = job.after_us(texts)
        if after_us < _INLINE_US:
            return 0.0
        if permit.must_ask(short=False):
            await permit.ask()
        deadline = permit.deadline
        if job.request.timeout_ms is None:
            latest = job.request.arrival + self._settings.max_timeout_ms / 1e3
            deadline = max(deadline, min(latest, deadline + DEADLINE_COST_FACTOR * after_us / 1e6))
        permit.add_after(after_us, self._after_us, deadline)
        self._after_us += after_us
        return after_us

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

    async def _tokenized(self, job: _Job[A]) -> _Done[A]:
        """The answer of a request that needs no engine."""
        rows = CachedRows((), cached=False)

        def run(_: TextTokenizer) -> tuple[Sequence[EncodedText], float, A]:
            started = time.perf_counter()
            texts = job.encode()
            tokenize_us = (time.perf_counter() - started) * 1e6
            return texts, tokenize_us, job.finish(texts, rows)

        texts, tokenize_us, answer = await self.read(job.model, sum(job.sizes), run)
        return _Done(texts, tokenize_us, rows, _tokens(texts), time.perf_counter(), answer)

    async def read(self, model: ServedModel, size: int, work: Callable[[TextTokenizer], R]) -> R:
        """Reads texts with a model's tokenizer: inline if they are short, otherwise in a thread.

        `size` is in bytes. The estimated tokens count as in flight meanwhile. Raises `Overloaded` if too many are.
        """
        turn = model.tokenizer.turn
        if size <= _INLINE_BYTES and turn is None:
            return work(model.tokenizer)
        with self._dispatcher.reserve(estimate_tokens([size], None), time.perf_counter()) as permit:
            if permit.must_ask(short=False):
                await permit.ask()
            return await self._in_turn(lambda: work(model.tokenizer), permit, turn)

    async def _in_turn(self, work: Callable[[], R], permit: Admitted, turn: asyncio.Lock | None = None) -> R:
        """Tokenizes in a thread, one request at a time; raises `DeadlineExceeded` if its turn comes after the deadline.

        Bulk work has a turn of its own, because one request of it may take a second. A tokenizer in a process of its
        own has its own `turn`.
        """
        turn = turn or (self._bulk_turn if permit.priority == BULK else self._tokenizer_turn)
        try:
            async with asyncio.timeout_at(permit.deadline):
                await turn.acquire()
        except TimeoutError:
            raise self._dispatcher.missed(permit) from None
        # The thread releases the turn, because it continues after the client leaves; otherwise others would run beside
        # it.
        running = asyncio.get_running_loop().run_in_executor(None, work)
        running.add_done_callback(lambda _: turn.release())
        return await asyncio.shield(running)


def _tokens(texts: Sequence[EncodedText]) -> int:
    return sum([len(text.ids) for text in texts])


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
