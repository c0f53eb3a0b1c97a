"""Stands in front of ONNX Runtime: the real one, with a CUDA provider on the simulated GPU beside its own."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

from cuda.bindings import driver

_HERE = Path(__file__).resolve().parents[1]
_ELSEWHERE = [place for place in sys.path if Path(place or ".").resolve() != _HERE]
_SPEC = importlib.machinery.PathFinder.find_spec("onnxruntime", _ELSEWHERE)
assert _SPEC is not None
assert _SPEC.loader is not None
real = importlib.util.module_from_spec(_SPEC)
sys.modules["onnxruntime"] = real
_SPEC.loader.exec_module(real)

from simulated_ort import CUDA, simulate  # noqa: E402  it needs the path above

_OWN = real.InferenceSession
_simulated = simulate(real, driver, falls_back=bool(driver.MACHINE.said.get("ort_falls_back")))


def _session(data: bytes, options: object = None, providers: object = None) -> object:
    asked = [provider[0] for provider in providers or () if isinstance(provider, tuple)]
    return (_simulated.InferenceSession if CUDA in asked else _OWN)(data, options, providers=providers)


real._real_session = _OWN
real.InferenceSession = _session
real.get_available_providers = _simulated.get_available_providers
real.preload_dlls = _simulated.preload_dlls
real.cuda_version = "13.0"
