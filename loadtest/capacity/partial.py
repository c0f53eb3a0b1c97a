"""Graphs of the first layers of an encoder, with random weights, for partial runs.

The architecture is that of the configuration, fused and quantized as in every export. The vocabulary is small, because
the cost of an embedding lookup does not depend on its size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from export.checkpoint.families import family_of
from export.checkpoint.folder import Folder
from export.checkpoint.labels import Labels
from export.checkpoint.pooling import SentenceConfig
from export.checkpoint.reader import Checkpoint
from export.checkpoint.source import Source
from export.checkpoint.vocabulary import Vocabulary
from export.checkpoint.weights import Weights
from export.errors import ExportError
from export.graph import editor, optimize, task_model
from export.graph.editor import GraphEditor
from export.precision import quantize
from export.precision.equalise import Cut
from export.precision.products import find
from loadtest.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from loadtest.capacity.encoder import Encoder
    from serving.engine.specs import ModelSpec

_WORDS = 1000
_SPECIAL = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
_OFFSET = 1
"""RoBERTa counts positions from the padding id + 1."""
_RANGE = 8.0

COPIED_BYTES = 128 << 20
"""A larger artifact runs only on the wide lane, as decided in `serving/models/artifact_selection.py`."""


def specs(
    encoder: Encoder, precision: str, folder: Path, layers: Sequence[int], tell: Callable[[str], None]
) -> list[ModelSpec]:
    """One graph for each number of layers, as an engine loads it; writes them to `folder`.

    Raises:
        BenchError: The encoder cannot be exported.
    """
    try:
        found = []
        for count in layers:
            tell(f"exporting {count} of {encoder.layers} layers in {precision}")
            found.append(_spec(encoder, precision, folder / f"{precision}-{count}", count))
        return found
    except ExportError as error:
        raise BenchError(f"{encoder.name} cannot be exported: {error}") from error


def _spec(encoder: Encoder, precision: str, folder: Path, layers: int) -> ModelSpec:
    folder.mkdir()
    checkpoint = _checkpoint(encoder, folder, layers)
    raw, fused, path = folder / "raw.onnx", folder / "fused.onnx", folder / "model.onnx"
    task_model.write(task_model.untrained(checkpoint), raw)
    shape = optimize.shape_of(checkpoint)
    optimize.fuse(raw, fused, shape)
    if precision == "int8":
        quantize.quantize(fused, path, shape, _cuts(fused), static=True)
    else:
        editor.copy(fused, path)
    spec = task_model.spec_of(checkpoint, path)
    copied = encoder.weight_bytes(precision) <= COPIED_BYTES
    return msgspec.structs.replace(spec, name=f"{layers} layers", copied=copied)


def _checkpoint(encoder: Encoder, folder: Path, layers: int) -> Checkpoint:
    family = family_of(encoder.config)
    if family is None:
        raise BenchError(f"{encoder.name}: no configuration to build layers from")
    words = min(_WORDS, encoder.vocabulary)
    config = {**encoder.config, family.sizes["layers"]: layers, family.sizes["vocab_size"]: words}
    if family.shared_layers:
        config["num_hidden_groups"] = 1  # as many groups as layers at most
    config["pad_token_id"] = _SPECIAL["pad"]
    place = Folder(folder)
    length = encoder.positions - (_SPECIAL["pad"] + _OFFSET if family.offset_positions else 0)
    return Checkpoint(
        Source(folder, encoder.name, "partial"),
        config,
        family,
        "embed",
        SentenceConfig(place),
        Vocabulary(b"", dict(_SPECIAL), None),
        Weights(place, ()),
        Labels((), multi_label=False),
        length,
    )


def _cuts(fused: Path) -> dict[str, Cut]:
    """A `Cut` for each product, in the form of an export. The ranges are arbitrary because the weights are random."""
    opened = GraphEditor(fused, fused)
    matrices = {product.activations: opened.joined(product.weights) for product in find(opened.graph)}
    return {
        name: Cut(np.linspace(0.9, 1.1, len(matrix), dtype=np.float32), -_RANGE, _RANGE)
        for name, matrix in matrices.items()
    }
