"""PyTorch's answers as a file of the bundle, to prove artifacts without PyTorch.

Format: safetensors. `ids` and `types`, int32, hold the tokens of all texts one after another, `lengths` the number of
each; `output.<name>` the numbers of one output for all texts. The texts are in the metadata under `texts`, as JSON.
"""

from __future__ import annotations

import json
from array import array
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from bertserve.export.errors import ExportError
from bertserve.export.proof.parity import Reference
from bertserve.serving.records import EncodedText

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from numpy.typing import NDArray

    from bertserve.export.tasks.decisions import DecisionComparator

REFERENCE = "reference.safetensors"


def write(path: Path, comparator: DecisionComparator, reference: Reference) -> None:
    """Writes the answers."""
    ids = [np.frombuffer(text.ids, np.int32) for text in reference.encoded]
    types = [
        np.zeros(len(text.ids), np.int32) if text.type_ids is None else np.frombuffer(text.type_ids, np.int32)
        for text in reference.encoded
    ]
    tensors = {
        "ids": np.concatenate(ids),
        "types": np.concatenate(types),
        "lengths": np.array([len(part) for part in ids], np.int32),
    }
    for index, spec in enumerate(comparator.outputs):
        tensors[f"output.{spec.name}"] = np.concatenate([row[index].ravel() for row in reference.rows])
    save_file(tensors, path, {"texts": json.dumps(reference.texts, ensure_ascii=False)})


def read(path: Path, comparator: DecisionComparator) -> Reference:
    """Reads the answers of a bundle.

    Raises:
        ExportError: The file is damaged, or not of this model.
    """
    try:
        with safe_open(path, framework="numpy") as handle:
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118  not a mapping
            texts = json.loads(handle.metadata()["texts"])
        lengths = [int(length) for length in tensors["lengths"]]
        encoded = [
            EncodedText(array("i", ids.tobytes()), array("i", types.tobytes()) if types.any() else None)
            for ids, types in zip(_parts(tensors["ids"], lengths), _parts(tensors["types"], lengths), strict=True)
        ]
        columns = []
        for spec in comparator.outputs:
            sizes = comparator.sizes(spec, encoded)
            fixed = [size for size in spec.shape[1:] if size != -1]
            parts = _parts(tensors[f"output.{spec.name}"], [size * int(np.prod(fixed)) for size in sizes])
            varies = len(spec.shape) > 1 and spec.shape[1] == -1
            columns.append(
                [part.reshape([size, *fixed] if varies else fixed) for part, size in zip(parts, sizes, strict=True)]
            )
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ExportError(f"{path}: not the reference of this model: {error!r}") from error
    shown = [(text[0], text[1]) if isinstance(text, list) else str(text) for text in texts]
    return Reference(shown, encoded, list(zip(*columns, strict=True)))


def _parts(values: NDArray[np.generic], sizes: Iterable[int]) -> list[NDArray[np.generic]]:
    ends = [0, *accumulate(sizes)]
    if ends[-1] != len(values):
        raise ValueError(f"{len(values)} numbers, {ends[-1]} expected")
    return [values[start:end] for start, end in pairwise(ends)]
