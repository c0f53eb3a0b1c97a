"""Prepares the demo checkpoint for infinity's ONNX engine: `python infinity_model.py CHECKPOINT OUT`.

It runs in infinity's environment, without this project. Export and INT8 quantization are those of Hugging Face's
optimum, which infinity's documentation names. infinity prefers a file called `model_quantized.onnx`.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from optimum.onnxruntime import ORTModelForFeatureExtraction, ORTQuantizer
from optimum.onnxruntime.configuration import AutoQuantizationConfig

checkpoint, out = map(Path, sys.argv[1:])
shutil.copytree(checkpoint, out, ignore=shutil.ignore_patterns("*.safetensors"))
ORTModelForFeatureExtraction.from_pretrained(checkpoint, export=True).save_pretrained(out)
settings = AutoQuantizationConfig.avx512_vnni(is_static=False, per_channel=True)
ORTQuantizer.from_pretrained(out, file_name="model.onnx").quantize(settings, save_dir=out)
