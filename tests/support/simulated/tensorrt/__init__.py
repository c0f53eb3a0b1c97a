"""Stands in front of NVIDIA's module: TensorRT on the simulated GPU."""

import json
import os
import sys

import onnxruntime
from cuda.bindings import driver
from simulated_trt import simulate

if "tensorrt" in json.loads(os.environ["SIMULATED_GPU"]).get("missing", []):
    raise ImportError("it is not installed on the simulated machine")
sys.modules[__name__] = simulate("enterprise", onnxruntime, driver)
