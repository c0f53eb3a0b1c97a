"""Caches answers, and shares answers that are being computed for another request.

A row depends on a text's token ids, its token types and the engine that computes it. The cache key is the version of a
model and the token ids and types, so prompts, protocols and options share entries. The cache is cleared when other
versions or engines take over. Texts are not stored.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

from moka_py import Moka

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bertserve.serving.inference.device import Admitted, Device, Rows
    from bertserve.serving.records import EncodedText, ModelIndex, Row, TensorSpec

    Key = tuple[int, bytes, bytes]

_ENTRY_BYTES = 600
"""Overhead of an entry beside its ids and numbers: objects in Python and in the cache library."""

_ARRAY_BYTES = 130
"""Overhead of each array of a row."""


class CachedRows(NamedTuple):
    """Stands for an answered `PendingRequest`; `submitted` is 0 if no text was queued."""

    rows: Sequence[Row]
    queue_us: float = 0.0
    compute_us: float = 0.0
    submitted: float = 0.0
    cached: bool = True


class _Claim:
    """A text that one request computes and others may wait for.

    `tokens` counts all texts of that request, because they finish together.
    """

    __slots__ = ("_priority", "_row", "_tokens")

    def __init__(self, priority: int, tokens: int) -> None:
        self._priority = priority
        self._tokens = tokens
        self._row: asyncio.Future[Row | None] | None = None

    def serves(self, priority: int, tokens: int) -> bool:
        """Whether a request should wait for this text, because it would hardly be faster by itself.

        The computing request must have the same or a higher priority, and no more tokens than the waiting one.
        """
        return self._priority <= priority and self._tokens <= tokens

    def row(self) -> asyncio.Future[Row | None]:
        """The future row; None if the computing request gets none."""
        if self._row is None:
            self._row = asyncio.get_running_loop().create_future()
        return self._row

    def end(self, row: Row | None) -> None:
        if self._row is not None and not self._row.done():
            self._row.set_result(row)


class AnswerCache:
    """Rows by model and token ids, with W-TinyLFU eviction (arXiv 1512.00727).

    Attributes:
        texts: Number of texts found in the cache (`hit`), awaited from another request (`shared`), or computed
            (`miss`).
    """

    def __init__(self, most_bytes: int) -> None:
        self.texts = {"hit": 0, "shared": 0, "miss": 0}
        self._rows: Moka[Key, Row] = Moka(most_bytes, weigher=_weight)
        self._computing: dict[Key, _Claim] = {}
        self._generation = 0

    def clear(self) -> None:
        """Removes all entries; rows that are being computed are not stored either."""
        self._generation += 1
        self._rows.clear()
        self._computing.clear()

    def recall(self, model: ModelIndex, texts: Sequence[EncodedText]) -> CachedRows | None:
        """The answer if the rows of all texts are cached; otherwise None."""
        rows: list[Row] = []
        for text in texts:
            row = self._rows.get(_key(model, text))
            if row is None:
                return None
            rows.append(row)
        self.texts["hit"] += len(rows)
        return CachedRows(rows)

    async def run(
        self, dispatcher: Device[Any], permit: Admitted, texts: Sequence[EncodedText], outputs: Sequence[TensorSpec]
    ) -> CachedRows:
        """Calls `Dispatcher.run` for texts that are neither cached nor being computed.

        A request that waits for another keeps its own deadline. If the other request fails, is late or loses its
        client, the waiting requests compute the texts themselves. A request waits only for requests of the same or a
        higher priority, and for none with more tokens. Otherwise a query for one text would wait for all texts of a
        batch client's request. `outputs` are the model's.
        """
        keys = [_key(permit.model, text) for text in texts]
        by_key = dict(zip(keys, texts, strict=True))
        rows: dict[Key, Row] = {}
        queue_us = compute_us = submitted = 0.0
        cached = True
        while missing := [key for key in by_key if key not in rows and not self._found(key, rows)]:
            tokens = sum([len(by_key[key].ids) for key in missing])
            others = {
                key: claim.row()
                for key in missing
                if (claim := self._computing.get(key)) is not None and claim.serves(permit.priority, tokens)
            }
            if mine := {key: by_key[key] for key in missing if key not in others}:
                pending = await self._computed(mine, dispatcher, permit, outputs)
                rows.update(zip(mine, pending.rows, strict=True))
                queue_us, compute_us = max(queue_us, pending.queue_us), max(compute_us, pending.compute_us)
                submitted, cached = submitted or pending.submitted, False
                self.texts["miss"] += len(mine)
            for key, future in others.items():
                if (row := await _await_row(future, dispatcher, permit)) is not None:
                    rows[key] = row
                    self.texts["shared"] += 1
        return CachedRows([rows[key] for key in keys], queue_us, compute_us, submitted, cached)

    def _found(self, key: Key, rows: dict[Key, Row]) -> bool:
        row = self._rows.get(key)
        if row is None:
            return False
        rows[key] = row
        self.texts["hit"] += 1
        return True

    async def _computed(
        self, texts: Mapping[Key, EncodedText], dispatcher: Device[Any], permit: Admitted, outputs: Sequence[TensorSpec]
    ) -> Rows:
        """Calls `Dispatcher.run`, lets other requests wait for the rows, and caches them."""
        generation = self._generation
        lengths = [len(text.ids) for text in texts.values()]
        claims = {key: _Claim(permit.priority, sum(lengths)) for key in texts}
        self._computing.update(claims)
        try:
            pending = await dispatcher.run(permit, list(texts.values()))
            for (key, claim), length, row in zip(claims.items(), lengths, pending.rows, strict=True):
                own = _own(row, length, outputs)
                if generation == self._generation:
                    self._rows.set(key, own)
                claim.end(own)
        finally:
            for key, claim in claims.items():
                if self._computing.get(key) is claim:
                    del self._computing[key]
                claim.end(None)
        return pending


async def _await_row(future: asyncio.Future[Row | None], dispatcher: Device[Any], permit: Admitted) -> Row | None:
    """Another request's row, or None if it gets none; raises `DeadlineExceeded` at the deadline."""
    try:
        async with asyncio.timeout_at(permit.deadline):
            return await asyncio.shield(future)
    except TimeoutError:
        raise dispatcher.missed(permit) from None


def _key(model: ModelIndex, text: EncodedText) -> Key:
    return model, text.ids.tobytes(), b"" if text.type_ids is None else text.type_ids.tobytes()


def strip_padding(row: Row, tokens: int, outputs: Sequence[TensorSpec]) -> Row:
    """A row without padding: if its length is variable, it has at most one line for each token (`graph_outputs`)."""
    return tuple(part[:tokens] if spec.shape[1] < 0 else part for part, spec in zip(row, outputs, strict=True))


def _own(row: Row, tokens: int, outputs: Sequence[TensorSpec]) -> Row:
    """A read-only copy without padding. A row is a view of its whole batch and would keep the batch in memory."""
    copies = []
    for part in strip_padding(row, tokens, outputs):
        copy = part.copy()
        copy.flags.writeable = False
        copies.append(copy)
    return tuple(copies)


def _weight(key: Key, row: Row) -> int:
    _, ids, types = key
    size = _ENTRY_BYTES + len(ids) + len(types)
    for part in row:
        size += _ARRAY_BYTES + part.nbytes
    return size
