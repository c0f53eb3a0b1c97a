"""How well each text answers a query, by several embeddings of both: the weighted mean of up to three scores.

- dense: the dot product of the vectors of length 1
- sparse: the sum, over the tokens of both, of the products of their weights
- tokens: MaxSim, as a mean over the query's vectors
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bertserve.serving.errors import InvalidRequest
from bertserve.serving.tasks import combined
from bertserve.serving.tasks.base import TaskOptions, TaskRoute, Work
from bertserve.serving.tasks.combined import CombinedOptions, Embedded
from bertserve.serving.tasks.maxsim import encode, mean_maxsim, prepare, products, score_pairs, sizes_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bertserve.serving.records import TextInput
    from bertserve.serving.tasks.base import Check, Facts
    from bertserve.serving.tasks.embed_sparse import SparseVector


class HybridOptions(TaskOptions[list[float]], frozen=True):
    """Options whose answer is one score for each pair of query and text.

    Attributes:
        weights: The weight of each score by name; others have none. None gives all scores the same weight.
    """

    weights: dict[str, float] | None = None


def check(options: HybridOptions, manifest: Facts) -> None:
    if options.weights is None:
        return
    combined.check_offered([*options.weights], manifest, "weights")
    if min(options.weights.values()) < 0 or max(options.weights.values()) <= 0:
        raise InvalidRequest("`weights` must not be negative, and one of them must be above 0", param="weights")


def finish(work: Work[HybridOptions]) -> list[float]:
    given = work.options.weights or dict.fromkeys(combined.offered(work.manifest), 1.0)
    # Only ratios count; sums and products of large weights would overflow.
    largest = max(given.values())
    weights = {output: weight / largest for output, weight in given.items() if weight / largest > 0}
    options = CombinedOptions(tuple(weights), normalize=True)
    found = combined.finish(
        Work(work.inputs, options, work.texts, work.rows, work.manifest, work.tokenizer, work.check)
    )
    return score_pairs(work.inputs, found, lambda query, text: _score(query, text, weights, work.check))


def _after(inputs: Sequence[TextInput], lengths: Sequence[int], options: HybridOptions, facts: Facts) -> int:
    outputs = options.weights or combined.offered(facts)
    return products(inputs, lengths, options, facts) if "tokens" in outputs else sum(lengths)


def _score(query: Embedded, text: Embedded, weights: Mapping[str, float], check: Check) -> float:
    check()
    scores = {}
    if query.dense is not None and text.dense is not None:
        scores["dense"] = float(query.dense @ text.dense)
    if query.sparse is not None and text.sparse is not None:
        scores["sparse"] = product(query.sparse, text.sparse)
    if query.tokens is not None and text.tokens is not None:
        scores["tokens"] = mean_maxsim(query.tokens, text.tokens, check)
    return sum(weight * scores[output] for output, weight in weights.items()) / sum(weights.values())


def product(one: SparseVector, other: SparseVector) -> float:
    """The dot product of two sparse vectors."""
    _, at, beside = np.intersect1d(one.indices, other.indices, assume_unique=True, return_indices=True)
    return float(one.values[at] @ other.values[beside])


WAY: TaskRoute[HybridOptions, list[float]] = TaskRoute(
    HybridOptions,
    "embed",
    finish,
    check,
    sizes_bytes,
    prepare=prepare,
    encode=encode,
    token_outputs=True,
    after=_after,
)
