"""Answers that were computed before, and answers that are being computed for another request.

A text's rows depend on its token ids, its segments and what computes them. So a row is kept by the version of a model
and its ids, whatever prompt, protocol and options brought them, and only until other versions or engines take over.
Texts themselves are not kept.
"""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from typing import TYPE_CHECKING, NamedTuple

from moka_py import Moka

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from serving.inference.dispatcher import Dispatcher
    from serving.records import EncodedText, ModelIndex, Row, TensorSpec
    from serving.scheduling.admission import Permit

    Key = tuple[int, bytes, bytes]

_ENTRY_BYTES = 600
"""What an entry takes beside its ids and its numbers: its objects here, and in the library."""

_ARRAY_BYTES = 130
"""Likewise each array of its row."""


_ID_BYTES = array("i").itemsize


class CachedRows(NamedTuple):
    """As a `PendingRequest` that is answered; `submitted` is 0 where no text was queued."""

    rows: Sequence[Row]
    queue_us: float = 0.0
    compute_us: float = 0.0
    submitted: float = 0.0
    cached: bool = True

    def result(self) -> Sequence[Row]:
        return self.rows


class _Claim(NamedTuple):
    """A text that is being computed; its row is None where the request that computes it got none."""

    row: asyncio.Future[Row | None]
    priority: int


class AnswerCache:
    """Rows by model and token ids; the least wanted go first (W-TinyLFU, arXiv 1512.00727).

    Attributes:
        texts: How many texts were found here (`hit`), waited for another request's (`shared`), or were computed
            (`miss`).
    """

    def __init__(self, most_bytes: int) -> None:
        self.texts = {"hit": 0, "shared": 0, "miss": 0}
        self._rows: Moka[Key, Row] = Moka(most_bytes, weigher=_weight)
        self._computing: dict[Key, _Claim] = {}
        self._generation = 0

    @property
    def used_bytes(self) -> int:
        self._rows.run_pending_tasks()
        return self._rows.weighted_size()

    def clear(self) -> None:
        """Forgets everything; what is being computed is not kept either."""
        self._generation += 1
        self._rows.clear()
        self._computing.clear()

    def find(self, model: ModelIndex, texts: Sequence[EncodedText]) -> CachedRows | None:
        """The answer, if the rows of all texts are here."""
        rows: list[Row] = []
        for text in texts:
            row = self._rows.get(_key(model, text))
            if row is None:
                return None
            rows.append(row)
        self.texts["hit"] += len(rows)
        return CachedRows(rows)

    async def run(
        self, dispatcher: Dispatcher, permit: Permit, texts: Sequence[EncodedText], outputs: Sequence[TensorSpec]
    ) -> CachedRows:
        """As `Dispatcher.run`, which is given only what is neither here nor being computed; `outputs` are the model's.

        A request that waits for another's computation keeps its own deadline. Where the other one fails, is late or
        loses its client, the texts are computed for those that wait. A request does not wait for a later class.
        """
        keys = [_key(permit.model, text) for text in texts]
        by_key = dict(zip(keys, texts, strict=True))
        rows: dict[Key, Row] = {}
        queue_us = compute_us = submitted = 0.0
        cached = True
        while missing := [key for key in by_key if key not in rows]:
            mine: list[Key] = []
            others: dict[Key, asyncio.Future[Row | None]] = {}
            for key in missing:
                if (row := self._rows.get(key)) is not None:
                    rows[key] = row
                    self.texts["hit"] += 1
                elif (claim := self._computing.get(key)) is not None and claim.priority <= permit.priority:
                    others[key] = claim.row
                else:
                    mine.append(key)
            if mine:
                with self._claimed(mine, permit.priority, outputs) as keep:
                    pending = await dispatcher.run(permit, [by_key[key] for key in mine])
                    keep(pending.result())
                rows |= zip(mine, pending.result(), strict=True)
                queue_us, compute_us = max(queue_us, pending.queue_us), max(compute_us, pending.compute_us)
                submitted, cached = submitted or pending.submitted, False
                self.texts["miss"] += len(mine)
            for key, future in others.items():
                if (row := await _awaited(future, dispatcher, permit.deadline)) is not None:
                    rows[key] = row
                    self.texts["shared"] += 1
        return CachedRows([rows[key] for key in keys], queue_us, compute_us, submitted, cached)

    @contextlib.contextmanager
    def _claimed(
        self, keys: Sequence[Key], priority: int, outputs: Sequence[TensorSpec]
    ) -> Iterator[Callable[[Sequence[Row]], None]]:
        """Lets other requests wait for these rows, which are handed to what this yields; if not, they are told so."""
        loop = asyncio.get_running_loop()
        claims = {key: _Claim(loop.create_future(), priority) for key in keys}
        generation = self._generation
        self._computing |= claims

        def keep(rows: Sequence[Row]) -> None:
            for (key, claim), row in zip(claims.items(), rows, strict=True):
                own = _own(row, len(key[1]) // _ID_BYTES, outputs)
                if generation == self._generation:
                    self._rows.set(key, own)
                claim.row.set_result(own)

        try:
            yield keep
        finally:
            for key, claim in claims.items():
                if self._computing.get(key) is claim:
                    del self._computing[key]
                if not claim.row.done():
                    claim.row.set_result(None)


async def _awaited(future: asyncio.Future[Row | None], dispatcher: Dispatcher, deadline: float) -> Row | None:
    """Another request's row, or None where it got none; raises `DeadlineExceeded` if that takes too long."""
    try:
        async with asyncio.timeout_at(deadline):
            return await asyncio.shield(future)
    except TimeoutError:
        raise dispatcher.missed() from None


def _key(model: ModelIndex, text: EncodedText) -> Key:
    return model, text.ids.tobytes(), b"" if text.type_ids is None else text.type_ids.tobytes()


def _own(row: Row, tokens: int, outputs: Sequence[TensorSpec]) -> Row:
    """A copy that no one can change, without what padding added.

    A row is a view of its whole batch, which would stay in memory with it. Where it varies in length it has a line for
    each token, or fewer (`graph_outputs`).
    """
    copies = [(part[:tokens] if spec.shape[1] < 0 else part).copy() for part, spec in zip(row, outputs, strict=True)]
    for copy in copies:
        copy.setflags(write=False)
    return tuple(copies)


def _weight(key: Key, row: Row) -> int:
    _, ids, types = key
    return _ENTRY_BYTES + len(ids) + len(types) + sum(_ARRAY_BYTES + part.nbytes for part in row)
