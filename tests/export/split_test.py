"""Models cut into parts: what the parts compute and hold, what their bundle proves, and how they are served."""

from __future__ import annotations

import json
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest

from export.cli import inspect, verify
from export.cli.export import main as export
from export.errors import ExportError
from export.graph import editor
from export.split import layers, ranks
from serving.engine.specs import PARTIAL
from serving.errors import BundleError
from serving.models.bundle import open_bundle
from serving.models.manifest import REPORT
from tests.support.checkpoints import write_task_checkpoint
from tests.support.clients import get, post_json
from tests.support.exports import fused, opened
from tests.support.graphs import run
from tests.support.server import Server, child_pids, is_running
from tests.support.short_form import in_short
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

FAMILIES = {
    # The hidden state alone goes on, with the lengths that its mask is made of.
    "bert": ["embed", {"num_hidden_layers": 4}],
    # Before its normalisation the layer's input is needed beside it.
    "megatron-bert": ["classify", {"num_hidden_layers": 4}],
    # Masks and rotations of positions are computed from the inputs in each part.
    "modernbert": ["embed", {"num_hidden_layers": 4}],
}
WORDS = 20_000
IDS = [[2, 95, 96, 97, 98, 3], [2, 70, 80, 90, 3, 0], [2, 3, 0, 0, 0, 0]]


def graph_of(folder: Path, family: str, task: str, **settings: object) -> Path:
    """A small checkpoint's graph, as the export cuts it."""
    return fused(opened(write_task_checkpoint(folder / "checkpoint", family, task, **settings)), folder)


def cut(graph: Path, parts: int) -> list[Path]:
    """The files of a graph's parts, and behind them of what looks words up."""
    return layers.split(graph, [graph.with_name(f"{number}.onnx") for number in range(parts)])


def answers(paths: Sequence[Path], ids: Sequence[Sequence[int]] = IDS) -> NDArray[np.float32]:
    """What parts answer that run one after another, behind what looks words up for them."""
    rows = np.array(ids, np.int32)
    tensors = {"input_ids": rows, "attention_mask": (rows > 0).astype(np.int32), "token_type_ids": np.zeros_like(rows)}
    found: list[NDArray[np.float32]] = []
    for path in sorted(paths, key=lambda path: ".lookup." not in path.name):
        found = run(path, tensors)
        tensors |= dict(zip(outputs_of(path), found, strict=True))
    return found[0]


def outputs_of(path: Path) -> list[str]:
    return [value.name for value in onnx.load(path, load_external_data=False).graph.output]


def weights(path: Path) -> int:
    tensors = onnx.load(path).graph.initializer
    return sum(onnx.numpy_helper.to_array(tensor).nbytes for tensor in tensors)


def held(files: Sequence[Path], parts: int) -> list[int]:
    """Bytes of each part's constants, with those of what looks words up for it."""
    lookups = [0, *map(weights, files[parts:]), *[0] * parts]
    return [weights(path) + more for path, more in zip(files[:parts], lookups, strict=False)]


@pytest.mark.parametrize("family", in_short(FAMILIES, "megatron-bert"))
def test_parts_answer_as_the_whole(tmp_path: Path, family: str) -> None:
    """To the bit, in two parts and in three, and none holds more than its share and a tenth of it."""
    task, settings = FAMILIES[family]
    graph = graph_of(tmp_path, family, task, **settings)
    expected, whole = answers([graph]), weights(graph)
    for count in (2, 3):
        parts = cut(graph, count)
        np.testing.assert_array_equal(answers(parts), expected)
        assert max(held(parts, count)) <= 1.11 * whole / count


