"""The task `classify`: the classes of a text or a pair of texts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from serving.inference.tasks import windows
from serving.inference.tasks.base import Task, check_top_k, sigmoid, softmax
from serving.records import LabelScore

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from serving.inference.tasks.base import Work
    from serving.models.manifest import Manifest
    from serving.records import ClassifyOptions, EncodedText, Row

_FUNCTIONS: Mapping[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    "softmax": softmax,
    "sigmoid": sigmoid,
    "none": np.asarray,
}


def check(options: ClassifyOptions, manifest: Manifest) -> None:
    check_top_k(options.top_k, len(manifest.labels))
    windows.check(options, manifest)


def finish(
    rows: Sequence[Row],
    options: ClassifyOptions,
    labels: Sequence[str],
    *,
    multi_label: bool,
    regression: bool = False,
    texts: Sequence[EncodedText] = (),
) -> list[list[LabelScore]]:
    """The answer from the `logits`, float32 [classes], of each of the `texts`: the inputs, or windows of them.

    Returns:
        For each input, its classes, best first or in their own order; of equals the one with the lower index first. Of
        a regression its values, likewise.
    """
    logits = np.stack([row[0] for row in rows]).astype(np.float64)
    own = "none" if regression else "sigmoid" if multi_label or len(labels) == 1 else "softmax"
    function = options.function or own
    scores = windows.pooled(_FUNCTIONS[function](logits), texts, options)
    ranks = -scores if options.ranked else np.zeros_like(scores)
    order = np.argsort(ranks, axis=1, kind="stable")[:, : options.top_k]
    return [
        [LabelScore(labels[index], float(row[index])) for index in best]
        for row, best in zip(scores, order.tolist(), strict=True)
    ]


def _finish(work: Work[ClassifyOptions]) -> list[list[LabelScore]]:
    manifest = work.manifest
    return finish(
        work.rows,
        work.options,
        manifest.labels,
        multi_label=manifest.multi_label,
        regression=manifest.regression,
        texts=work.texts,
    )


TASK: Task[ClassifyOptions, list[list[LabelScore]]] = Task(
    "classify", _finish, check, windows.sizes_bytes, encode=windows.encode, windows=windows.asked
)
