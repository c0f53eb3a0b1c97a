"""OpenVINO on the CPU, with the demo model in fp32 and quantised for it."""

from __future__ import annotations

import sys
from array import array
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import onnx
import pytest

from bertserve.serving import host
from bertserve.serving.engine.base import Batch, EngineLoad, LaneKind
from bertserve.serving.engine.cpu.ort import OrtCpuBackend
from bertserve.serving.engine.process.worker import prepare
from bertserve.serving.errors import BundleError, EngineFault
from bertserve.serving.inference.served_models import Repository
from bertserve.serving.models.verified_dir import digest
from bertserve.serving.records import EncodedText, ModelIndex
from tests.support.expected import alone, cosines
from tests.support.misfits import model_at
from tests.support.models import cache_key, kept
from tests.support.poison import TINY_SIZE, tiny_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from bertserve.serving.engine.cpu.openvino import OpenVinoBackend
    from bertserve.serving.engine.specs import ModelSpec

engine = pytest.importorskip("bertserve.serving.engine.cpu.openvino", reason="the extra `openvino` is not installed")

FP32, INT8, STATIC = ModelIndex(0), ModelIndex(1), ModelIndex(2)


@pytest.fixture(scope="module")
def specs(models: Path, encoded: Sequence[EncodedText]) -> list[ModelSpec]:
    """The demo model in fp32, and in INT8 with ranges found while running and with fixed ones."""
    fp32 = Repository.open(models, "fp32").models[0].spec()

    def quantise(folder: Path) -> None:
        # PyTorch is slow to import, and most runs find what an earlier one has made.
        from bertserve.export.checkpoint.reader import open_checkpoint  # noqa: PLC0415
        from bertserve.export.checkpoint.source import find  # noqa: PLC0415
        from bertserve.export.graph import optimize, task_model  # noqa: PLC0415
        from bertserve.export.precision import int8  # noqa: PLC0415
        from bertserve.export.precision import openvino as export_openvino  # noqa: PLC0415

        checkpoint = open_checkpoint(find("demo"), None, [].append)
        task_model.write(task_model.load(checkpoint), folder / "raw.onnx")
        cuts = int8.cuts_of(folder / "raw.onnx", fp32, encoded, lambda _done, _total: None)
        for name, way in (("dynamic", None), ("static", cuts)):
            shape = optimize.shape_of(checkpoint)
            export_openvino.quantize(folder / "raw.onnx", folder / f"{name}.onnx", shape, way)
        (folder / "raw.onnx").unlink()

    own = Path(__file__)
    folder = kept(f"openvino-{cache_key(own, own.with_name('conftest.py'))}", quantise)
    paths = [folder / f"{name}.onnx" for name in ("dynamic", "static")]
    return [
        msgspec.structs.replace(fp32, size_bytes=1 << 30),  # its own graphs for short lengths are nothing new
        *(msgspec.structs.replace(fp32, path=str(path), sha256=digest(path)) for path in paths),
    ]


def hardly_warm(patched: pytest.MonkeyPatch) -> None:
    """Has one shape warmed up, and one lone length of four have a graph of its own."""
    patched.setattr(engine, "warm_up", lambda lanes, _lengths, warm_up=engine.warm_up: warm_up(lanes, [8]))
    patched.setattr(engine, "_ALONE", engine._ALONE[:1])


@pytest.fixture(scope="module")
def backend(specs: list[ModelSpec]) -> OpenVinoBackend:
    """All on two cores; shapes that nobody warmed up only take longer."""
    with pytest.MonkeyPatch.context() as patched:
        hardly_warm(patched)
        return engine.OpenVinoBackend(specs, threads=2)


@pytest.fixture(scope="module")
def expected(specs: list[ModelSpec], encoded: Sequence[EncodedText]) -> NDArray[np.float32]:
    """The answers of ONNX Runtime in fp32."""
    return alone(OrtCpuBackend(specs[:1], threads=2), FP32, encoded)


def tokens(*lengths: int) -> list[EncodedText]:
    return [EncodedText(array("i", range(1, 1 + length))) for length in lengths]


