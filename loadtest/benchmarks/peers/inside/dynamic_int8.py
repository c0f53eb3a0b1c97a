"""The fp32 graph in INT8 as ONNX Runtime's own tool makes it: `python dynamic_int8.py FP32 OUT`.

Its documentation names this recipe for transformers: activations take a scale from each batch, weights one a channel.
It starts from the graph with the operators fused, without which attention would stay in fp32.
"""

from __future__ import annotations

import sys

import onnx
from onnxruntime.quantization import QuantType, quantize_dynamic

_FUSED = "com.microsoft"

fp32, out = sys.argv[1:]
graph = onnx.load(fp32)
# ONNX Runtime itself does not ask for the version of its own operators; the inference of shapes before its tool does.
if _FUSED not in {opset.domain for opset in graph.opset_import}:
    graph.opset_import.append(onnx.helper.make_opsetid(_FUSED, 1))
quantize_dynamic(
    graph,
    out,
    weight_type=QuantType.QInt8,
    per_channel=True,
    # It infers no types through fused operators; here all that they give is float32.
    extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},
)
