"""Stands in front of NVIDIA's module: TensorRT on the simulated card."""

import sys

import onnxruntime
from cuda.bindings import driver
from simulated_trt import simulate

sys.modules[__name__] = simulate("rtx", onnxruntime, driver)
