"""Exports a sparse encoder as Sentence Transformers' documentation says: `python sparse_encoder_model.py FOLDER OUT`.

`onnx/model.onnx` is fp32; `onnx/model_qint8_avx512_vnni.onnx` is its dynamic INT8.
"""

from __future__ import annotations

import sys

from sentence_transformers import SparseEncoder, export_dynamic_quantized_onnx_model

folder, out = sys.argv[1:]
encoder = SparseEncoder(folder, backend="onnx", device="cpu", model_kwargs={"export": True})
encoder.save_pretrained(out)
export_dynamic_quantized_onnx_model(encoder, "avx512_vnni", out)
