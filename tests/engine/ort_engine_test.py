"""ONNX Runtime on the CPU, with the exported demo model."""

from __future__ import annotations

from array import array
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import onnx
import pytest

from bertserve.serving import host
from bertserve.serving.engine.base import Batch, LaneKind
from bertserve.serving.engine.cpu import ort
from bertserve.serving.engine.cpu.ort import OrtCpuBackend
from bertserve.serving.errors import EngineFault
from bertserve.serving.inference.served_models import Repository
from bertserve.serving.records import EncodedText, ModelIndex
from tests.support.expected import alone, cosines
from tests.support.misfits import model_at
from tests.support.poison import tiny_model

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from onnxruntime import InferenceSession

    from bertserve.serving.engine.specs import ModelSpec

FP32, INT8 = ModelIndex(0), ModelIndex(1)


@pytest.fixture(scope="module")
def backend(models: Path) -> OrtCpuBackend:
    """Both artifacts of the demo model on two cores; the larger one as if a second copy of it did not fit."""
    fp32, int8 = (Repository.open(models, precision).models[0].spec() for precision in ("fp32", "int8"))
    assert fp32.batch_invariant
    return OrtCpuBackend([msgspec.structs.replace(fp32, narrow=False), int8], threads=2)


def test_a_small_model_gets_a_narrow_lane_for_each_core(backend: OrtCpuBackend) -> None:
    """Beside the wide one."""
    assert list(backend.lanes()) == [LaneKind.WIDE, LaneKind.NARROW, LaneKind.NARROW]


def test_an_answer_is_the_same_alone_and_in_a_batch(backend: OrtCpuBackend, encoded: Sequence[EncodedText]) -> None:
    """Neither neighbours nor padding change an fp32 answer by more than rounding."""
    together = backend.runner(0).run(Batch(FP32, encoded))
    assert together.arrays[0].shape == (len(encoded), 384)
    assert together.arrays[0].dtype == np.float32
    assert list(together.finite) == [True] * len(encoded)
    assert together.compute_us > 0
    np.testing.assert_allclose(together.arrays[0], alone(backend, FP32, encoded), atol=1e-4)


def test_int8_answers_are_near_those_in_full_precision(backend: OrtCpuBackend, encoded: Sequence[EncodedText]) -> None:
    """As the export promised of the artifact."""
    assert cosines(alone(backend, INT8, encoded), alone(backend, FP32, encoded)).min() > 0.95


PROCESSORS = [
    ("x86_64", "sse4_1 avx2 fma", True),
    ("x86_64", "avx2 avx512f avx512bw", True),
    ("x86_64", "", True),
    ("x86_64", "avx2 avx_vnni", False),
    ("x86_64", "avx2 avx512f avx512_vnni amx_int8", False),
    ("aarch64", "fp asimd", False),
    ("aarch64", "fp asimd asimddp i8mm", False),
]


@pytest.mark.parametrize(("machine", "flags", "expected"), PROCESSORS)
def test_which_processors_lose_some_of_a_sum(tmp_path: Path, machine: str, flags: str, *, expected: bool) -> None:
    """x86 without VNNI, or of which nothing is known."""
    (tmp_path / "cpuinfo").write_text(f"flags\t\t: fpu {flags}\n")
    assert host.saturates(tmp_path / "cpuinfo", machine) is expected


def test_what_a_proof_says_of_the_processor(tmp_path: Path) -> None:
    """The architecture, and what kernels of 8-bit products are chosen by; not what those of floats are."""
    (tmp_path / "cpuinfo").write_text("flags\t\t: fpu avx2 avx512f avx512_bf16 avx512_vnni\n")
    assert host.integer_kernels(tmp_path / "cpuinfo", "x86_64") == ("x86_64", "avx2", "avx512f", "avx512_vnni")


def test_products_are_asked_to_be_exact_where_they_are_not(
    backend: OrtCpuBackend, models: Path, encoded: Sequence[EncodedText], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without VNNI: there kernels are slower that lose nothing. Here, with it, they give the same integers."""
    key, int8 = "session.x64quantprecision", Repository.open(models, "int8").models[0].spec()
    monkeypatch.setattr(host, "saturates", lambda: False)
    with pytest.raises(RuntimeError, match=key):
        ort.session_options(int8).get_session_config_entry(key)
    monkeypatch.setattr(host, "saturates", lambda: True)
    assert ort.session_options(int8).get_session_config_entry(key) == "1"
    answers = alone(OrtCpuBackend([int8], threads=1), FP32, encoded)
    np.testing.assert_allclose(answers, alone(backend, INT8, encoded), atol=1e-5)


@pytest.mark.parametrize("lane", [1, 2])
def test_every_lane_gives_the_same_answer(backend: OrtCpuBackend, encoded: Sequence[EncodedText], lane: int) -> None:
    """Which lane a text falls on is chance and must not be seen."""
    np.testing.assert_allclose(alone(backend, INT8, encoded, lane), alone(backend, INT8, encoded), atol=1e-4)


def test_narrow_lanes_share_one_session(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the weights are in memory twice, on any number of cores."""
    made: list[int] = []
    session = ort._session

    def counted(model: ModelSpec, data: bytes, threads: int) -> InferenceSession:
        made.append(threads)
        return session(model, data, threads)

    monkeypatch.setattr(ort, "_session", counted)
    lanes = OrtCpuBackend([Repository.open(models, "int8").models[0].spec()], threads=8).lanes()
    assert (len(lanes), sorted(made)) == (9, [1, 8])


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_texts_that_run_at_once_do_not_change_each_other(models: Path, precision: str, count: int) -> None:
    """Eight lanes on one session: every row is, bit for bit, what its text gives while nothing else runs."""
    spec = Repository.open(models, precision).models[0].spec()
    backend, rng = OrtCpuBackend([spec], threads=8), np.random.default_rng(0)
    ids = [rng.integers(1000, spec.vocab_size, rng.integers(3, 20)) for _ in range(count)]
    texts = [EncodedText(array("i", row.tolist())) for row in ids]
    expected = alone(backend, FP32, texts, lane=1)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda lane: alone(backend, FP32, texts[lane - 1 :: 8], lane), range(1, 9)))
    for lane, rows in enumerate(found):
        np.testing.assert_array_equal(rows, expected[lane::8])


def test_a_batch_that_the_graph_cannot_compute_fails_alone(tmp_path: Path, encoded: Sequence[EncodedText]) -> None:
    """ONNX Runtime's error becomes ours, and the same runner answers the next batch."""
    model = tiny_model()
    # A gather over a table of 2,000 rows fails on a larger id, as an embedding does.
    table = onnx.helper.make_tensor("table", onnx.TensorProto.INT32, [2000], [0] * 2000)
    model.graph.initializer.append(table)
    model.graph.node.insert(0, onnx.helper.make_node("Gather", ["table", "input_ids"], ["looked"]))
    model.graph.node.insert(1, onnx.helper.make_node("Add", ["looked", "input_ids"], ["tokens"]))
    next(node for node in model.graph.node if node.op_type == "Mul").input[0] = "tokens"
    runner = OrtCpuBackend([model_at(tmp_path, model)], 1).runner(0)
    bad = next(text for text in encoded if max(text.ids) >= 2000)
    good = next(text for text in encoded if max(text.ids) < 2000)
    with pytest.raises(EngineFault, match="ONNX Runtime"):
        runner.run(Batch(FP32, [bad]))
    np.testing.assert_allclose(runner.run(Batch(FP32, [good])).arrays[0][0, 0], np.mean(good.ids))
