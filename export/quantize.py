"""Dynamic INT8: 8-bit weights per channel, activations quantised while running."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx
from onnx import TensorProto
from onnxruntime.quantization import QuantType, quantize_dynamic

from export.optimize import check_counts, operators
from export.quiet import quiet

if TYPE_CHECKING:
    from pathlib import Path

    from export.optimize import Shape

_MATRICES_BESIDE_ATTENTION = 3
_MATRICES_OF_WORDS = 2
_FIRST_AFTER_GELU = 1
_DECISIONS = ("/classifier/", "/qa_outputs/")
"""Parts of the names of the last matrices: a few columns, which cost nothing and decide everything."""


def quantize(fused: Path, quantized: Path, shape: Shape) -> None:
    """Quantises a fused fp32 graph, but for the matrices that make the decision and one where 8 bits hurt most.

    Args:
        fused: The graph after the fusions; before them attention would not be quantised as one operator.
        quantized: Where to write.
        shape: What the graph is made of.

    Raises:
        ExportError: Some matrix was not quantised.
    """
    with quiet():
        quantize_dynamic(
            fused,
            quantized,
            weight_type=QuantType.QInt8,
            per_channel=True,
            nodes_to_exclude=_exact(fused),
            # Shape inference does not know the fused operators' outputs; all of them are float32.
            extra_options={"DefaultTensorType": TensorProto.FLOAT},
        )
    expected = {
        "QAttention": shape.layers,
        "MatMulInteger": _MATRICES_BESIDE_ATTENTION * shape.layers
        - _FIRST_AFTER_GELU
        + shape.projected
        + _MATRICES_OF_WORDS * shape.predicts_words,
        "QEmbedLayerNormalization": int(shape.embedding_fusion),
    }
    check_counts(operators(quantized), expected, "the quantisation")


def _exact(fused: Path) -> list[str]:
    """The matrices that stay as they are.

    Those of the heads: a `Gemm` works on one vector of each text, and so is one of them. And the one that follows
    the first GELU, whose outputs lie furthest apart and share one scale: on the demo model it alone lifts the 1st
    percentile of the cosines to PyTorch from 0.974 to 0.978.
    """
    nodes = onnx.load(fused, load_external_data=False).graph.node
    products = [node for node in nodes if node.op_type == "MatMul"]
    activated = {node.output[0] for node in nodes if node.op_type == "BiasGelu"}
    after_gelu = [node.name for node in products if node.input[0] in activated]
    # The quantiser first turns each Gemm into a MatMul of this name.
    heads = [f"{node.name}_MatMul" for node in nodes if node.op_type == "Gemm"]
    heads += [node.name for node in products if any(part in node.name for part in _DECISIONS)]
    return [*heads, *after_gelu[:_FIRST_AFTER_GELU]]
