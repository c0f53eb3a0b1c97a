"""What the exporter needs to know about a task, beyond its module in `serving.tasks`.

It needs PyTorch and the reference libraries, which a serving image lacks, so it has a module of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from bertserve.export.tasks.accuracy import Reader
    from bertserve.export.tasks.decisions import DecisionComparator
    from bertserve.export.tasks.libraries.answers import Answer
    from bertserve.export.tasks.libraries.library import Library
    from bertserve.export.tasks.limits import Limits
    from bertserve.serving.models.manifest import Manifest, Precision

Forward: TypeAlias = Callable[[Any, Mapping[str, Any], Mapping[str, Any]], tuple[Any, ...]]


@dataclass(slots=True, frozen=True, kw_only=True)
class TaskExport:
    """How a task's graph is written, and how its answers are compared.

    Attributes:
        forward: Computes the graph's outputs in PyTorch, from a `TaskModel`, the arguments of its model, and the
            graph's inputs by name.
        limits: Limits of the artifacts of each precision.
        further_comparator: Reads raw answers from the graph of another task; None if `comparator` does.
        reader: Reads labeled text for the task's own metric.
        library: The reference library, which loads a checkpoint's folder.
        read: Converts one text's answer from the server's task to the form of the comparison with the library.
        vectors: Whether answers are vectors, so that their cosines are reported.
    """

    forward: Forward = lambda own, common, _: (own.model(**common).logits,)
    limits: Mapping[Precision, Limits]
    comparator: type[DecisionComparator]
    further_comparator: type[DecisionComparator] | None = None
    reader: type[Reader]
    library: type[Library]
    read: Callable[[Any, Manifest], Answer]
    vectors: bool = False
