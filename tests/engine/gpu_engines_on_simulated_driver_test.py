"""Both GPU engines behind a simulated driver, whose kernels are the same graphs run by ONNX Runtime on the CPU.

So what is compared here is everything of ours around the kernels: padding, parts, copies, graphs and failures. What a
real GPU computes is compared with the CPU by tests/gpu.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from bertserve.serving.engine.base import Batch, DeviceLost, EngineLoad, LaneKind
from bertserve.serving.engine.cpu.ort import OrtCpuBackend
from bertserve.serving.engine.gpu.cuda_driver import CudaError
from bertserve.serving.engine.gpu.model import SIZES, lengths_for
from bertserve.serving.engine.process.worker import prepare
from bertserve.serving.engine.specs import KernelFiles
from bertserve.serving.errors import BundleError, EngineFault
from bertserve.serving.inference.served_models import Repository
from bertserve.serving.models.verified_dir import digest
from bertserve.serving.records import EncodedText, ModelIndex
from tests.support.gpus import without_gpu, without_graphs
from tests.support.simulated_gpus import ENGINES, LARGEST_BATCH_TOKENS, Bench, as_plan
from tests.support.tasks import MAX_LENGTH, TASKS, tiny_model, write_bundle

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bertserve.serving.engine.base import Backend
    from bertserve.serving.engine.specs import ModelSpec

MODEL = ModelIndex(0)
MASK_ID = 4


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for task in TASKS:
        write_bundle(root, tiny_model(task))
    return root


@pytest.fixture(scope="module")
def specs(repository: Path) -> dict[str, ModelSpec]:
    return {model.manifest.task: model.spec() for model in Repository.open(repository).models}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def texts(*lengths: int, masks: int = 1) -> list[EncodedText]:
    """Texts of these lengths, each with some masks where there is room."""
    rng = np.random.default_rng(7)
    made = []
    for length in lengths:
        ids = rng.integers(5, 80, length)
        ids[1 : 1 + masks] = MASK_ID
        made.append(EncodedText(array("i", ids.tolist())))
    return made


def run(backend: Backend, *batch: EncodedText) -> list[np.ndarray[Any, Any]]:
    """A batch's arrays, each of whose rows must be finite."""
    output = backend.runner(0).run(Batch(MODEL, list(batch)))
    assert output.finite == [True] * len(batch)
    assert output.compute_us > 0
    return list(output.arrays)


