"""Transformer fusions, with a gate on their count: a fusion that no longer matches must not go unseen."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import onnx
from onnxruntime.transformers.optimizer import optimize_model

from export.errors import ExportError
from export.quiet import quiet

if TYPE_CHECKING:
    from pathlib import Path

_LISTED = frozenset({"MatMulInteger"})
"""Operators worth counting beside those of the domain com.microsoft."""


def fuse(raw: Path, fused: Path, *, layers: int, heads: int, hidden_size: int) -> None:
    """Fuses a BERT graph with ONNX Runtime's optimizer, offline transformations only.

    Args:
        raw: The graph as exported.
        fused: Where to write.
        layers: Transformer layers of the model.
        heads: Attention heads of a layer.
        hidden_size: Components of a token's vector.

    Raises:
        ExportError: The graph did not fuse completely.
    """
    with quiet():
        # Level 0: what the runtime does by itself at load time stays its own business.
        model = optimize_model(str(raw), model_type="bert", num_heads=heads, hidden_size=hidden_size, opt_level=0)
        model.save_model_to_file(str(fused))
    check_counts(
        operators(fused),
        {
            "EmbedLayerNormalization": 1,
            "Attention": layers,
            "SkipLayerNormalization": 2 * layers,
            "BiasGelu": layers,
        },
        "the fusion",
    )


def operators(path: Path) -> dict[str, int]:
    """How many of each fused or quantised operator a graph holds."""
    nodes = onnx.load(path, load_external_data=False).graph.node
    counts = Counter(node.op_type for node in nodes if node.domain == "com.microsoft" or node.op_type in _LISTED)
    return dict(sorted(counts.items()))


def check_counts(found: dict[str, int], expected: dict[str, int], step: str) -> None:
    """The gate.

    Raises:
        ExportError: Some operator is there more or less often than it must be.
    """
    for operator, count in expected.items():
        if found.get(operator, 0) != count:
            raise ExportError(
                f"{step} of the graph is incomplete: {found.get(operator, 0)} {operator}, {count} expected; "
                "the installed torch, transformers and onnxruntime do not fit together"
            )
