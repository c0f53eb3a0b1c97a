"""What `compatibility.py` measures: every form of a random checkpoint, compared with PyTorch and timed in turns."""

from __future__ import annotations

import io
import math
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from bertserve.export.build import comparator_of
from bertserve.export.checkpoint.families import FAMILIES
from bertserve.export.checkpoint.reader import open_checkpoint
from bertserve.export.checkpoint.source import find
from bertserve.export.engines import tensorrt
from bertserve.export.errors import ExportError
from bertserve.export.graph import editor, optimize, task_model
from bertserve.export.precision import emulation, half, int8
from bertserve.export.progress import Progress, quiet
from bertserve.export.proof import parity
from bertserve.export.proof.engine import open_engine
from bertserve.export.recipe import ARTIFACTS, Recipe
from bertserve.export.texts import corpus
from bertserve.loadtest.benchmarks.exports import random_checkpoints

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bertserve.export.checkpoint.reader import Checkpoint
    from bertserve.loadtest.benchmarks.exports.random_checkpoints import Sizes
    from bertserve.serving.engine.base import Engine
    from bertserve.serving.records import EncodedText

LENGTHS = (32, 128)
"""Lengths of the timed texts, in tokens; the second is the longest that an artifact supports."""

THREADS = 1
"""Threads of a lane under load."""

_TEXTS, _CALIBRATION = slice(0, None, 8), slice(1, None, 12)
"""Built-in texts to compare, and those that calibrate INT8."""
_BLOCK_S = 0.05


def measure(model_type: str, task: str, sizes: Sizes, rounds: int) -> dict[str, Any]:
    """Exports one random checkpoint in every form; returns the figures of the page, as JSON values.

    Its artifacts are timed in turns in so many rounds; with 0 rounds no TensorRT engine is built either. Raises
    ExportError if there is no such checkpoint, or an export does not support its graph.
    """
    with TemporaryDirectory() as name, quiet():
        source = random_checkpoints.write(Path(name) / "checkpoint", model_type, task, sizes)
        checkpoint = open_checkpoint(find(str(source)), LENGTHS[-1], lambda _: None, task)
        if (family := checkpoint.encoder.family) is not FAMILIES[model_type]:
            raise ExportError(f"Transformers writes a checkpoint of {family.model_type} in its place")
        export = _Export(checkpoint, Path(name))
        found: dict[str, Any] = {"forms": {form: export.form(form) for form in ARTIFACTS}}
        if rounds:
            found["texts_per_s"] = texts_per_s(export.engines, export.reference.encoded, rounds)
            found["t4"] = export.tensorrt()
    return found


