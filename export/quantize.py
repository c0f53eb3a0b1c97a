"""Dynamic INT8: 8-bit weights per channel, activations quantised while running."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnx import TensorProto
from onnxruntime.quantization import QuantType, quantize_dynamic

from export.optimize import check_counts, operators
from export.quiet import quiet

if TYPE_CHECKING:
    from pathlib import Path

_MATRICES_BESIDE_ATTENTION = 3


def quantize(fused: Path, quantized: Path, *, layers: int) -> None:
    """Quantises a fused fp32 graph.

    Args:
        fused: The graph after the fusions; before them attention would not be quantised as one operator.
        quantized: Where to write.
        layers: Transformer layers of the model.

    Raises:
        ExportError: Some matrix was not quantised.
    """
    with quiet():
        quantize_dynamic(
            fused,
            quantized,
            weight_type=QuantType.QInt8,
            per_channel=True,
            # Shape inference does not know the fused operators' outputs; all of them are float32.
            extra_options={"DefaultTensorType": TensorProto.FLOAT},
        )
    expected = {
        "QAttention": layers,
        "MatMulInteger": _MATRICES_BESIDE_ATTENTION * layers,
        "QEmbedLayerNormalization": 1,
    }
    check_counts(operators(quantized), expected, "the quantisation")
