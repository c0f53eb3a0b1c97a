"""The INT8 artifacts of one export: records activations on calibration text, and quantizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from bertserve.export.errors import ExportError
from bertserve.export.graph import optimize
from bertserve.export.graph.editor import GraphEditor
from bertserve.export.graph.task_model import spec_of
from bertserve.export.precision import activations, calibration, openvino, qdq, quantize
from bertserve.export.precision.equalise import choose
from bertserve.export.precision.products import find
from bertserve.export.texts import corpus
from bertserve.serving.host import available_cpus
from bertserve.serving.models.manifest import Quantisation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from bertserve.export.checkpoint.reader import Checkpoint
    from bertserve.export.precision.equalise import Cut
    from bertserve.export.progress import Progress
    from bertserve.export.recipe import Recipe
    from bertserve.serving.engine.specs import ModelSpec
    from bertserve.serving.records import EncodedText

ARTIFACTS = frozenset({"int8", "int8-openvino"})

_MAX_COLUMNS = 1 << 12
"""Columns on which factors are chosen; a vocabulary has more, which tell the same."""


@dataclass(slots=True, frozen=True)
class Scheme:
    """How a graph is quantized.

    Attributes:
        activations: How their ranges are found.
        words: Whether a sparse encoder's products with its vocabulary are quantized.
    """

    activations: Literal["static", "dynamic"] = "static"
    words: bool = True

    def __str__(self) -> str:
        return f"{self.activations} ranges{'' if self.words else ' with the vocabulary in fp32'}"


STATIC = Scheme()


def schemes(checkpoint: Checkpoint) -> Sequence[Scheme]:
    """The fastest first; the next one is used if an artifact breaks its limits."""
    heads = (True, False) if checkpoint.active else (True,)
    return [Scheme("static", words) for words in heads] + [Scheme("dynamic", words) for words in heads]


class Int8:
    """Makes INT8 artifacts from the graphs of one export."""

    def __init__(self, recipe: Recipe, checkpoint: Checkpoint, progress: Progress) -> None:
        """Reads the calibration text.

        Raises:
            ExportError: The file cannot be read, or nothing would use it.
        """
        self._checkpoint, self._progress = checkpoint, progress
        if recipe.calibration is None:
            self._calibration = calibration.own()
        elif ARTIFACTS.isdisjoint(recipe.artifacts) and not recipe.wants_int8_engine:
            raise ExportError(f"{recipe.calibration}: --calibration needs an INT8 artifact, and none is exported")
        else:
            self._calibration = calibration.read(recipe.calibration, recipe.calibration_column)
        self._cuts: dict[Path, dict[str, Cut]] = {}

    def make(self, name: str, path: Path, scheme: Scheme, fused: Path, raw: Path) -> None:
        """Writes an artifact.

        Raises:
            ExportError: Some matrix was not quantized.
        """
        shape = optimize.shape_of(self._checkpoint)
        if name == "int8":
            static = scheme.activations == "static"
            quantize.quantize(fused, path, shape, self._cuts_of(fused), static=static, words=scheme.words)
        else:
            cuts = self._cuts_of(raw) if scheme.activations == "static" else None
            openvino.quantize(raw, path, shape, cuts, words=scheme.words)

    def make_for_tensorrt(
        self, path: Path, scheme: Scheme, raw: Path, halved: Path, exponents: Mapping[str, int]
    ) -> None:
        """Writes the quantized graph for TensorRT.

        Raises:
            ExportError: Some matrix was not quantized.
        """
        cuts, products = self._cuts_of(raw), find(GraphEditor(raw, raw).graph, words=scheme.words)
        qdq.quantize(halved, path, optimize.shape_of(self._checkpoint), exponents, products, cuts)

    def quantisation(self, name: str, scheme: Scheme) -> Quantisation:
        if name != "int8" and scheme.activations == "dynamic":
            return Quantisation(scheme.activations, fp32_words=not scheme.words)
        source, texts = self._calibration.source, len(self._calibration.texts)
        return Quantisation(scheme.activations, source, texts, fp32_words=not scheme.words)

    def _cuts_of(self, path: Path) -> dict[str, Cut]:
        """The quantization parameters of a graph, computed once."""
        if path not in self._cuts:
            texts = self._checkpoint.encode(corpus.for_task(self._calibration.texts, self._checkpoint.task))
            self._cuts[path] = cuts_of(path, spec_of(self._checkpoint, path), texts, self._progress.count)
        return self._cuts[path]


def cuts_of(
    path: Path, spec: ModelSpec, texts: Sequence[EncodedText], count: Callable[[int, int], None]
) -> dict[str, Cut]:
    """The quantization parameters of a graph's products, by name."""
    editor = GraphEditor(path, path)
    products = find(editor.graph)
    seen = activations.observe(path, products, texts, spec, available_cpus(), count)
    return {
        product.activations: choose(
            activation, editor.joined(product.weights, _MAX_COLUMNS), may_repeat=bool(product.source)
        )
        for product, activation in zip(products, seen, strict=True)
    }