@pytest.mark.slow
def test_without_vnni_numbers_are_rounded_as_with_it(
    backend: OpenVinoBackend, specs: list[ModelSpec], encoded: Sequence[EncodedText], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And multiplied in fp32, which loses nothing: no operator computes with 8-bit integers."""
    monkeypatch.setattr(host, "saturates", lambda: True)
    (model,) = engine.load(specs[STATIC], [1])
    facts = [operator.get_rt_info() for operator in model._request.get_compiled_model().get_runtime_model().get_ops()]
    products = [each for each in facts if each["layerType"].astype(str) == "FullyConnected"]
    assert len(products) > 30
    assert all("i8" not in each["primitiveType"].astype(str).lower() for each in products)
    answers = np.concatenate([model.run(Batch(FP32, [text]))[0] for text in encoded])
    assert cosines(answers, alone(backend, STATIC, encoded)).min() > 0.999


def test_fp32_answers_are_those_of_onnx_runtime(
    backend: OpenVinoBackend, encoded: Sequence[EncodedText], expected: NDArray[np.float32]
) -> None:
    """Two libraries, one model: they differ by rounding alone, a pair of texts included."""
    np.testing.assert_allclose(alone(backend, FP32, encoded), expected, atol=1e-4)


def test_a_fp32_answer_is_the_same_in_a_batch(
    backend: OpenVinoBackend, encoded: Sequence[EncodedText], expected: NDArray[np.float32]
) -> None:
    """Neither neighbours nor padding are seen, and the padding's own rows are not answered."""
    together = backend.runner(0).run(Batch(FP32, encoded))
    assert together.arrays[0].dtype == np.float32
    assert list(together.finite) == [True] * len(encoded)
    assert together.compute_us > 0
    np.testing.assert_allclose(together.arrays[0], expected, atol=1e-4)


def test_int8_answers_are_near_those_in_fp32(
    backend: OpenVinoBackend, encoded: Sequence[EncodedText], expected: NDArray[np.float32]
) -> None:
    """Nearer than ONNX Runtime's INT8, which is allowed 0.95."""
    assert cosines(alone(backend, INT8, encoded), expected).min() > 0.99


def test_an_int8_answer_is_the_same_in_a_batch(backend: OpenVinoBackend, encoded: Sequence[EncodedText]) -> None:
    """Every row of activations has scales of its own: what makes this artifact one to batch."""
    together = backend.runner(0).run(Batch(INT8, encoded)).arrays[0]
    assert cosines(together, alone(backend, INT8, encoded)).min() > 0.999


def test_an_answer_by_fixed_ranges_is_the_same_in_a_batch(
    backend: OpenVinoBackend, encoded: Sequence[EncodedText], expected: NDArray[np.float32]
) -> None:
    """To the last digits: one that rounds another way would move numbers by a step of 8 bits.

    Without VNNI, products are computed in fp32, whose sums depend on the shape, and some numbers do move by a step.
    """
    texts = [*encoded, *tokens(*range(3, 33))]
    together = np.concatenate(
        [backend.runner(0).run(Batch(STATIC, texts[at : at + 6])).arrays[0] for at in range(0, len(texts), 6)]
    )
    lonely = alone(backend, STATIC, texts)
    assert cosines(together, lonely).min() > (0.999 if host.saturates() else 0.9999)
    assert cosines(lonely[: len(encoded)], expected).min() > 0.95


@pytest.mark.parametrize("rows", [2, 3, 9, 17])
def test_a_batch_of_any_size_is_answered_whole(backend: OpenVinoBackend, rows: int) -> None:
    """Rows that only fill the shape are cut off again; each text has its own answer in its place."""
    texts = tokens(*range(3, 3 + rows))
    answers = backend.runner(0).run(Batch(FP32, texts)).arrays[0]
    np.testing.assert_allclose(answers, alone(backend, FP32, texts), atol=1e-4)


def test_an_answer_is_kept_when_the_next_one_comes(backend: OpenVinoBackend) -> None:
    """The library writes all of them to the same place."""
    runner = backend.runner(0)
    first = runner.run(Batch(FP32, tokens(5))).arrays[0]
    before = first.copy()
    runner.run(Batch(FP32, tokens(6)))
    np.testing.assert_array_equal(first, before)


def test_batches_have_few_numbers_of_tokens(backend: OpenVinoBackend) -> None:
    """Padding adds an eighth or 15 tokens to a length, and a quarter to the rows at most.

    What is computed at once has at most 512 tokens, or is one text.
    """
    model = backend.runner(0)._models[0]
    totals = set()
    for tokens in range(1, 257):
        for rows in range(1, 512 // tokens + 1):
            count, length = model._shape(rows, tokens)
            assert rows <= count <= rows * 5 / 4
            assert tokens <= length <= max(tokens + 15, tokens * 9 / 8)
            totals.add(count * length)
    assert len(totals) < 60


@pytest.mark.parametrize(("rows", "length"), [pytest.param(5, 256, marks=pytest.mark.slow), (3, 200), (40, 16)])
def test_a_large_batch_is_computed_in_parts(backend: OpenVinoBackend, rows: int, length: int) -> None:
    """Each text has its own answer in its place, whichever part it is in."""
    texts = [EncodedText(array("i", [1 + row, *range(2, 1 + length)])) for row in range(rows)]
    answers = backend.runner(0).run(Batch(FP32, texts)).arrays[0]
    assert len({answer.tobytes() for answer in answers}) == rows
    np.testing.assert_allclose(answers, alone(backend, FP32, texts), atol=1e-4)


@pytest.mark.slow
def test_a_model_run_text_by_text_gets_a_narrow_lane_for_each_core(
    specs: list[ModelSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each lane gives the same answer."""
    hardly_warm(monkeypatch)
    lonely = engine.OpenVinoBackend([msgspec.structs.replace(specs[0], batch_invariant=False)], threads=2)
    assert list(lonely.lanes()) == [LaneKind.WIDE, LaneKind.NARROW, LaneKind.NARROW]
    answers = [alone(lonely, FP32, tokens(5, 9), lane) for lane in range(3)]
    np.testing.assert_allclose(answers[1:], [answers[0]] * 2, atol=1e-4)


def test_it_uses_the_threads_it_was_given(tmp_path: Path) -> None:
    """A container's share, not the machine."""
    backend = engine.OpenVinoBackend([model_at(tmp_path, tiny_model())], threads=1)
    compiled = backend.runner(0)._models[0]._request.get_compiled_model()
    assert compiled.get_property("INFERENCE_NUM_THREADS") == 1


def test_an_operator_that_it_does_not_know_is_refused(tmp_path: Path) -> None:
    """Where an output needs it."""
    model = tiny_model(before=[onnx.helper.make_node("NoSuch", ["input_ids"], ["tokens"])])
    next(node for node in model.graph.node if node.op_type == "Mul").input[0] = "tokens"
    with pytest.raises(BundleError, match=r"model\.onnx: OpenVINO cannot load it: .*NoSuch"):
        engine.OpenVinoBackend([model_at(tmp_path, model)], 1)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_batch_that_the_graph_cannot_compute_fails_alone(tmp_path: Path, threads: int) -> None:
    """First or later; with one thread OpenVINO does not even say so. The same runner answers the next batch."""
    # Five tokens at most, against a mask of all: two shapes that differ where a text is longer.
    model = tiny_model(before=[onnx.helper.make_node("Slice", ["input_ids", "start", "end", "axis"], ["tokens"])])
    for name, value in {"start": 0, "end": 5, "axis": 1}.items():
        model.graph.initializer.append(onnx.helper.make_tensor(name, onnx.TensorProto.INT64, [1], [value]))
    next(node for node in model.graph.node if node.op_type == "Mul").input[0] = "tokens"
    runner = engine.OpenVinoBackend([model_at(tmp_path, model, batch_invariant=False)], threads).runner(0)
    for _ in range(2):
        with pytest.raises(EngineFault, match="OpenVINO"):
            runner.run(Batch(FP32, tokens(6)))
        np.testing.assert_allclose(runner.run(Batch(FP32, tokens(5))).arrays[0], [[3] * TINY_SIZE])


def test_the_engine_process_makes_it_ready(tmp_path: Path) -> None:
    """By the name that the settings use, with the version of the library."""
    _, ready = prepare(EngineLoad("openvino", [model_at(tmp_path, tiny_model())], threads=1))
    assert (ready.engine, ready.version) == ("openvino", engine.VERSION)
    assert [point.tokens for point in ready.costs[0] if point.batch == 1] == [8, 16]


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command that installs it."""
    monkeypatch.delitem(sys.modules, "bertserve.serving.engine.cpu.openvino")
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(BundleError, match=r"--editable '\.\[openvino\]'"):
        prepare(EngineLoad("openvino", [], threads=1))
