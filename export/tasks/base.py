"""What the exporter has to know of a task beside what its module in `serving.tasks` says.

It needs PyTorch and the reference libraries, which a serving image lacks, so that it is a module of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from export.tasks.accuracy import Reader
    from export.tasks.decisions import DecisionComparator
    from export.tasks.libraries.answers import Answer
    from export.tasks.libraries.library import Library
    from export.tasks.limits import Limits
    from serving.models.manifest import Manifest, Precision

Forward: TypeAlias = Callable[[Any, Mapping[str, Any], Mapping[str, Any]], tuple[Any, ...]]


@dataclass(slots=True, frozen=True, kw_only=True)
class TaskExport:
    """How a task's graph is written, and how its answers are proven.

    Attributes:
        forward: The graph's outputs, in PyTorch: of a `TaskModel`, of what its model is called with, and of the graph's
            inputs by name.
        limits: What artifacts of each precision must keep beside PyTorch.
        comparator: How raw answers are read.
        reader: Reads labelled text, for the task's own metric.
        library: The reference library, with a checkpoint's folder.
        read: One text's answer as the server's task gives it, in the form in which it is compared with the library's.
        vectors: Whether answers are vectors, so that their cosines are told.
    """

    forward: Forward = lambda own, common, _: (own.model(**common).logits,)
    limits: Mapping[Precision, Limits]
    comparator: type[DecisionComparator]
    reader: type[Reader]
    library: type[Library]
    read: Callable[[Any, Manifest], Answer]
    vectors: bool = False
