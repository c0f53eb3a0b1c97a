"""Several embeddings of a text from one pass of a model: dense, sparse and multi-vector (bge-m3, arXiv 2402.03216)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from bertserve.serving.errors import InvalidRequest, quote
from bertserve.serving.fields.rule import resembled
from bertserve.serving.tasks import embed, embed_sparse, embed_tokens
from bertserve.serving.tasks.base import TaskOptions, TaskRoute
from bertserve.serving.tasks.embed import EmbedOptions
from bertserve.serving.tasks.embed_sparse import EmbedSparseOptions, SparseVector
from bertserve.serving.tasks.embed_tokens import EmbedTokensOptions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from bertserve.serving.tasks.base import Facts, Task, Work

TASKS: Mapping[str, Task[Any, Any]] = {
    "dense": embed.TASK,
    "sparse": embed_sparse.TASK,
    "tokens": embed_tokens.TASK,
}
"""The task of each output."""

_COMPUTED = {"dense": "pooled", "sparse": "token_weights", "tokens": "token_embeddings"}
"""The output of the graph that each output is made from."""


class Embedded(msgspec.Struct, frozen=True, eq=False):
    """The embeddings of a text; None for those that were not requested.

    Attributes:
        dense: float32 [dimensions].
        tokens: float32 [tokens, size].
    """

    dense: NDArray[np.float32] | None = None
    sparse: SparseVector | None = None
    tokens: NDArray[np.float32] | None = None


class CombinedOptions(TaskOptions[list[Embedded]], frozen=True):
    """Options whose answer is several embeddings for each input.

    Attributes:
        outputs: `dense`, `sparse`, `tokens`.
        normalize: As in `EmbedOptions`.
        dimensions: As in `EmbedOptions`.
        top_k: As in `EmbedSparseOptions`.
        threshold: As in `EmbedSparseOptions`.
    """

    outputs: tuple[str, ...]
    normalize: bool | None = None
    dimensions: int | None = None
    top_k: int | None = None
    threshold: float | None = None

    @property
    def dense(self) -> EmbedOptions:
        return EmbedOptions(self.normalize, self.dimensions)

    @property
    def sparse(self) -> EmbedSparseOptions:
        return EmbedSparseOptions(self.top_k, self.threshold)

    @property
    def tokens(self) -> EmbedTokensOptions:
        return EmbedTokensOptions()


def offered(manifest: Facts) -> tuple[str, ...]:
    """The outputs of a model."""
    names = {spec.name for spec in manifest.outputs}
    return tuple(output for output, computed in _COMPUTED.items() if computed in names)


def check_offered(outputs: Sequence[str], manifest: Facts, field: str) -> None:
    """Rejects outputs that a model does not have, in a field of a request."""
    known = offered(manifest)
    wrong = next((output for output in outputs if output not in known), None)
    if wrong is not None or not outputs:
        called = f" {quote(wrong)}" if wrong and resembled(wrong, tuple(TASKS)) else ""
        said = f"`{field}` is empty" if wrong is None else f"unknown output{called} in `{field}`"
        raise InvalidRequest(f"{said}; this model has {', '.join(known)}", param=field)


def check(options: CombinedOptions, manifest: Facts) -> None:
    check_offered(options.outputs, manifest, "outputs")
    embed.check(options.dense, manifest)
    embed_sparse.check(options.sparse, manifest)


def finish(work: Work[CombinedOptions]) -> list[Embedded]:
    return _by_text(
        {
            output: TASKS[output].way.finish(msgspec.structs.replace(work, options=getattr(work.options, output)))
            for output in work.options.outputs
        }
    )


def recorded(options: CombinedOptions, facts: Facts, count: int) -> list[Embedded]:
    """A sample answer, as `Task.recorded`."""
    return _by_text(
        {output: TASKS[output].recorded(getattr(options, output), facts, count) for output in options.outputs}
    )


def _by_text(columns: Mapping[str, Sequence[Any]]) -> list[Embedded]:
    return [Embedded(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]


def column(answer: Sequence[Embedded], output: str) -> Any:  # noqa: ANN401  of the output's task
    """The answer of one output's task; None if it was not requested."""
    found = [getattr(one, output) for one in answer]
    if found[0] is None:
        return None
    return np.stack(found) if output == "dense" else found


def _token_numbers(options: CombinedOptions, facts: Facts) -> int:
    return embed_tokens.size(facts) if "tokens" in options.outputs else 0


def _text_numbers(options: CombinedOptions, facts: Facts) -> int:
    return embed.numbers(options.dense, facts) if "dense" in options.outputs else 0


WAY: TaskRoute[CombinedOptions, list[Embedded]] = TaskRoute(
    CombinedOptions,
    "embed",
    finish,
    check,
    token_numbers=_token_numbers,
    text_numbers=_text_numbers,
    token_outputs=True,
)
