"""What exports in tests do without: to ask ONNX Runtime's optimizer what it has been asked before, and most texts.

The library's answer is kept in `build`, not ours, under a digest of all that it was given and of its version.
"""

from __future__ import annotations

import functools
import hashlib
import os
from typing import TYPE_CHECKING, Any

import onnx
import onnxruntime
from onnxruntime.transformers.onnx_model import OnnxModel

from export.graph import optimize
from export.texts import corpus
from tests.support.models import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable

    from export.texts.corpus import Text

_KEPT = ROOT / "build" / "test-models" / "optimized"
all_texts, all_probes = corpus.read, corpus.probes


def before_forks() -> None:
    keep_optimized()
    corpus.probes = few_probes


@functools.cache
def few_texts() -> list[Text]:
    """Some, where it is not tested how an artifact compares with PyTorch."""
    return all_texts()[::8]


@functools.cache
def few_probes() -> list[Text]:
    """Some short ones, where it is not tested what each text of `export/texts/probes.jsonl` tells."""
    return [text for text in all_probes() if len(str(text)) < 200][::5]


def keep_optimized() -> None:
    """Has exports of this process ask the optimizer once for each graph, now or in an earlier run."""
    if not isinstance(optimize.optimize_model, _Kept):
        optimize.optimize_model = _Kept(optimize.optimize_model)


class _Kept:
    def __init__(self, optimize_model: Callable[..., OnnxModel]) -> None:
        self._optimize_model = optimize_model

    def __call__(self, model: onnx.ModelProto, *, optimization_options: Any, **options: Any) -> OnnxModel:
        key = hashlib.sha256(model.SerializeToString(deterministic=True))
        versions = (onnx.__version__, onnxruntime.__version__)
        key.update(repr((versions, sorted(vars(optimization_options).items()), sorted(options.items()))).encode())
        file = _KEPT / f"{key.hexdigest()}.onnx"
        if file.is_file():
            return OnnxModel(onnx.load_model(file))
        made = self._optimize_model(model, optimization_options=optimization_options, **options)
        _KEPT.mkdir(parents=True, exist_ok=True)
        making = file.with_suffix(f".{os.getpid()}")
        making.write_bytes(made.model.SerializeToString())
        making.replace(file)
        return made