@pytest.mark.parametrize(
    ("count", "family"),
    [
        pytest.param(2, "bert", marks=pytest.mark.long),
        (2, "modernbert"),
        (3, "bert"),
        pytest.param(3, "modernbert", marks=pytest.mark.long),
    ],
)
def test_parts_share_a_table_that_would_leave_one_of_them_too_much(tmp_path: Path, family: str, count: int) -> None:
    """To the bit, on both sides of the first piece's end too; layers are spread as if there were no table."""
    graph = graph_of(tmp_path, family, "embed", vocab_size=WORDS, num_hidden_layers=count)
    files = cut(graph, count)
    parts, lookups = files[:count], files[count:]
    assert [path.name for path in lookups] == [f"{number}.lookup.onnx" for number in range(1, count)]
    assert max(held(files, count)) <= 1.02 * weights(graph) / count
    products = [sum(node.op_type == "MatMul" for node in onnx.load(path).graph.node) for path in parts]
    assert len(set(products)) == 1
    lookup = onnx.load(lookups[0]).graph
    (rows,) = [len(onnx.numpy_helper.to_array(table)) for table in lookup.initializer if len(table.dims) > 1]
    ids = [[rows - 2, rows - 1, rows, rows + 1], [1, WORDS // 2, WORDS - 2, WORDS - 1]]
    np.testing.assert_array_equal(answers(files, ids), answers([graph], ids))


@pytest.mark.parametrize("count", [5, 8])
def test_pieces_of_a_shared_table_may_be_small(tmp_path: Path, count: int) -> None:
    """A row for a part that is full without the table, or so few that each part could hold them all."""
    graph = graph_of(tmp_path, "bert", "embed", num_hidden_layers=5)
    files = cut(graph, count)
    assert len(files) == 2 * count - 1
    ids = np.arange(1, 145, dtype=np.int32).reshape(3, 48)
    np.testing.assert_array_equal(answers(files, ids), answers([graph], ids))


def test_more_parts_than_a_model_has_pieces(tmp_path: Path) -> None:
    """Weights that cannot be divided so often are refused, with the share that a part would have to keep."""
    graph = graph_of(tmp_path, "bert", "embed")
    with pytest.raises(ExportError, match=r"cannot split this model into 12 parts by layers: .* more than 9% of"):
        cut(graph, 12)


@pytest.mark.parametrize("family", ["bert", pytest.param("roberta", marks=pytest.mark.long), "megatron-bert"])
def test_ranks_add_up_to_the_whole(tmp_path: Path, family: str) -> None:
    """Heads, columns and words of each rank; a rank holds its share of what is large and all of what is small."""
    graph = graph_of(tmp_path, family, "embed", vocab_size=4_000)
    expected, ids = answers([graph]), np.array(IDS, np.int32)
    files = ranks.split(graph, 2, lambda rank, step: tmp_path / f"{rank}.{step}.onnx")
    own = [files[: len(files) // 2], files[len(files) // 2 :]]
    given = {"input_ids": ids, "attention_mask": (ids > 0).astype(np.int32), "token_type_ids": np.zeros_like(ids)}
    tensors: list[dict[str, NDArray[np.float32]]] = [dict(given), dict(given)]
    for step in zip(*own, strict=True):
        made = [
            dict(zip(outputs_of(path), run(path, held), strict=True)) for path, held in zip(step, tensors, strict=True)
        ]
        for name in made[0]:
            summed = name.endswith(PARTIAL)
            for held, mine in zip(tensors, made, strict=True):
                held[name.removesuffix(PARTIAL)] = made[0][name] + made[1][name] if summed else mine[name]
    np.testing.assert_allclose(tensors[0]["pooled"], expected, atol=1e-5)
    np.testing.assert_array_equal(tensors[0]["pooled"], tensors[1]["pooled"])
    assert max(sum(map(weights, paths)) for paths in own) <= 1.11 * weights(graph) / 2


def test_layers_of_other_kinds_have_no_ranks(tmp_path: Path) -> None:
    """The error says what can be split so, and what may do instead; so it does where heads do not divide."""
    with pytest.raises(ExportError, match="try --split-by layers"):
        ranks.split(graph_of(tmp_path / "a", "modernbert", "embed"), 2, lambda *_: tmp_path / "part.onnx")
    with pytest.raises(ExportError, match="4 attention heads cannot be split evenly between 3 ranks"):
        ranks.split(graph_of(tmp_path / "b", "bert", "embed"), 3, lambda *_: tmp_path / "part.onnx")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a small model in two parts that share its words; some weights lie beside the graphs."""
    folder = tmp_path_factory.mktemp("split")
    checkpoint = write_task_checkpoint(folder / "small", "bert", "embed", num_hidden_layers=4, vocab_size=4_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(editor, "LARGEST_FILE", 60_000)
        assert export([str(checkpoint), "--out", str(folder / "models"), "--split", "2"]) == 0
    return folder / "models"


def test_the_bundle_lists_every_part(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each with its digest; `inspect` shows them, and `verify` repeats the proof on the parts."""
    bundle = open_bundle(repository / "small" / "1")
    for precision in ("fp32", "int8"):
        artifact = bundle.artifact(precision)
        assert artifact.proven
        names = [f"model.{precision}.part{number}of2" for number in (1, 2)]
        assert [[graph.file for graph in graphs] for graphs in artifact.processes] == [
            [f"{names[0]}.onnx"],
            [f"{names[1]}.onnx", f"{names[1]}.lookup.onnx"],
        ]
    assert list(bundle.path.glob("*.onnx.data"))
    assert inspect.main([str(bundle.path)]) == 0
    shown = capsys.readouterr().out
    assert "model.int8.part2of2.onnx" in shown
    assert "in 2 parts by layers" in shown
    assert "in 2 parts by layers" in (bundle.path / REPORT).read_text(encoding="utf-8")
    assert verify.main([str(bundle.path)]) == 0


@pytest.mark.parametrize("change", ["missing", "altered", "swapped"])
def test_a_part_that_is_not_the_manifests_is_named(repository: Path, tmp_path: Path, change: str) -> None:
    """Whether it is missing, altered, or stands where another should."""
    path = tmp_path / "models" / "small" / "1"
    shutil.copytree(repository / "small" / "1", path)
    part = path / "model.fp32.part2of2.onnx"
    if change == "missing":
        part.unlink()
    elif change == "altered":
        part.write_bytes(part.read_bytes()[:-1] + b"?")
    else:
        manifest = json.loads((path / "manifest.json").read_text())
        first = manifest["artifacts"][0]
        part_entry = {name: first[name] for name in ("file", "sha256", "size_bytes", "data")}
        first.update(first["parts"][0])
        first["parts"][0] = part_entry
        (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=r"model\.fp32\.part2of2\.onnx"):
        open_bundle(path)


def test_parts_for_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In fp16, proven by a twin of the whole and again by those of the parts; an engine of TensorRT for each part."""
    pytest.importorskip("tensorrt_rtx")
    checkpoint = write_task_checkpoint(tmp_path / "small", "bert", "embed", num_hidden_layers=4)
    options = ["--precision", "fp32", "--precision", "fp16", "--tensorrt", "t4", "--split", "2", "--max-length", "16"]
    assert export([str(checkpoint), "--out", str(tmp_path / "models"), *options]) == 0
    bundle = open_bundle(tmp_path / "models" / "small" / "1")
    _, half, engine = bundle.manifest.artifacts
    assert (half.target, half.split_by, half.proven) == ("cuda", "layers", True)
    assert [half.file, half.parts[0].file] == [f"model.fp16.part{number}of2.onnx" for number in (1, 2)]
    assert (engine.target, engine.split_by, engine.proven) == ("sm75", "layers", False)
    assert [graph.file for graph in engine.graphs] == [f"model.sm75.fp16.part{at}of2.engine" for at in (1, 2)]
    capsys.readouterr()
    assert verify.main([str(bundle.path)]) == 0
    assert f"{half.file}" in capsys.readouterr().out


def test_a_part_that_is_killed_under_load_costs_a_restart(repository: Path) -> None:
    """Every request has one outcome, the answers are those of before, and no process is left over."""
    body = json.dumps({"inputs": [[*ids[:2], 3] for ids in IDS[:1]]}).encode()
    with Server(repository, "--precision", "fp32", "--threads", "2") as server:
        expected = post_json(server.http, "/embed", body).json()
        status = json.loads(get(server.http, "/status").body)
        assert [(model["parts"], model["split_by"]) for model in status["models"]] == [(2, "layers")]
        assert status["engine"]["lanes"] == ["wide", "narrow", "narrow"]
        engine = server.engine_pid()
        (part,) = child_pids(engine)
        with ThreadPoolExecutor(4) as pool:
            replies = [pool.submit(post_json, server.http, "/embed", body) for _ in range(40)]
            os.kill(part, signal.SIGKILL)
            outcomes = {reply.result().status for reply in replies}
        assert outcomes <= {200, 503}
        wait_for(lambda: not is_running(engine), "the end of the engine process")
        wait_for(lambda: post_json(server.http, "/embed", body).status == 200, "a new engine", 30)
        assert post_json(server.http, "/embed", body).json() == expected
        engine = server.engine_pid()
        (part,) = child_pids(engine)
        os.kill(engine, signal.SIGKILL)
        wait_for(lambda: not is_running(part), "the end of the part")


@pytest.mark.usefixtures("few_texts_of_pytorch")
def test_ranks_serve_one_batch_together(tmp_path: Path) -> None:
    """Over a socket as in the export; a rank that is killed costs a restart too."""
    checkpoint = write_task_checkpoint(tmp_path / "small", "bert", "embed", vocab_size=4_000)
    options = ["--precision", "fp32", "--split", "2", "--split-by", "tensors", "--max-length", "16"]
    assert export([str(checkpoint), "--out", str(tmp_path / "models"), *options]) == 0
    bundle = open_bundle(tmp_path / "models" / "small" / "1")
    assert [len(graphs) for graphs in bundle.manifest.artifacts[0].processes] == [6, 6]
    body = json.dumps({"inputs": [[2, 95, 96, 3], [2, 70, 80, 90, 3]]}).encode()
    with Server(tmp_path / "models", "--threads", "2") as server:
        expected = post_json(server.http, "/embed", body).json()
        assert json.loads(get(server.http, "/status").body)["models"][0]["split_by"] == "tensors"
        engine = server.engine_pid()
        os.kill(*child_pids(engine), signal.SIGKILL)
        wait_for(lambda: not is_running(engine), "the end of the engine process")
        wait_for(lambda: post_json(server.http, "/embed", body).status == 200, "a new engine", 30)
        np.testing.assert_allclose(post_json(server.http, "/embed", body).json(), expected, atol=1e-5)
