"""The lines of batches, answered as `/v1/embeddings` answers them, in pieces that hold no engine for long."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import orjson

from serving.bulk.batches_api.lines import Answer
from serving.http.apis.openai import EMBEDDINGS, embed_inputs, embeddings_of, inputs_of, usage_of
from serving.http.exchange import JSON, HttpRequest
from serving.http.faults import error_body, status_of
from serving.records import BULK

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from serving.bulk.batches_api.runner import Retry
    from serving.errors import BertserveError
    from serving.http.api import Api
    from serving.http.apis.openai_messages import EmbeddingsRequest
    from serving.inference.requests import Outcome

PATH = "/v1/embeddings"

_PIECE_TEXTS = 32
_OK = 200
_BULK = str(BULK).encode()


class EmbeddingLines:
    """Answers lines through the pipeline, as bulk work."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._headers = {b"content-type": JSON, b"x-request-priority": _BULK}

    async def prepare(self, line_id: str, body: bytes) -> EmbeddingLine:
        """See `Endpoint`."""
        http = HttpRequest("POST", PATH, self._headers, body, line_id, time.perf_counter())
        http.refuses_unknown = self._api.refuses_unknown
        message = await http.json(EMBEDDINGS, self._api.turn)
        name, inputs = await inputs_of(self._api, message)
        http.body = b""
        # A line of too many inputs, or of none, is asked in one piece: it gets the pipeline's own refusal.
        size = _PIECE_TEXTS if len(inputs) <= self._api.settings.max_openai_batch_size else len(inputs)
        pieces = [inputs[at : at + size] for at in range(0, max(1, len(inputs)), max(1, size))]
        return EmbeddingLine(self._api, http, message, name, pieces)

    def refusal(self, line_id: str, error: BertserveError) -> Answer:
        """See `Endpoint`."""
        body = error_body(PATH, error, line_id)
        return Answer(status_of(PATH, error), lambda: [body])


@dataclass(frozen=True, slots=True)
class EmbeddingLine:
    """A line that was understood."""

    api: Api
    http: HttpRequest
    message: EmbeddingsRequest
    model: str | None
    pieces: Sequence[Sequence[str | list[int]]]

    @property
    def texts(self) -> int:
        return sum(map(len, self.pieces))

    async def answer(self, retry: Retry) -> Answer:
        """See `Prepared`. A version that takes over meanwhile answers all of the line: no answer mixes two."""
        while True:
            outcomes = await self._once(retry)
            if len({outcome.version for outcome in outcomes}) == 1:
                return Answer(_OK, partial(self._body, outcomes), self.http.ignored)

    async def _once(self, retry: Retry) -> Sequence[Outcome[NDArray[np.float32]]]:
        tasks = [asyncio.ensure_future(retry(partial(self._embed, piece), len(piece))) for piece in self.pieces]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _embed(self, piece: Sequence[str | list[int]]) -> Outcome[NDArray[np.float32]]:
        http = msgspec.structs.replace(self.http, arrival=time.perf_counter())
        return await embed_inputs(self.api, http, self.message, self.model, piece)

    def _body(self, outcomes: Sequence[Outcome[NDArray[np.float32]]]) -> Iterable[bytes]:
        """The body in pieces, each made when the one before has been written."""
        yield b'{"object":"list","data":['
        first = 0
        for outcome in outcomes:
            rows = embeddings_of(outcome, self.message, first)
            first += len(rows)
            yield (b"," if first > len(rows) else b"") + orjson.dumps(rows, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
        yield b"]," + orjson.dumps({"model": outcomes[0].model, "usage": usage_of(outcomes)})[1:]
