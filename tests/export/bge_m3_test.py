"""A bge-m3 folder exports as one graph with three outputs, which answers as FlagEmbedding does with the same folder."""

from __future__ import annotations

import argparse
import importlib.util
import shutil
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import onnx
import pytest
import torch

from bertserve.export import build
from bertserve.export.cli.export import parser, recipe_of
from bertserve.export.errors import ExportError
from bertserve.export.graph import optimize, task_model
from bertserve.export.precision import emulation, half, int8, openvino, quantize
from bertserve.export.proof import parity
from bertserve.export.recipe import Recipe
from bertserve.export.tasks import EXPORTS, embed
from bertserve.export.tasks.libraries.answers import Answer
from bertserve.serving.models.manifest import Manifest, problem
from bertserve.serving.tasks.embed_sparse import of_tokens
from bertserve.serving.tasks.parts import Embedding, Labels, MultiVector, Sparse
from tests.support.bge_m3 import COLUMNS, HIDDEN, LENGTH, FlagModel, write_m3
from tests.support.checkpoints import edit_json, write_checkpoint
from tests.support.exports import answers_together, exported, fused, ignore, opened

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bertserve.export.checkpoint.reader import Checkpoint
    from bertserve.serving.models.bundle import Bundle
    from bertserve.serving.models.manifest import Precision, Target
    from bertserve.serving.records import Row

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sentence_transformers") is None,
    reason="the module sentence-transformers is not installed",
)

