"""Lines of batch files: the routes that answer them, through the pipeline as bulk work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from serving.bulk.batches_api.lines import Answer
from serving.http.exchange import JSON, HttpRequest
from serving.http.faults import error_body, status_of
from serving.records import BULK
from serving.tasks.base import A

if TYPE_CHECKING:
    from serving.bulk.batches_api.runner import Retry
    from serving.errors import BertserveError
    from serving.http.app_context import AppContext
    from serving.http.exchange import JsonDecoder
    from serving.inference.requests import Outcome
    from serving.settings import Settings

M = TypeVar("M", bound=msgspec.Struct)
Inputs = Sequence[str | list[int]]

_PIECE_TEXTS = 32
_LARGE = 16
"""A text whose answer is large counts as so many, so that fewer answers wait to be written."""
_OK = 200
_BULK = str(BULK).encode()


@dataclass(frozen=True, slots=True)
class LineRoute(Generic[M, A]):
    """A route whose requests can be the lines of a batch file.

    Attributes:
        most: Maximum inputs of a request.
        read: The model's name and the inputs of a message.
        infer: Answers all inputs of a message, or some of them.
        body: The reply in pieces, each made after the previous one has been written.
        is_whole: Whether a message must be answered by one request, whose answer has a limit: vectors of tokens are
            large, and all pieces of a line are held until the last is answered.
    """

    path: str
    decoder: JsonDecoder[M]
    most: Callable[[Settings], int]
    read: Callable[[AppContext, M], Awaitable[tuple[str | None, Inputs]]]
    infer: Callable[[AppContext, HttpRequest, M, str | None, Inputs], Awaitable[Outcome[A]]]
    body: Callable[[Sequence[Outcome[A]], M], Iterable[bytes]]
    is_whole: Callable[[M], bool] = lambda _: False


class BatchLines(Generic[M, A]):
    """Answers a batch's lines."""

    def __init__(self, context: AppContext, route: LineRoute[M, A]) -> None:
        self._context, self._route = context, route
        self._headers = {b"content-type": JSON, b"x-request-priority": _BULK}

    async def prepare(self, line_id: str, body: bytes) -> BatchLine[M, A]:
        """See `Endpoint`."""
        route = self._route
        http = HttpRequest("POST", route.path, self._headers, body, line_id, time.perf_counter())
        message = await http.json(route.decoder, self._context.large_body_lock)
        name, inputs = await route.read(self._context, message)
        http.body = b""
        # A line with too many inputs or none is sent in one piece, to get the pipeline's own error.
        is_whole = route.is_whole(message)
        in_one = is_whole or len(inputs) > route.most(self._context.settings)
        size = len(inputs) if in_one else _PIECE_TEXTS
        pieces = [inputs[at : at + size] for at in range(0, max(1, len(inputs)), max(1, size))]
        return BatchLine(self._context, route, http, message, name, pieces, is_whole)

    def refusal(self, line_id: str, error: BertserveError) -> Answer:
        """See `Endpoint`."""
        body = error_body(self._route.path, error, line_id)
        return Answer(status_of(self._route.path, error), lambda: [body])


@dataclass(frozen=True, slots=True)
class BatchLine(Generic[M, A]):
    """A parsed line."""

    context: AppContext
    route: LineRoute[M, A]
    http: HttpRequest
    message: M
    model: str | None
    pieces: Sequence[Inputs]
    is_whole: bool = False

    @property
    def texts(self) -> int:
        return sum(map(len, self.pieces)) * (_LARGE if self.is_whole else 1)

    async def answer(self, retry: Retry) -> Answer:
        """See `Prepared`. Repeats the line if a new version took over in between: an answer never mixes versions."""
        while True:
            outcomes = await self._once(retry)
            if len({outcome.version for outcome in outcomes}) == 1:
                return Answer(_OK, partial(self.route.body, outcomes, self.message), self.http.ignored)

    async def _once(self, retry: Retry) -> Sequence[Outcome[A]]:
        tasks = [asyncio.ensure_future(retry(partial(self._infer, piece), len(piece))) for piece in self.pieces]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _infer(self, piece: Inputs) -> Outcome[A]:
        http = msgspec.structs.replace(self.http, arrival=time.perf_counter())
        return await self.route.infer(self.context, http, self.message, self.model, piece)