class _Export:
    """An export without a bundle: each form is made as `build` makes it, and compared on fewer texts."""

    def __init__(self, checkpoint: Checkpoint, folder: Path) -> None:
        self._checkpoint, self._folder = checkpoint, folder
        self._raw, self._fused = folder / "raw.onnx", folder / "fused.onnx"
        self._judge = comparator_of(checkpoint)
        self.engines: dict[str, Engine] = {}
        texts = corpus.read()
        calibration = folder / "calibration.txt"
        calibration.write_text("\n".join(text for text in texts[_CALIBRATION] if isinstance(text, str)), "utf-8")
        recipe = Recipe(str(folder), folder, artifacts=tuple(ARTIFACTS), calibration=calibration)
        self._int8 = int8.Int8(recipe, checkpoint, Progress(io.StringIO(), lambda: None))
        tasks = (checkpoint.task, *checkpoint.also)
        self._limits = {form: {task: recipe.limits_of(form, task) for task in tasks} for form in ARTIFACTS}
        model = task_model.load(checkpoint)
        task_model.write(model, self._raw)
        optimize.fuse(self._raw, self._fused, optimize.shape_of(checkpoint))
        chosen = corpus.for_task(texts[_TEXTS], checkpoint.task)
        encoded = checkpoint.encode(chosen)
        rows = task_model.answers(model, encoded, threads=THREADS, count=_uncounted)
        self.reference = parity.Reference(chosen, encoded, rows)

    def form(self, name: str) -> dict[str, Any]:
        """A form's figures, or why it cannot be made; INT8 and fp16 take the first variant within their limits."""
        options: dict[str, Sequence[Any]] = {
            "fp16": half.NORMALIZATIONS,
            **dict.fromkeys(int8.ARTIFACTS, int8.schemes(self._checkpoint)),
        }
        found: dict[str, Any] = {}
        for option in options.get(name, ("",)):
            path = self._folder / ARTIFACTS[name].file
            try:
                self._make(name, option, path)
                found = self._compared(name, path)
            except ExportError as error:
                return {"obstacle": str(error)}
            if not found["broken"]:
                break
        return found

    def _make(self, name: str, option: Any, path: Path) -> None:  # noqa: ANN401  of `int8.schemes` or half.NORMALIZATIONS
        if name in int8.ARTIFACTS:
            self._int8.make(name, path, option, self._fused, self._raw)
        elif name == "fp16":
            shares = self._checkpoint.encoder.family.shared_layers
            half.convert(self._fused, path, shared_layers=shares, normalizations=option)
        else:
            editor.copy(self._fused, path)

    def _compared(self, name: str, path: Path) -> dict[str, Any]:
        target, size = ARTIFACTS[name].target, path.stat().st_size
        if target == "cuda":
            emulated = self._folder / "emulated.onnx"
            emulation.emulate(path, emulated)
            path, target = emulated, "cpu"
        engine = open_engine(task_model.spec_of(self._checkpoint, path), target, THREADS)
        limits, most = self._limits[name], self._checkpoint.max_length
        verdict = parity.verify(engine, self._judge, self.reference, limits, max_length=most, count=_uncounted)
        # An emulation's time says nothing about a GPU's.
        if ARTIFACTS[name].target != "cuda":
            self.engines[name] = engine
        found = verdict.parity
        figures = {name: getattr(found, name) for name in ("max_abs_difference", "cosine_min", "agreement")}
        decided = {"invariant": verdict.batch_invariant, "broken": sorted(verdict.broken)}
        return {"size_bytes": size, **figures, **decided}

    def tensorrt(self) -> dict[str, Any]:
        """Size of the engine for the T4, or the obstacle."""
        halved, engine = self._folder / "half.onnx", self._folder / "t4.engine"
        try:
            half.convert(self._raw, halved)
            tensorrt.build(halved, engine, "t4", max_length=LENGTHS[-1], count=_uncounted)
        except ExportError as error:
            return {"obstacle": str(error)}
        return {"size_bytes": engine.stat().st_size}


def texts_per_s(
    engines: Mapping[str, Engine], texts: Sequence[EncodedText], rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Texts per second, one at a time, by length and by form: one figure per round.

    In a round each form has a block at each length, so that all forms meet the same machine speed.
    """
    made = {tokens: parity.text_of_length(texts, tokens) for tokens in LENGTHS}
    counts = {(tokens, form): _block(engine, text) for tokens, text in made.items() for form, engine in engines.items()}
    found: dict[str, dict[str, list[float]]] = {str(tokens): {form: [] for form in engines} for tokens in LENGTHS}
    for at in range(rounds):
        for tokens, text in made.items():
            for form in list(engines)[:: 1 if at % 2 else -1]:
                count = counts[tokens, form]
                found[str(tokens)][form].append(round(count / _seconds(engines[form], text, count), 2))
    return found


def _block(engine: Engine, text: EncodedText) -> int:
    """Texts that fill a block."""
    _seconds(engine, text, 1)
    return max(1, math.ceil(_BLOCK_S / _seconds(engine, text, 2) * 2))


def _seconds(engine: Engine, text: EncodedText, count: int) -> float:
    started = time.perf_counter()
    for _ in range(count):
        parity.run_batch(engine, [text])
    return time.perf_counter() - started


def _uncounted(_done: int, _total: int) -> None:
    """Progress of a stage is not reported."""
