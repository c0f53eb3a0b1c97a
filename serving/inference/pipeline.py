"""The life of a request, knowing no protocol: admit, tokenise, queue, compute, finish, record."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, TypeVar

from serving.errors import EmptyInput, InvalidRequest
from serving.inference.tasks import TASKS
from serving.inference.tasks.base import Work
from serving.records import Outcome, Timings
from serving.scheduling.admission import estimate_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from serving.inference.dispatcher import Dispatcher
    from serving.inference.served_models import Repository, ServedModel
    from serving.inference.tasks.base import Task
    from serving.inference.tokenizer import TextTokenizer
    from serving.lifecycle import Lifecycle
    from serving.records import A, EncodedText, InferRequest, ModelIndex, TextInput, Totals
    from serving.settings import Settings
    from serving.telemetry.metrics import Metrics

R = TypeVar("R")

_INLINE_BYTES = 2048
"""Texts up to this size are tokenised on the event loop (about a millisecond); a thread hop costs more."""

_INLINE_TOKENS = 1024
"""A task that looks at every token finishes so many of them on the event loop (about a millisecond)."""

_DEADLINE_COST_FACTOR = 3.0


class Pipeline:
    """Carries requests from a transport to the engine and back."""

    def __init__(
        self,
        *,
        settings: Settings,
        repository: Repository,
        lifecycle: Lifecycle,
        dispatcher: Dispatcher,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._repository = repository
        self._lifecycle = lifecycle
        self._dispatcher = dispatcher
        self._scheduler = dispatcher.scheduler
        self._metrics = metrics
        self._tokenizers = asyncio.Semaphore(1)
        self._users: Counter[ModelIndex] = Counter()

    async def infer(self, request: InferRequest[A]) -> Outcome[A]:
        """Answers a request, or raises the one error that its client gets.

        Raises:
            BertserveError: See `errors`; the request holds nothing any more.
        """
        trace = request.trace
        if trace is not None:
            trace.decoded = time.perf_counter()
        self._lifecycle.check_accepting()
        task: Task[Any, A] = TASKS[type(request.options)]
        model = self._repository.find(request.model, request.version, task.name)
        _check_count(request)
        task.check(request.options, model.manifest)
        inputs = request.inputs if request.prompt_name is None else model.prompted(request.inputs, request.prompt_name)
        size = task.size_bytes(model.tokenizer, inputs)
        self._users[model.index] += 1
        try:
            with self._scheduler.admission.acquire(estimate_tokens(size, len(inputs))) as permit:
                if self._scheduler.crowded:
                    self._check_estimate(request, model, _cautious_lengths(task, model, size, len(inputs)))
                started = time.perf_counter()
                texts = await self._encode(task, request, model, inputs, size)
                tokenize_us = (time.perf_counter() - started) * 1e6
                lengths = [len(text.ids) for text in texts]
                tokens = sum(lengths)
                permit.resize(tokens)
                deadline = self._deadline(request, model, lengths)
                ticket = await self._dispatcher.run(model.index, texts, deadline, request.priority)
                computed = 0.0 if trace is None else time.perf_counter()
                work = Work(inputs, request.options, texts, ticket.result(), model.manifest, model.tokenizer)
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
            timings=Timings(tokenize_us, ticket.queue_us, ticket.compute_us, total_us),
            tokens=tokens,
            truncated_tokens=sum([text.truncated for text in texts]),
        )
        if trace is not None:
            trace.answered(outcome, ticket.submitted, computed)
        # After the reply, not before it: the client waits for one of them only.
        asyncio.get_running_loop().call_soon(self._metrics.answered, outcome)
        return outcome

    def users(self, model: ModelIndex) -> int:
        """Requests under way that have found this model."""
        return self._users[model]

    def totals(self, model: ServedModel) -> Totals:
        """What a version of a model has answered since the server started."""
        return self._metrics.totals[model.name, model.version]

    def batches(self, model: ServedModel) -> int:
        """Batches of a model that engines were given since the server started."""
        return self._metrics.batches(model)

    async def read(self, model: ServedModel, size: int, work: Callable[[TextTokenizer], R]) -> R:
        """Lets something read texts with a model's tokenizer: at once if short, else in its turn in a thread.

        Args:
            model: Whose tokenizer.
            size: Bytes to be read; they count as tokens under way while this takes.
            work: What to do.

        Raises:
            Overloaded: Too much is under way.
        """
        if size <= _INLINE_BYTES:
            return work(model.tokenizer)
        with self._scheduler.admission.acquire(estimate_tokens(size, 1)):
            async with self._tokenizers:
                return await asyncio.to_thread(work, model.tokenizer)

    def _check_estimate(self, request: InferRequest[A], model: ServedModel, lengths: Sequence[int]) -> None:
        """Refuses before tokenising what would be refused after it: under overload that is nearly everything."""
        demand = self._scheduler.demand(model.index, lengths)
        deadline = self._deadline(request, model, lengths)
        self._scheduler.check(demand, request.priority, deadline, time.perf_counter())

    async def _encode(
        self, task: Task[Any, A], request: InferRequest[A], model: ServedModel, inputs: Sequence[TextInput], size: int
    ) -> Sequence[EncodedText]:
        cut = self._settings.auto_truncate if request.truncate is None else request.truncate
        if size <= _INLINE_BYTES:
            return task.encode(model.tokenizer, inputs, request.options, truncate=cut)
        with self._scheduler.expecting(model.index, _cautious_lengths(task, model, size, len(inputs))):
            async with self._tokenizers:
                return await asyncio.to_thread(task.encode, model.tokenizer, inputs, request.options, truncate=cut)

    def _deadline(self, request: InferRequest[A], model: ServedModel, lengths: Sequence[int]) -> float:
        """When the answer becomes useless, on the clock of `request.arrival`."""
        timeout_ms = request.timeout_ms
        if timeout_ms is None:
            predicted_us = self._scheduler.plain_cost_us(model.index, lengths)
            timeout_ms = max(self._settings.default_timeout_ms, _DEADLINE_COST_FACTOR * predicted_us / 1e3)
        return request.arrival + min(timeout_ms, self._settings.max_timeout_ms) / 1e3


def _cautious_lengths(task: Task[Any, A], model: ServedModel, size_bytes: int, inputs: int) -> list[int]:
    """The lengths that texts of so many bytes have at least: half the estimate, below which few fall."""
    length = max(1, estimate_tokens(size_bytes, inputs) // (2 * inputs))
    return [length if task.windows else min(length, model.manifest.max_length)] * inputs


def _check_count(request: InferRequest[A]) -> None:
    if not request.inputs:
        raise EmptyInput("the list of inputs is empty; send at least one")
    if len(request.inputs) > request.max_inputs:
        raise InvalidRequest(f"{len(request.inputs)} inputs in one request; at most {request.max_inputs} are taken")
