"""Stands in front of NVIDIA's module: TensorRT on the simulated GPU; what builds engines is the real one."""

import sys

import onnxruntime
from cuda.bindings import driver
from simulated_trt import builder, simulate

if "bertserve.export.engines.tensorrt_builder" in sys.orig_argv:
    sys.modules[__name__] = builder(__name__, sys.orig_argv[-1])
else:
    sys.modules[__name__] = simulate("rtx", onnxruntime, driver)