TEXTS = ["the server", "A text that is not in it, and a text.", "", "is it on the server? " * 20]
CLOSE = 1e-5
OUTPUTS = ["pooled", "token_weights", "token_embeddings"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_m3(tmp_path_factory.mktemp("checkpoint") / "m3")


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Checkpoint:
    return opened(folder)


@pytest.fixture(scope="module")
def bundle(folder: Path) -> Bundle:
    return exported(folder, "--precision", "fp32", "--precision", "int8", "--allow", "int8.agreement")


def rows_of(checkpoint: Checkpoint, path: Path, target: Target = "cpu") -> list[Row]:
    return answers_together(checkpoint, path, checkpoint.vocabulary.encode(TEXTS, LENGTH), target)


def test_one_graph_has_the_vectors_of_flagembedding(folder: Path, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """In a padded batch, from the text on; a layer in half precision is one in fp32 with those numbers."""
    assert (checkpoint.task, checkpoint.also) == ("embed", ("embed_sparse", "embed_tokens"))
    path, library = fused(checkpoint, tmp_path), FlagModel(folder)
    texts = checkpoint.vocabulary.encode(TEXTS, LENGTH)
    for text, encoded, row in zip(TEXTS, texts, rows_of(checkpoint, path), strict=True):
        wanted = library.encode(text)
        pooled, weights, tokens = row
        np.testing.assert_allclose(pooled / np.linalg.norm(pooled), wanted.dense, atol=CLOSE)
        indices, values = of_tokens(encoded, weights, checkpoint.vocabulary.special_ids)
        assert values.tolist() == sorted(values.tolist(), reverse=True)
        found = dict(zip(indices.tolist(), values.tolist(), strict=True))
        assert found == pytest.approx(dict(wanted.lexical), abs=CLOSE)
        np.testing.assert_allclose(tokens[1:], wanted.colbert, atol=CLOSE)


def test_a_folder_of_flagembeddings_trainer_pools_by_the_first_token(tmp_path: Path) -> None:
    """It has no modules.json, with which Sentence Transformers would take the mean. The proof knows that too."""
    folder, said = write_m3(tmp_path / "small"), list[str]()
    (folder / "modules.json").unlink()
    shutil.rmtree(folder / "1_Pooling")
    edit_json(folder / "tokenizer_config.json", model_max_length=LENGTH)
    for outputs in (None, ("dense",)):
        checkpoint = opened(folder, notice=said.append, outputs=outputs)
        assert "first token" in said[-1]
        library, texts = FlagModel(folder), checkpoint.vocabulary.encode(TEXTS, LENGTH)
        for text, encoded in zip(TEXTS, texts, strict=True):
            pooled, *_ = task_model.load(checkpoint).answer(encoded)
            np.testing.assert_allclose(pooled / np.linalg.norm(pooled), library.encode(text).dense, atol=CLOSE)
        words = [] if outputs is None else ["--outputs", "dense"]
        manifest = exported(folder, "--precision", "fp32", *words).manifest
        assert manifest.embedding == Embedding(("cls",), normalize=True)
        assert not manifest.reference_library.unproven  # type: ignore[union-attr]


def test_every_output_is_proven(bundle: Bundle) -> None:
    """Against PyTorch with limits of its own, and from the text on against the formulas."""
    manifest = bundle.manifest
    assert (manifest.task, manifest.also) == ("embed", ("embed_sparse", "embed_tokens"))
    assert [(spec.name, spec.shape) for spec in manifest.outputs] == [
        ("pooled", (-1, HIDDEN)),
        ("token_weights", (-1, -1)),
        ("token_embeddings", (-1, -1, COLUMNS)),
    ]
    assert manifest.multi_vector == MultiVector(LENGTH, LENGTH, mean=True, skips_first=True)
    assert manifest.reference_library is not None
    assert manifest.reference_library.library.endswith("with FlagEmbedding's formulas")
    assert not manifest.reference_library.unproven
    for artifact in bundle.artifacts:
        assert artifact.also.keys() == set(manifest.also)
        assert artifact.batch_invariant
        assert artifact.end_to_end is not None
        for found in artifact.also.values():
            assert found.cosine_mean is not None
            assert found.cosine_mean > (0.99999 if artifact.precision == "fp32" else 0.99)
    fp32 = bundle.artifact("fp32")
    assert fp32 is not None
    assert fp32.end_to_end is not None
    assert fp32.end_to_end.max_difference < CLOSE
    assert "embed_tokens: minimum cosine" in (bundle.path / "report.html").read_text()


def test_smaller_forms_keep_the_layers_in_fp32(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """INT8 of both libraries, and the twin of fp16."""
    pytest.importorskip("openvino", reason="the extra `openvino` is not installed")
    path = fused(checkpoint, tmp_path)
    raw, shape, comparator = tmp_path / "raw.onnx", optimize.shape_of(checkpoint), build.comparator_of(checkpoint)
    texts = checkpoint.vocabulary.encode(TEXTS, LENGTH)
    exact = rows_of(checkpoint, path)
    cuts = {graph: int8.cuts_of(graph, task_model.spec_of(checkpoint, graph), texts, ignore) for graph in (path, raw)}
    half.convert(path, tmp_path / "fp16.onnx")
    emulation.emulate(tmp_path / "fp16.onnx", tmp_path / "twin.onnx")
    quantize.quantize(path, tmp_path / "int8.onnx", shape, cuts[path], static=True)
    openvino.quantize(raw, tmp_path / "openvino.onnx", shape, cuts[raw])
    openvino.quantize(raw, tmp_path / "dynamic.onnx", shape, None)
    forms: dict[str, Target] = {"twin": "cpu", "int8": "cpu", "openvino": "openvino", "dynamic": "openvino"}
    for form, target in forms.items():
        rows = rows_of(checkpoint, tmp_path / f"{form}.onnx", target)
        for each in (comparator, *comparator.further.values()):
            for row, right in zip(rows, exact, strict=True):
                assert each.cosine(row, right) > (0.9999 if form == "twin" else 0.98), (form, type(each))
    heads = [node for node in onnx.load(tmp_path / "int8.onnx").graph.node if "/heads/" in node.name]
    assert [node.op_type for node in heads if "MatMul" in node.op_type] == ["MatMul", "MatMul"]


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("task", ["embed_sparse", "embed_tokens"])
def test_each_output_has_limits(checkpoint: Checkpoint, task: str, precision: Precision, tmp_path: Path) -> None:
    """A graph whose other outputs are right is refused for the one that is wrong, by its name."""
    path = fused(checkpoint, tmp_path)
    texts = checkpoint.vocabulary.encode(TEXTS, LENGTH)
    rows = rows_of(checkpoint, path)
    at = OUTPUTS.index("token_weights" if task == "embed_sparse" else "token_embeddings")
    wrong = [tuple(array[::-1] if index == at else array for index, array in enumerate(row)) for row in rows]
    comparator = build.comparator_of(checkpoint)
    reference = parity.Reference(TEXTS, texts, rows)
    figures = parity.further_parities(comparator, wrong, reference)
    broken: dict[str, str] = {}
    for other, found in figures.items():
        limits = EXPORTS[other].limits[precision]
        broken = parity.with_broken(broken, other, parity.broken_limits(found, limits))
    assert broken
    assert all(sentence.startswith(f"{task}: ") for sentence in broken.values())


def test_what_was_said_of_one_output_is_joined_with_the_next() -> None:
    joined = parity.with_broken({"cosine_min": "a", "agreement": "b"}, "embed_tokens", {"cosine_min": "c"})
    assert joined == {"cosine_min": "a; embed_tokens: c", "agreement": "b"}


@pytest.mark.parametrize(
    ("asked", "also"),
    [(("dense",), ()), (("sparse",), ("embed_sparse",)), (("dense", "tokens"), ("embed_tokens",))],
    ids=str,
)
def test_outputs_are_chosen(folder: Path, asked: tuple[str, ...], also: tuple[str, ...]) -> None:
    """The dense one is always there; an export of it alone is that of a folder without layers."""
    checkpoint = opened(folder, outputs=asked)
    assert checkpoint.also == also
    assert task_model.outputs(checkpoint)[0].name == "pooled"
    assert ("eos" in checkpoint.vocabulary.special_ids) == bool(also)


def test_the_choice_is_part_of_the_recipe(folder: Path, tmp_path: Path) -> None:
    """Only if there is one, so that the digests of other exports stay."""
    arguments = parser()

    def digest(*words: str) -> str:
        given = [str(folder), "--out", str(tmp_path), "--precision", "fp32", *words]
        return recipe_of(arguments.parse_args(given), arguments).sha256()

    assert digest() == Recipe(str(folder), tmp_path, artifacts=("fp32",)).sha256()
    assert len({digest(), digest("--outputs", "dense"), digest("--outputs", "sparse,dense")}) == 3
    assert digest("--outputs", "sparse,dense") == digest("--outputs", "dense,sparse")
    with pytest.raises(SystemExit):
        digest("--outputs", "dense,lexical")


def test_weights_of_other_files_count(folder: Path, checkpoint: Checkpoint) -> None:
    """The digests of the checkpoint follow the layers' files."""
    assert checkpoint.sha256() != opened(folder, outputs=("dense",)).sha256()
    before = checkpoint.source.revision()
    path = folder / "sparse_linear.pt"
    content = path.read_bytes()
    path.unlink()
    assert checkpoint.source.revision() != before
    path.write_bytes(content)
    assert checkpoint.source.revision() == before


SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (
        lambda path: path.write_bytes(path.read_bytes()[:-200]),
        r"sparse_linear\.pt is damaged, truncated or not PyTorch weights",
    ),
    "pointer": (
        lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n"),
        r"sparse_linear\.pt is a Git LFS pointer",
    ),
    "code": (
        lambda path: torch.save({"weight": argparse.Namespace}, path),
        r"sparse_linear\.pt calls argparse\.Namespace when it is loaded",
    ),
    "columns": (
        lambda path: torch.save({"weight": torch.zeros(2, HIDDEN), "bias": torch.zeros(2)}, path),
        r"sparse_linear\.pt: weight has shape \[2, 32\], but the model requires \[1, 32\]",
    ),
    "bias": (
        lambda path: torch.save({"weight": torch.zeros(1, HIDDEN)}, path),
        r"sparse_linear\.pt has weight; it must have weight and bias alone",
    ),
    "integers": (
        lambda path: torch.save({"weight": torch.zeros(1, HIDDEN, dtype=torch.int32), "bias": torch.zeros(1)}, path),
        "weight is I32; only floating-point weights are supported",
    ),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_layer_that_is_not_one_is_refused(folder: Path, name: str) -> None:
    """By the name of its file, before anything is exported."""
    spoil, sentence = SPOILED[name]
    path = folder / "sparse_linear.pt"
    content = path.read_bytes()
    try:
        spoil(path)
        with pytest.raises(ExportError, match=sentence):
            opened(folder, outputs=("sparse",))
    finally:
        path.write_bytes(content)


def test_outputs_that_are_not_there(folder: Path, tmp_path: Path) -> None:
    """Of a folder without such layers, and of another task, which has none of them."""
    small = write_checkpoint(tmp_path / "small")
    sentence = r"sparse_linear\.pt is missing, so there is no output 'sparse'; available: dense"
    with pytest.raises(ExportError, match=sentence):
        opened(small, outputs=("dense", "sparse"))
    assert opened(small, outputs=("dense",)).also == opened(folder, "embed_tokens").also == ()
    with pytest.raises(ExportError, match="--outputs is for the task embed; this export is for embed_tokens"):
        opened(folder, "embed_tokens", outputs=("dense",))


def test_other_tasks_say_how_the_layers_are_exported(folder: Path, tmp_path: Path) -> None:
    """The vectors of the last layer are not those of the layer beside it; a folder without layers says nothing."""
    said: list[str] = []
    opened(folder, "embed_tokens", notice=said.append)
    assert said == [
        "exporting the vectors of the last layer, without colbert_linear.pt; for those of FlagEmbedding, remove --task"
    ]
    with pytest.raises(ExportError, match=r"; remove --task to export sparse_linear\.pt as the output sparse$"):
        opened(folder, "embed_sparse")
    small = write_checkpoint(tmp_path / "small")
    opened(small, "embed_tokens", notice=said.append)
    assert len(said) == 1
    with pytest.raises(ExportError, match=r"without modules\.json$"):
        opened(small, "embed_sparse")


def test_layers_in_a_file_that_flagembedding_does_not_read(folder: Path, tmp_path: Path) -> None:
    """They are not left out silently, only if they are not asked for."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "sparse_linear.pt").rename(copy / "sparse_linear.safetensors")
    for asked in (None, ("sparse", "tokens")):
        with pytest.raises(ExportError, match=r"FlagEmbedding reads sparse_linear\.pt, not sparse_linear\.safetensors"):
            opened(copy, outputs=asked)
    assert opened(copy, outputs=("dense", "tokens")).also == ("embed_tokens",)


MANIFESTS: list[tuple[dict[str, Any], str]] = [
    ({"sparse": None}, "the outputs do not match the task"),
    ({"multi_vector": None}, "the outputs do not match the task"),
    ({"labels": Labels(("a",))}, "labels does not belong to the task embed"),
    ({"embedding": None}, "multi_vector does not belong to the task embed"),
    ({"sparse": Sparse(query_weights=True)}, "query_weights is only for the task embed_sparse"),
]


@pytest.mark.parametrize(("change", "sentence"), MANIFESTS, ids=str)
def test_a_manifest_must_agree_with_itself(bundle: Bundle, change: dict[str, Any], sentence: str) -> None:
    manifest = bundle.manifest
    assert problem(manifest, "m3", str(manifest.version)) is None
    assert problem(msgspec.structs.replace(manifest, **change), "m3", str(manifest.version)) == sentence
    assert msgspec.json.decode(msgspec.json.encode(manifest), type=Manifest) == manifest


def test_the_end_to_end_check_sees_each_output(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the library has another weight or vector, nothing is written."""
    from bertserve.export.cli.export import main  # noqa: PLC0415  as `exported`

    whole = embed._Library.answer

    def other(self: Any, texts: Any, form: Any) -> Any:
        answers = whole(self, texts, form)
        if form.title == "as tokens":
            answers[0] = Answer(answers[0].structure, (), answers[0].numbers + 1e-3)
        return answers

    monkeypatch.setattr(embed._Library, "answer", other)
    assert main([str(folder), "--out", str(folder.with_name("none")), "--precision", "fp32"]) == 1
    said = capsys.readouterr().err
    assert "embed_tokens: largest difference from Sentence Transformers" in said
    assert "as tokens" in said
