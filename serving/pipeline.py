"""The life of a request, knowing no protocol: admit, tokenise, queue, compute, finish, record."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from serving.errors import BertserveError, EmptyInput, InvalidRequest
from serving.records import Outcome, Timings
from serving.scheduling.admission import estimate_tokens
from serving.tasks import embed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.dispatch import Dispatcher
    from serving.lifecycle import Lifecycle
    from serving.records import EncodedText, InferRequest, TextInput
    from serving.repository import Repository, ServedModel
    from serving.scheduling.admission import Admission
    from serving.scheduling.cost import CostTable
    from serving.settings import Settings
    from serving.telemetry.metrics import Metrics

_INLINE_BYTES = 2048
"""Texts up to this size are tokenised on the event loop (about a millisecond); a thread hop costs more."""

_DEADLINE_COST_FACTOR = 3.0


class Pipeline:
    """Carries requests from a transport to the engine and back."""

    def __init__(
        self,
        *,
        settings: Settings,
        repository: Repository,
        lifecycle: Lifecycle,
        admission: Admission,
        dispatcher: Dispatcher,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._repository = repository
        self._lifecycle = lifecycle
        self._admission = admission
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._tokenizers = asyncio.Semaphore(1)
        self.costs: Sequence[CostTable] = ()

    async def infer(self, request: InferRequest) -> Outcome:
        """Answers a request, or raises the one error that its client gets.

        Raises:
            BertserveError: See `errors`; the request holds nothing any more.
        """
        self._lifecycle.check_accepting()
        model = self._repository.find(request.model, request.version)
        _check_count(request)
        embed.check(request.options, model.manifest.hidden_size)
        inputs = _with_prompt(request, model)
        size = model.tokenizer.size_bytes(inputs)
        with self._admission.acquire(estimate_tokens(size, len(inputs))) as permit:
            started = time.perf_counter()
            texts = await self._encode(model, inputs, size, truncate=request.truncate)
            tokenize_us = (time.perf_counter() - started) * 1e6
            tokens = sum(len(text.ids) for text in texts)
            permit.resize(tokens)
            ticket = await self._dispatcher.run(model.index, texts, self._deadline(request, model, texts))
        vectors = embed.finish(ticket.result(), request.options)
        total_us = (time.perf_counter() - request.arrival) * 1e6
        outcome = Outcome(
            vectors=vectors,
            model=model.name,
            version=model.version,
            timings=Timings(tokenize_us, ticket.queue_us, ticket.compute_us, total_us),
            tokens=tokens,
            truncated_tokens=sum(text.truncated for text in texts),
        )
        # After the reply, not before it: the client waits for one of them only.
        asyncio.get_running_loop().call_soon(self._metrics.answered, outcome)
        return outcome

    def refused(self, error: BertserveError) -> None:
        """Records a request that a transport answers with an error."""
        self._metrics.refused(error.reason)

    async def _encode(
        self, model: ServedModel, inputs: Sequence[TextInput], size: int, *, truncate: bool | None
    ) -> list[EncodedText]:
        cut = self._settings.auto_truncate if truncate is None else truncate
        if size <= _INLINE_BYTES:
            return model.tokenizer.encode(inputs, truncate=cut)
        async with self._tokenizers:
            return await asyncio.to_thread(model.tokenizer.encode, inputs, truncate=cut)

    def _deadline(self, request: InferRequest, model: ServedModel, texts: Sequence[EncodedText]) -> float:
        timeout_ms = request.timeout_ms
        if timeout_ms is None:
            cost = self.costs[model.index] if self.costs else None
            predicted_us = sum(cost.alone_us(len(text.ids)) for text in texts) if cost else 0.0
            timeout_ms = max(self._settings.default_timeout_ms, _DEADLINE_COST_FACTOR * predicted_us / 1e3)
        elapsed_s = time.perf_counter() - request.arrival
        return asyncio.get_running_loop().time() - elapsed_s + min(timeout_ms, self._settings.max_timeout_ms) / 1e3


def _check_count(request: InferRequest) -> None:
    if not request.inputs:
        raise EmptyInput("the list of inputs is empty; send at least one")
    if len(request.inputs) > request.max_inputs:
        raise InvalidRequest(f"{len(request.inputs)} inputs in one request; at most {request.max_inputs} are taken")


def _with_prompt(request: InferRequest, model: ServedModel) -> Sequence[TextInput]:
    if request.prompt_name is None:
        return request.inputs
    prompt = model.manifest.prompts.get(request.prompt_name)
    if prompt is None:
        known = ", ".join(sorted(model.manifest.prompts)) or "none"
        raise InvalidRequest(f"`prompt_name` is not a prompt of this model (it has: {known})")
    if not all(isinstance(value, str) for value in request.inputs):
        raise InvalidRequest("`prompt_name` needs texts as inputs")
    return [f"{prompt}{value}" for value in request.inputs]