def same(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Whether arrays are the same, up to the order of sums."""
    return len(found) == len(expected) and all(
        a.shape == b.shape and np.allclose(a, b, atol=1e-4) for a, b in zip(found, expected, strict=True)
    )


def check(bench: Bench, engine: str, spec: ModelSpec, *batches: list[EncodedText]) -> Any:
    """Holds a GPU's answers to batches against those of the CPU, and returns the GPU's lane."""
    cpu, gpu = OrtCpuBackend([spec], 1), bench.load(engine, [spec])
    for batch in batches:
        assert same(run(gpu, *batch), run(cpu, *batch)), [len(text.ids) for text in batch]
    return gpu.runner(0)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("task", TASKS)
def test_the_answers_are_those_of_the_cpu(bench: Bench, specs: dict[str, ModelSpec], task: str, engine: str) -> None:
    """Alone, in batches that are padded in both directions, and at the longest length; no padding comes back."""
    lengths = ((9,), (16,), (3, 20, 17), (MAX_LENGTH,), (5,) * 5)
    check(bench, engine, specs[task], *(texts(*batch) for batch in lengths))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_larger_than_the_largest_shape_runs_in_parts(
    bench: Bench, specs: dict[str, ModelSpec], engine: str
) -> None:
    """More texts than a shape holds, and more masks in a text than an engine takes."""
    check(bench, engine, specs["embed"], texts(*[11] * 71))
    check(bench, engine, specs["fill_mask"], texts(40, 30, masks=19))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("engine", ENGINES)
def test_several_models_share_a_card(bench: Bench, specs: dict[str, ModelSpec], engine: str) -> None:
    """Each answers as it does alone, in turns; they have one lane, and one scratch memory."""
    loaded = [specs["embed"], specs["tag"]]
    cpu, gpu = OrtCpuBackend(loaded, 1), bench.load(engine, loaded)
    assert list(gpu.lanes()) == [LaneKind.WIDE]
    for text in texts(8, 12, 40):
        for index in (0, 1):
            batch = Batch(ModelIndex(index), [text])
            assert same(gpu.runner(0).run(batch).arrays, cpu.runner(0).run(batch).arrays)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_captured_size_has_a_graph_and_uses_it(bench: Bench, specs: dict[str, ModelSpec], engine: str) -> None:
    """In each bucket, up to the tokens of a batch; a run is one launch, or one annotated run, and no new memory."""
    gpu = bench.load(engine, [specs["embed"]])
    shapes = [
        (rows, length)
        for length in lengths_for(MAX_LENGTH)
        for rows in SIZES
        if rows == 1 or rows * length <= LARGEST_BATCH_TOKENS
    ]
    if engine == "enterprise":
        assert len(bench.machine.graphs) == len(shapes)
    used, runs = bench.machine.used, list(bench.ort.InferenceSession.runs)
    for rows, length in shapes:
        bench.machine.calls.clear()
        run(gpu, *texts(*[length] * rows))
        launches = [call for call in bench.machine.calls if call != "cuStreamSynchronize"]
        if engine == "enterprise":
            assert launches == ["cuGraphLaunch"]
    if engine == "ort-cuda":
        new = bench.ort.InferenceSession.runs[len(runs) :]
        assert "-1" not in new
        assert len(set(new)) == len(new) == len(shapes)
    assert bench.machine.used == used


@pytest.mark.sampled(2)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_graph_answers_as_the_work_that_it_was_made_of(
    bench: Bench, specs: dict[str, ModelSpec], engine: str
) -> None:
    """Replay and piece by piece, to the last bit."""
    model: Any = bench.load(engine, [specs["classify"]]).runner(0)
    batch = Batch(MODEL, texts(7, 16, 9))
    replayed = model.run(batch).arrays
    with without_graphs(model.models[0]):
        queued = model.run(batch).arrays
    assert all(np.array_equal(left, right) for left, right in zip(replayed, queued, strict=True))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("engine", ENGINES)
def test_graphs_have_a_bound_and_the_rest_runs_without(
    bench: Bench, specs: dict[str, ModelSpec], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no memory for graphs every answer is the same, piece by piece."""
    monkeypatch.setattr("bertserve.serving.engine.gpu.model.GRAPH_BYTES", -1)
    check(bench, engine, specs["embed"], texts(9), texts(3, 20))
    assert bench.machine.graphs == {}
    assert set(bench.ort.InferenceSession.runs) <= {"-1"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_that_is_not_batch_invariant_is_not_batched(
    bench: Bench, specs: dict[str, ModelSpec], engine: str
) -> None:
    """Nobody has proven that company leaves its answers alone: one row a run."""
    spec = msgspec.structs.replace(specs["embed"], batch_invariant=False)
    lane = check(bench, engine, spec, texts(9, 9, 9))
    assert {shape.rows for shape in lane.models[0].shapes} == {1}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_failure_that_passes_costs_one_batch(bench: Bench, specs: dict[str, ModelSpec], engine: str) -> None:
    """The driver refuses a call; the GPU still works, and the next batch is answered."""
    gpu = bench.load(engine, [specs["embed"]])
    bench.machine.fail["cuStreamSynchronize"] = 1
    with pytest.raises(EngineFault, match="CUDA_ERROR_INVALID_VALUE"):
        run(gpu, *texts(9))
    bench.machine.fail.clear()
    run(gpu, *texts(9))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("status", [2, 214, 700, 719])
def test_a_failure_that_stays_loses_the_device(
    bench: Bench, specs: dict[str, ModelSpec], engine: str, status: int
) -> None:
    """A sticky error, and memory that is full: the process must end."""
    gpu = bench.load(engine, [specs["embed"]])
    bench.machine.fail["cuStreamSynchronize"] = status
    with pytest.raises(DeviceLost, match=f"CUDA error {status}"):
        run(gpu, *texts(9))


@pytest.mark.parametrize("flavour", ["rtx", "enterprise"])
def test_what_tensorrt_refuses_is_told_apart_by_the_card(
    bench: Bench, specs: dict[str, ModelSpec], flavour: str
) -> None:
    """The library says no: where the GPU still works the batch has failed, else the device is lost."""
    gpu = bench.load(flavour, [specs["embed"]])
    model: Any = gpu.runner(0)
    model.models[0]._graphs.clear()
    for context in bench.libraries[flavour].Engine.opened[0].contexts:
        context.fails = True
    with pytest.raises(EngineFault, match="enqueueV3"):
        run(gpu, *texts(9))
    bench.machine.sticky = 700
    with pytest.raises(DeviceLost):
        run(gpu, *texts(9))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_card_that_is_too_small_says_so(
    monkeypatch: pytest.MonkeyPatch, specs: dict[str, ModelSpec], engine: str
) -> None:
    """Loading ends with the driver's own error, which the worker words."""
    bench = Bench(monkeypatch, {"gpus": [{"name": "Tiny", "capability": [7, 5], "memory": 1000}]})
    with pytest.raises(CudaError) as error:
        bench.load(engine, [specs["embed"]])
    assert error.value.out_of_memory


def test_a_session_that_fell_back_to_the_cpu_is_refused(bench: Bench, specs: dict[str, ModelSpec]) -> None:
    """ONNX Runtime does so in silence; what it says that it runs on is compared with what was asked for."""
    bench.use_ort(falls_back=True)
    with pytest.raises(BundleError, match=r"runs it on CPUExecutionProvider instead of the GPU"):
        bench.load("ort-cuda", [specs["embed"]])


def test_an_onnx_runtime_without_cuda_says_what_to_install(
    bench: Bench, specs: dict[str, ModelSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package for CPUs has the same name for its module."""
    monkeypatch.setattr(bench.ort, "get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(BundleError, match=r"installed without CUDA: .*--editable '\.\[gpu\]'"):
        bench.load("ort-cuda", [specs["embed"]])


@pytest.mark.parametrize(
    ("changes", "other", "words"),
    [
        pytest.param(
            {"compute_capability": "8.9"},
            {},
            "is for compute capability 8.9, but this Simulated T4 has 7.5; build one here",
            id="card",
        ),
        pytest.param(
            {"version": "1.6.0.1"},
            {},
            r"was built with TensorRT 1\.6\.0\.1, but 1\.7\.1\.116 is installed; install that version",
            id="version",
        ),
        pytest.param({}, {"outputs": "tag"}, "the engine's outputs do not match the manifest", id="outputs"),
        pytest.param({}, {"inputs": "fill_mask"}, "the engine's inputs do not match the manifest", id="inputs"),
    ],
)
def test_an_engine_for_another_card_version_or_model_is_refused(
    bench: Bench, specs: dict[str, ModelSpec], changes: dict[str, str], other: dict[str, str], words: str
) -> None:
    """With what to do; its inputs and outputs are held against the manifest."""
    of_others = {name: getattr(specs[task], name) for name, task in other.items()}
    spec = msgspec.structs.replace(as_plan(specs["embed"], "rtx", **changes), **of_others)
    with pytest.raises(BundleError, match=words):
        prepare_trt(bench, [spec])


def test_an_engine_that_lies_about_its_card_is_refused_by_the_library(
    monkeypatch: pytest.MonkeyPatch, specs: dict[str, ModelSpec]
) -> None:
    """The manifest says this GPU, the file says another one: TensorRT's message becomes a sentence."""
    bench = Bench(monkeypatch, {"gpus": [{"name": "L4", "capability": [8, 9], "memory": 1 << 30}]})
    spec = as_plan(specs["embed"], "rtx", compute_capability="8.9")
    with pytest.raises(BundleError, match="does not fit this GPU or version of TensorRT; rebuild it"):
        prepare_trt(bench, [spec])


def test_the_rules_of_rtx_are_followed(bench: Bench, specs: dict[str, ModelSpec], tmp_path: Path) -> None:
    """Kernels compiled at once, whole graphs of its own, our scratch memory, one context a profile, one cache."""
    bench.load("rtx", [specs["embed"]])
    (engine,) = bench.libraries["rtx"].Engine.opened
    assert [context.length for context in engine.contexts] == lengths_for(MAX_LENGTH)
    assert {context.scratch for context in engine.contexts} == {engine.contexts[0].scratch}
    assert {config.dynamic_shapes_kernel_specialization_strategy for config in engine.configs} == {"eager"}
    assert {config.cuda_graph_strategy for config in engine.configs} == {"whole graph"}
    assert len({id(config.cache) for config in engine.configs}) == 1
    assert bench.machine.graphs == {}
    assert list(tmp_path.iterdir()) == []


def test_compiled_kernels_are_kept_and_read_again(
    bench: Bench, specs: dict[str, ModelSpec], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What one start writes the next one reads, if nobody changed it and the driver is the same."""
    caplog.set_level("INFO")
    kept = tmp_path / "kernels"
    bench.load("rtx", [specs["embed"]], [KernelFiles(write=str(kept))])
    assert kept.read_bytes() == b"kernels for driver 13000"
    files = [KernelFiles(read=str(kept), sha256=digest(kept))]
    bench.load("rtx", [specs["embed"]], files)
    _, again = bench.libraries["rtx"].Engine.opened
    assert again.configs[0].cache.known == kept.read_bytes()
    bench.machine.driver = 13010
    bench.load("rtx", [specs["embed"]], files)
    assert "the cached kernels of embed are for another driver or GPU: recompiling" in caplog.text
    kept.write_bytes(b"something else")
    bench.load("rtx", [specs["embed"]], files)
    assert "the cached kernels of embed cannot be read" in caplog.text


def prepare_trt(bench: Bench, plans: Sequence[ModelSpec]) -> Backend:
    """Loads engines as they are."""
    from bertserve.serving.engine.gpu.tensorrt import TensorRtBackend  # noqa: PLC0415  after the libraries are in their places

    return TensorRtBackend(plans, bench.device, LARGEST_BATCH_TOKENS)


@pytest.mark.parametrize(
    ("simulated", "real"),
    [
        ("Engine", "ICudaEngine"),
        ("Runtime", "Runtime"),
        ("Config", "IRuntimeConfig"),
        ("Cache", "IRuntimeCache"),
        ("Context", "IExecutionContext"),
    ],
)
def test_what_stands_for_tensorrt_has_what_tensorrt_has(bench: Bench, simulated: str, real: str) -> None:
    """Every method and property that the engine may use of a simulated class exists in NVIDIA's own."""
    library = pytest.importorskip("tensorrt_rtx")
    names = bench.library("rtx").classes[simulated]
    assert names
    assert {name for name in names if not hasattr(getattr(library, real), name)} == set()
    for enum, member in (
        (library.ExecutionContextAllocationStrategy, "USER_MANAGED"),
        (library.CudaGraphStrategy, "WHOLE_GRAPH_CAPTURE"),
        (library.DynamicShapesKernelSpecializationStrategy, "EAGER"),
        (library.TensorIOMode, "INPUT"),
    ):
        assert member in enum.__members__


@without_gpu
@pytest.mark.parametrize("engine", ["tensorrt", "ort-cuda"])
def test_a_t4_engine_on_a_machine_without_a_driver_says_so(specs: dict[str, ModelSpec], engine: Any) -> None:
    """The very worker of the server, with the real libraries: one sentence with what to do."""
    spec = as_plan(specs["embed"], "rtx") if engine == "tensorrt" else specs["embed"]
    words = rf"the engine {engine} cannot run here: no NVIDIA driver found.*run this on the machine with the GPU"
    with pytest.raises(BundleError, match=words):
        prepare(EngineLoad(engine, [spec], threads=1))
