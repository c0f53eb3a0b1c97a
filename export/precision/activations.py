"""Runs a graph on text and records the activations of its matrix products."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnxruntime as ort

from bertserve.export.graph.editor import GraphEditor
from bertserve.export.precision.equalise import Seen
from bertserve.serving.engine.base import Batch
from bertserve.serving.engine.batches import Padder
from bertserve.serving.records import ModelIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from bertserve.export.precision.products import Product
    from bertserve.serving.engine.specs import ModelSpec
    from bertserve.serving.records import EncodedText

_ROWS = 256
"""Tokens whose activations are kept: 65 MB for BERT-base."""


def observe(
    path: Path,
    products: Sequence[Product],
    texts: Sequence[EncodedText],
    spec: ModelSpec,
    threads: int,
    count: Callable[[int, int], None],
) -> list[Seen]:
    """Records the activations of each product over the texts, each alone.

    Args:
        path: A fp32 graph; a copy with more outputs is written beside it.
        products: The products of that graph.
        texts: Calibration text.
        spec: The inputs of the graph.
        threads: Cores to use.
        count: Called with the number of finished texts and of all.
    """
    names = [product.activations for product in products]
    session = _session(_probe(path, names), threads)
    padder, rng = Padder(spec), np.random.default_rng(0)
    share = -(-_ROWS // len(texts))
    seen: list[list[Seen]] = []
    for done, text in enumerate(texts, 1):
        tensors = padder.tensors(Batch(ModelIndex(0), [text]))
        seen.append([_look(values, share, rng) for values in session.run(names, tensors)])
        count(done, len(texts))
    return [_join(parts) for parts in zip(*seen, strict=True)]


def _look(values: NDArray[np.float32], share: int, rng: np.random.Generator) -> Seen:
    tokens = values.reshape(-1, values.shape[-1])
    return Seen(tokens.min(axis=0), tokens.max(axis=0), tokens[rng.permutation(len(tokens))[:share]])


def _join(parts: Sequence[Seen]) -> Seen:
    return Seen(
        np.min([part.low for part in parts], axis=0),
        np.max([part.high for part in parts], axis=0),
        np.concatenate([part.rows for part in parts]),
    )


def _probe(path: Path, names: Sequence[str]) -> Path:
    """The graph with the activations among its outputs."""
    probe = path.with_name(f"probe.{path.name}")
    editor = GraphEditor(path, probe)
    editor.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    editor.save()
    return probe


def _session(path: Path, threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
