from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
from argparse import ArgumentParser
from typing import TYPE_CHECKING

import onnx
import pytest
import torch
import transformers
from onnx import TensorProto, helper

from bertserve.export.checkpoint.reader import open_checkpoint
from bertserve.export.checkpoint.source import find
from bertserve.export.cli.command import run
from bertserve.export.engines import free_space, native, tensorrt, tensorrt_builder
from bertserve.export.engines.tensorrt_builder import Build, BuilderError, shapes_of
from bertserve.export.errors import ExportError
from bertserve.export.graph import task_model
from bertserve.export.precision import half
from bertserve.export.progress import quiet
from bertserve.serving.engine.gpu import tensorrt_library
from bertserve.serving.engine.specs import ShapeProfile
from bertserve.serving.models.bundle import open_bundle
from bertserve.serving.models.node_cache import CacheWriter, open_entry
from bertserve.serving.models.verified_dir import digest
from tests.support.checkpoints import STEMS, write_checkpoint, write_task_checkpoint
from tests.support.exports import ignore, opened
from tests.support.gpus import without_gpu
from tests.support.graphs import ARCHITECTURES, save_graph, write_fill_mask_graph, write_graph
from tests.support.server import child_pids
from tests.support.skips import excused
from tests.support.tasks import MAX_LENGTH, tiny_model, write_bundle

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SHORT = 16
OTHERS = ("sm80", "sm86", "sm89")


@pytest.fixture(scope="module")
def fp16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graphs")
    half.convert(write_graph(folder / "model.onnx", "BertModel"), folder / "fp16.onnx")
    return folder / "fp16.onnx"


@pytest.mark.parametrize(
    ("max_length", "lengths"),
    [(8, [8]), (16, [16]), (17, [16, 17]), (256, [16, 32, 64, 128, 256]), (384, [16, 32, 64, 128, 256, 384])],
)
def test_one_profile_a_sequence_bucket(max_length: int, lengths: list[int]) -> None:
    """The lengths are those that the scheduler pads to, each fixed, with batches of 1 to 32 texts."""
    expected = tuple(ShapeProfile((1, length), (4, length), (32, length)) for length in lengths)
    assert tensorrt.profiles(max_length) == expected


