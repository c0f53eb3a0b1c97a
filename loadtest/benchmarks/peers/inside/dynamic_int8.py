"""Quantizes the fp32 graph with ONNX Runtime's own tool: `python dynamic_int8.py FP32 OUT`.

ONNX Runtime's documentation names this recipe for transformers: dynamic activation scales per batch, weight scales per
channel. It starts from the graph with fused operators; otherwise attention would stay in fp32.
"""

from __future__ import annotations

import sys

import onnx
from onnxruntime.quantization import QuantType, quantize_dynamic

_FUSED = "com.microsoft"

fp32, out = sys.argv[1:]
graph = onnx.load(fp32)
# ONNX Runtime does not require the version of its own operators; the shape inference before its tool does.
if _FUSED not in {opset.domain for opset in graph.opset_import}:
    graph.opset_import.append(onnx.helper.make_opsetid(_FUSED, 1))
quantize_dynamic(
    graph,
    out,
    weight_type=QuantType.QInt8,
    per_channel=True,
    # The tool infers no types through fused operators; here all their outputs are float32.
    extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},
)
