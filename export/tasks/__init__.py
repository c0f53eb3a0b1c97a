"""One module for each task: what the exporter needs, beyond `serving.tasks`.

Add a task of your own by putting its `TaskExport` into `EXPORTS`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bertserve.export.tasks import answer, classify, embed, embed_sparse, embed_tokens, fill_mask, rerank, tag

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bertserve.export.tasks.base import TaskExport
    from bertserve.export.tasks.decisions import DecisionComparator
    from bertserve.serving.records import TensorSpec
    from bertserve.serving.tasks.parts import Problem

EXPORTS: dict[str, TaskExport] = {
    "embed": embed.EXPORT,
    "embed_tokens": embed_tokens.EXPORT,
    "classify": classify.EXPORT,
    "rerank": rerank.EXPORT,
    "answer": answer.EXPORT,
    "tag": tag.EXPORT,
    "fill_mask": fill_mask.EXPORT,
    "embed_sparse": embed_sparse.EXPORT,
}


def comparator_of(
    task: str,
    also: Sequence[str],
    outputs: Sequence[TensorSpec],
    special_ids: Mapping[str, int],
    problem: Problem,
) -> DecisionComparator:
    """The comparator of a graph that answers a task, and perhaps others (`Manifest.also`)."""
    ids = dict(special_ids)
    further = {other: (EXPORTS[other].further_comparator or EXPORTS[other].comparator)(outputs, ids) for other in also}
    return EXPORTS[task].comparator(outputs, ids, problem, further)