def test_an_engine_for_a_t4_is_built_where_there_is_no_gpu(fp16: Path, tmp_path: Path) -> None:
    """The record says what the file is, progress rises, and nothing else is left in the folder."""
    seen: list[tuple[int, int]] = []
    file = tmp_path / "model.sm75.fp16.engine"
    done = tensorrt.build(fp16, file, "t4", max_length=32, count=lambda *at: seen.append(at))
    made = done.engine
    assert (made.flavour, made.compute_capability) == ("rtx", "7.5")
    assert made.version.count(".") >= 2
    assert made.profiles == tensorrt.profiles(32)
    assert tensorrt.artifact(made, file).size_bytes == file.stat().st_size > fp16.stat().st_size
    assert 2**20 < done.peak_memory_bytes < 2**31
    assert seen == sorted(set(seen))
    assert {total for _, total in seen} == {100}
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("target", ["sm120", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_every_target_builds(fp16: Path, tmp_path: Path, target: str) -> None:
    """An engine for each generation of GPUs, with the compute capability in its record."""
    made = tensorrt.build(fp16, tmp_path / "engine", target, max_length=SHORT, count=ignore)
    assert made.engine.compute_capability == f"{target[2:-1]}.{target[-1]}"


def built(raw: Path, max_length: int = SHORT) -> tensorrt.Done:
    """The engine for a T4 of a graph in fp32."""
    half.convert(raw, raw.with_name("fp16.onnx"))
    done = tensorrt.build(
        raw.with_name("fp16.onnx"), raw.with_name("engine"), "t4", max_length=max_length, count=ignore
    )
    assert raw.with_name("engine").stat().st_size > 0
    return done


@pytest.mark.sampled(1)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_builds_for_a_t4(tmp_path: Path, architecture: str) -> None:
    """Each kind of encoder and of head parses and builds with its islands."""
    built(write_graph(tmp_path / "model.onnx", architecture))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model_type", sorted(STEMS))
def test_every_family_builds_for_a_t4(tmp_path: Path, model_type: str) -> None:
    """The graph of every family parses and builds, whatever its attention is made of."""
    checkpoint = opened(write_task_checkpoint(tmp_path / "small", model_type, "classify"))
    task_model.write(task_model.load(checkpoint), tmp_path / "raw.onnx")
    built(tmp_path / "raw.onnx")


def test_an_engine_that_fills_masks_builds(tmp_path: Path) -> None:
    """The places of masks are an input of their own, up to 16 a text."""
    made = built(write_fill_mask_graph(tmp_path / "model.onnx"))
    assert shapes_of(made.engine.profiles[0], ["batch", "masks"]) == ((1, 1), (4, 1), (32, 16))


@pytest.mark.slow
def test_the_demo_models_engine_for_a_t4_builds(tmp_path: Path) -> None:
    """The demo model, with all its sequence buckets."""
    checkpoint = open_checkpoint(find("demo"), None, [].append)
    task_model.write(task_model.load(checkpoint), tmp_path / "raw.onnx")
    made = built(tmp_path / "raw.onnx", checkpoint.max_length)
    assert [profile.max[1] for profile in made.engine.profiles] == [16, 32, 64, 128, 256]


@pytest.mark.slow
@pytest.mark.parametrize("max_length", [SHORT, 512])
def test_the_engine_of_bert_base_for_a_t4_builds(tmp_path: Path, max_length: int) -> None:
    """BERT-base at its full size: 110 million weights, in 2 GiB of memory."""
    with quiet(), torch.random.fork_rng(devices=[]):
        bert = transformers.BertModel(transformers.BertConfig(attn_implementation="eager"), add_pooling_layer=False)
    # What the graph takes and answers is the same at every size.
    small = opened(write_checkpoint(tmp_path / "small"))
    task_model.write(task_model.TaskModel(bert, small).eval(), tmp_path / "raw.onnx")
    assert built(tmp_path / "raw.onnx", max_length).peak_memory_bytes < 2 << 30


def test_an_unknown_target_is_refused(fp16: Path, tmp_path: Path) -> None:
    """A target that nothing builds for is answered with those that there are."""
    with pytest.raises(ExportError, match=r"unknown TensorRT target 'sm90'; supported: t4, sm75, sm80, .*, native"):
        tensorrt.build(fp16, tmp_path / "engine", "sm90", max_length=SHORT, count=ignore)


def refusal(path: Path, folder: Path, target: str = "t4") -> str:
    """The sentence that a build ends with; it leaves no file."""
    made = folder / "made"
    made.mkdir()
    with pytest.raises(ExportError) as error:
        tensorrt.build(path, made / "engine", target, max_length=SHORT, count=ignore)
    assert list(made.iterdir()) == []
    assert "\n" not in str(error.value)
    return str(error.value)


def value(name: str, *shape: str | int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT16, shape)


def fused_graph(path: Path) -> Path:
    x, bias, y = (value(name, "batch", "sequence") for name in "xby")
    return save_graph(path, [helper.make_node("BiasGelu", ["x", "b"], ["y"], domain="com.microsoft")], [x, bias], [y])


def of_another_form(path: Path) -> Path:
    return save_graph(
        path, [helper.make_node("Relu", ["x"], ["y"])], [value("x", "batch", 8)], [value("y", "batch", 8)]
    )


def no_graph(path: Path) -> Path:
    path.write_bytes(b"not a graph" * 100)
    return path


@pytest.mark.parametrize(
    ("write", "sentence"),
    [
        pytest.param(
            lambda path: write_graph(path, "BertModel"),
            "the TensorRT engine for t4 cannot be built: TensorRT does not support FP32 products.*fp16 graph",
            id="fp32",
        ),
        pytest.param(fused_graph, "use the unfused graph", id="fused-by-onnx-runtime"),
        pytest.param(no_graph, "Failed to parse the ONNX model", id="no-graph"),
        pytest.param(of_another_form, r"the input x must be \[batch, sequence\]", id="inputs-of-another-form"),
    ],
)
def test_a_graph_that_no_engine_is_made_of_is_refused(
    tmp_path: Path, write: Callable[[Path], Path], sentence: str
) -> None:
    """In one line, with what to give instead or in TensorRT's own words."""
    assert re.search(sentence, refusal(write(tmp_path / "graph.onnx"), tmp_path))


@without_gpu
def test_a_native_build_without_a_gpu_says_so(fp16: Path, tmp_path: Path) -> None:
    """No driver: one sentence with where to run it."""
    sentence = refusal(fp16, tmp_path, "native")
    assert "no NVIDIA driver found (CUDA error 35); run this on the machine with the GPU" in sentence


@pytest.mark.skipif(importlib.util.find_spec("tensorrt") is not None, reason=excused("the other library is installed"))
def test_a_missing_library_is_named(fp16: Path, tmp_path: Path) -> None:
    """A library that is not installed is answered with how to install it."""
    order = Build("enterprise", str(fp16), str(tmp_path / "engine"), "SM75", tensorrt.profiles(SHORT), 1 << 30, 1, None)
    with pytest.raises(BuilderError, match=r"No module named 'tensorrt'.*pip install tensorrt"):
        tensorrt_builder.run(order, lambda _answer: None)


@without_gpu
def test_the_librarys_own_word_for_a_missing_driver_is_understood(fp16: Path, tmp_path: Path) -> None:
    """TensorRT, asked to open an engine without a driver, gives an error that becomes the same sentence."""
    library = pytest.importorskip("tensorrt_rtx")
    tensorrt.build(fp16, tmp_path / "engine", "t4", max_length=SHORT, count=ignore)
    logger = tensorrt_library.logger(library)
    content = (tmp_path / "engine").read_bytes()
    with contextlib.suppress(TypeError):
        assert tensorrt_library.runtime(library, logger).deserialize_cuda_engine(content) is None
    assert "no NVIDIA driver found" in tensorrt_library.reason(logger.errors)


def test_a_timing_cache_is_written_and_read_again(fp16: Path, tmp_path: Path) -> None:
    """The path of the enterprise library, taken with the other flavour: a cache appears, and does no harm later."""
    cache = tmp_path / "timings"
    for name in ("first", "second"):
        order = Build(
            flavour="rtx",
            graph=str(fp16),
            engine=str(tmp_path / name),
            capability="SM75",
            profiles=tensorrt.profiles(SHORT),
            workspace_bytes=1 << 30,
            threads=1,
            timing_cache=str(cache),
        )
        tensorrt._run(order, "", ignore)
        assert cache.stat().st_size > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second", "timings"]


def test_a_nodes_engine_lies_in_its_cache(fp16: Path, tmp_path: Path) -> None:
    """The path of a native engine, taken with the other flavour: engine and timings are kept, and serve the next."""
    models, cache = tmp_path / "models", tmp_path / "cache"
    first, second = (open_bundle(write_bundle(models, tiny_model("tag"))) for _ in range(2))
    with CacheWriter(cache, "tag", 1) as node:
        file, timings = node.path / "model.sm75.fp16.engine", node.path / native.TIMINGS
        made = tensorrt.build(fp16, file, "t4", max_length=MAX_LENGTH, count=ignore, timing_cache=timings)
        node.publish(first, engines=[tensorrt.artifact(made.engine, file)], files=[native.TIMINGS])
    entry = open_entry(cache, first)
    (engine,) = entry.derived.engines
    assert (engine.target, engine.proven, engine.sha256) == ("sm75", False, digest(entry.path / engine.file))
    native.recall_timings(cache, first.path, tmp_path)
    assert (tmp_path / native.TIMINGS).read_bytes() == (entry.path / native.TIMINGS).read_bytes() != b""
    native.recall_timings(cache, second.path, models)
    assert not (models / native.TIMINGS).exists()


class StopError(Exception):
    """Stands for an interrupt that arrives while progress is shown."""


def test_an_interrupt_ends_the_builder(fp16: Path, tmp_path: Path) -> None:
    """An exception out of the progress callback leaves neither a process nor a file."""
    before = child_pids(os.getpid())

    def stop(_done: int, _total: int) -> None:
        raise StopError

    with pytest.raises(StopError):
        tensorrt.build(fp16, tmp_path / "engine", "t4", max_length=SHORT, count=stop)
    assert child_pids(os.getpid()) == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "sentence"),
    [(signal.SIGKILL, "for lack of memory; free some"), (signal.SIGSEGV, "ended by SIGSEGV; please report this")],
)
def test_a_builder_that_dies_is_one_sentence(fp16: Path, tmp_path: Path, number: int, sentence: str) -> None:
    """A kill for want of memory, or a crash in native code, is told apart and leaves no file."""
    before = child_pids(os.getpid())

    def kill(_done: int, _total: int) -> None:
        for process in set(child_pids(os.getpid())) - set(before):
            os.kill(process, number)

    with pytest.raises(ExportError, match=f"the TensorRT engine for t4 cannot be built: .*{sentence}"):
        tensorrt.build(fp16, tmp_path / "engine", "t4", max_length=SHORT, count=kill)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("memory", "disk", "words"), [(1 << 60, 0, "memory"), (0, 1 << 60, "in /")])
def test_too_little_room_is_said_before_the_step(
    tmp_path: Path, memory: int, disk: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a step needs and what is free, with what to do; the exit code is the one for "try again later"."""

    def step(*_: object) -> int:
        free_space.check("building x", memory_bytes=memory, folder=tmp_path, disk_bytes=disk)
        return 0

    assert run(ArgumentParser(prog="bertserve build"), [], step) == os.EX_TEMPFAIL
    assert re.search(f"building x needs about .* GiB .*{words}.* are free; ", capsys.readouterr().err)
    free_space.check("building x", memory_bytes=0, folder=tmp_path, disk_bytes=0)
