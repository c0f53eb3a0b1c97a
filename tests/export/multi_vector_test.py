"""Multi-vector models in every layout: exported, they answer as Sentence Transformers' MultiVectorEncoder does."""

from __future__ import annotations

import importlib.util
import inspect
import io
import json
import re
import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest

from bertserve.export import build
from bertserve.export.checkpoint import multi_vector, pooling
from bertserve.export.cli.export import main
from bertserve.export.cli.verify import main as verify
from bertserve.export.engines import tensorrt
from bertserve.export.errors import ExportError
from bertserve.export.graph import task_model
from bertserve.export.precision import half
from bertserve.export.progress import Progress
from bertserve.export.recipe import Recipe
from bertserve.export.tasks import EXPORTS, metrics
from bertserve.serving.engine.base import Batch
from bertserve.serving.engine.batches import Padder
from bertserve.serving.models.bundle import BundleWriter, open_bundle
from bertserve.serving.records import MASK, ModelIndex
from bertserve.serving.tasks.embed_tokens import vectors
from bertserve.serving.tasks.maxsim import maxsim
from bertserve.serving.tasks.parts import Expansion, Labels
from tests.support.checkpoints import edit_json, write_json
from tests.support.exports import answers_together, fused, ignore, opened
from tests.support.graphs import check_ranges
from tests.support.multi_vectors import (
    DOCUMENT_LENGTH,
    LAYOUTS,
    QUERY_LENGTH,
    SIZE,
    write_own,
    write_pylate,
    write_stanford,
)
from tests.support.skips import SHARED, needs_shared

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bertserve.serving.models.manifest import Manifest

pytestmark = [
    pytest.mark.usefixtures("few_texts_of_pytorch"),
    pytest.mark.skipif(
        importlib.util.find_spec("sentence_transformers") is None,
        reason="the module sentence-transformers is not installed",
    ),
]

WITHIN = 1e-5
SHORT = {
    *("own, filled and unattended", "pylate, attended", "pylate, wider than a window", "stanford"),
    "pylate, as GTE-ModernColBERT-v1",
}
"""Between them they have every layout, attended and unattended expansion, skipped tokens on both sides, and tokens that
see no other.
"""


def made(folder: Path, max_length: int | None = None) -> tuple[Manifest, str]:
    """What an export makes of a folder, and says."""
    recipe = Recipe(str(folder), folder.with_name("models"), artifacts=("fp32",), max_length=max_length)
    said = io.StringIO()
    checkpoint = opened(folder, max_length=max_length)
    built = build.build(recipe, checkpoint, BundleWriter(recipe.out, "small"), Progress(said, lambda: None))
    return built.bundle.manifest, said.getvalue()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHORT else pytest.mark.slow) for name in LAYOUTS]
)
def test_every_layout_answers_as_the_library(tmp_path: Path, name: str, probes: str) -> None:
    """From the text on, on both sides: the same tokens, markers, lengths and skipped tokens, and the same numbers."""
    manifest, _ = made(LAYOUTS[name](tmp_path / "small"))
    reference, found = manifest.reference_library, manifest.artifacts[0].end_to_end
    assert reference is not None
    assert found is not None
    assert reference.library.startswith("Sentence Transformers")
    assert not reference.unproven
    assert found.texts > 10
    assert probes == "few" or reference.texts > found.texts
    assert found.max_difference <= WITHIN
    assert (manifest.task, manifest.outputs[0].shape) == ("embed_tokens", (-1, -1, SIZE))
    assert manifest.artifacts[0].batch_invariant


PYLATE = SHARED / "cases" / "encoders"
TEXTS = [
    *("who lives in new york", "the cat, the dog; (new york) works!", "?!.,", "what is [MASK] in [UNK] 🙂 東京"),
    *("[Q] query [D] document", "x", "paris " * 60, 'a-b c\'s "quoted" e.g. U.S.A.', "Größe naïve café"),
    "the the the the",
]
"""Those of its reference."""


@needs_shared(PYLATE)
@pytest.mark.parametrize("side", ["query", "document"])
@pytest.mark.parametrize("name", ["modern_usual", "plain"])
def test_answers_are_those_of_pylate(tmp_path: Path, name: str, side: str) -> None:
    """PyLate's own answers to folders that it saved: ModernBERT's published window, and BERT."""
    checkpoint = opened(PYLATE / "e06_folders" / name)
    sides = checkpoint.multi_vector
    assert sides is not None
    asked = checkpoint.vocabulary.encode_side(TEXTS, sides, checkpoint.sentence.prompts, query=side == "query")
    model = task_model.load(checkpoint)
    wanted = json.loads((PYLATE / "e06_reference.json").read_text())[name][side]
    for rows in (
        [model.answer(text) for text in asked],
        answers_together(checkpoint, fused(checkpoint, tmp_path), asked),
    ):
        for text, row, right in zip(asked, rows, wanted, strict=True):
            found = vectors(text, row[0], sides, query=side == "query")
            np.testing.assert_allclose(found, np.array(right).reshape(found.shape), atol=1e-5)


def test_a_bundle_says_how_sides_are_read(tmp_path: Path) -> None:
    """With ids in place of tokens, and prompts that a request selects by its side."""
    manifest, _ = made(write_stanford(tmp_path / "small"))
    sides = manifest.multi_vector
    assert sides is not None
    mask = manifest.special_ids["mask"]
    assert sides.expansion == Expansion(mask, QUERY_LENGTH, attended=False)
    assert (sides.query_length, sides.document_length, manifest.max_length) == (QUERY_LENGTH, *[DOCUMENT_LENGTH] * 2)
    assert (len(sides.skipped), sides.skips_queries, sides.skips_documents) == (32, False, True)
    assert (sides.normalized, sides.mean) == (True, False)
    assert manifest.prompts == {"query": "[unused0] ", "document": "[unused1] "}
    assert manifest.default_prompt == "document"


def test_a_maximum_length_is_that_of_documents(tmp_path: Path) -> None:
    """Which the library gets too; queries keep the length that they are filled up to."""
    manifest, _ = made(write_own(tmp_path / "small", attend=False), max_length=40)
    sides = manifest.multi_vector
    assert sides is not None
    assert (manifest.max_length, sides.document_length, sides.query_length) == (40, 40, QUERY_LENGTH)
    assert not manifest.reference_library.unproven  # type: ignore[union-attr]  compared above
    shutil.rmtree(tmp_path / "models")
    manifest, _ = made(write_own(tmp_path / "plain"), max_length=20)
    sides = manifest.multi_vector
    assert sides is not None
    assert (manifest.max_length, sides.document_length, sides.query_length) == (20, 20, 20)


def test_an_unattended_token_changes_no_other(tmp_path: Path) -> None:
    """It gets a vector of what it sees; in a batch with texts of other lengths as well."""
    checkpoint = opened(write_stanford(tmp_path / "small"))
    texts = checkpoint.encode(["the server"] * 2)
    assert checkpoint.multi_vector is not None
    graph = fused(checkpoint, tmp_path)
    tensors = Padder(task_model.spec_of(checkpoint, graph)).tensors(Batch(ModelIndex(0), texts))
    lengths = [len(text.ids) for text in texts]
    assert tensors[MASK].sum(axis=1).tolist() == [lengths[0]] * 2
    assert (tensors["input_ids"] >= 0).all()
    row = task_model.load(checkpoint).answer(texts[1])[0]
    cut = task_model.load(checkpoint).answer(checkpoint.vocabulary.encode(["[unused0] the server"], 64)[0])[0]
    np.testing.assert_allclose(row[: len(cut)], cut, atol=1e-6)
    assert row.shape == (QUERY_LENGTH, SIZE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stanford", "own, filled and unattended"])
def test_every_form_keeps_its_limits(tmp_path: Path, name: str, whole_proof: None) -> None:  # noqa: ARG001
    """INT8 of both libraries and fp16 by their twins; what was exported passes `bertserve verify`."""
    pytest.importorskip("openvino", reason="the extra `openvino` is not installed")
    folder = LAYOUTS[name](tmp_path / "small")
    forms = ("fp32", "int8", "int8-openvino", "fp16")
    words = [word for form in forms for word in ("--precision", form)]
    assert main([str(folder), "--out", str(tmp_path / "models"), *words]) == 0
    bundle = open_bundle(tmp_path / "models" / "small" / "1")
    assert len(bundle.artifacts) == len(forms)
    assert all(artifact.parity.cosine_min > 0.99 for artifact in bundle.artifacts if artifact.parity)
    assert verify([str(bundle.path)]) == 0
    checkpoint = opened(folder)
    raw = fused(checkpoint, tmp_path).with_name("raw.onnx")
    texts = checkpoint.encode(["the server", "a text"] * 4)
    check_ranges(
        raw, tmp_path / "watched.onnx", Padder(task_model.spec_of(checkpoint, raw)).tensors(Batch(ModelIndex(0), texts))
    )


@pytest.mark.slow
def test_a_multi_vector_model_builds_for_a_t4(tmp_path: Path) -> None:
    """TensorRT takes the operators of the projection and the normalization."""
    checkpoint = opened(write_stanford(tmp_path / "small"))
    fused(checkpoint, tmp_path)
    half.convert(tmp_path / "raw.onnx", tmp_path / "fp16.onnx")
    tensorrt.build(tmp_path / "fp16.onnx", tmp_path / "engine", "t4", max_length=16, count=ignore)
    assert (tmp_path / "engine").stat().st_size > 0


def test_labelled_queries_and_texts_measure_the_order(tmp_path: Path) -> None:
    """The correlation of the scores with MaxSim as the library computes it."""
    import sentence_transformers  # noqa: PLC0415  slow to import

    folder = write_pylate(tmp_path / "small")
    queries, texts = ["the server", "it"], ["a text", "the server.", "that is it, not the text"]
    rows = [(query, text, index) for index, (query, text) in enumerate((q, t) for q in queries for t in texts)]
    labelled = tmp_path / "labelled.tsv"
    labelled.write_text("".join(f"{query}\t{text}\t{score}\n" for query, text, score in rows))
    checkpoint = opened(folder)
    reader = EXPORTS["embed_tokens"].reader(
        *("embed_tokens", checkpoint.vocabulary, checkpoint.max_length, Labels(())),
        multi_vector=checkpoint.multi_vector,
        prompts=checkpoint.sentence.prompts,
    )
    examples = reader.read(labelled)
    model = task_model.load(checkpoint)
    found = examples.score([model.answer(text) for text in examples.texts])
    library = sentence_transformers.MultiVectorEncoder(str(folder), device="cpu")
    scores = library.similarity(library.encode_query(queries), library.encode_document(texts))
    wanted = metrics.spearman(scores.ravel().tolist(), [score for *_, score in rows])
    assert found == {"spearman": pytest.approx(wanted)}


def test_maxsim_is_the_librarys(tmp_path: Path) -> None:
    """That of a text without vectors too."""
    del tmp_path
    from sentence_transformers.util.similarity import maxsim as theirs  # noqa: PLC0415  slow to import

    made = np.random.default_rng(0).normal(size=(9, 8)).astype(np.float32)
    for text in (made[3:], made[3:4], made[:0]):
        assert maxsim(made[:3], text) == pytest.approx(theirs([made[:3]], [text]).item(), rel=1e-6)


def with_mask(**config: object) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        write_own(folder)
        write_json(next(folder.glob("*_MultiVectorMask")) / "config.json", config)
        return folder

    return write


def with_transformer(**settings: object) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        edit_json(write_own(folder) / "sentence_bert_config.json", **settings)
        return folder

    return write


def with_module(kind: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = write_own(folder) / "modules.json"
        path.write_text(path.read_text().replace("multi_vector_mask.MultiVectorMask", kind))
        return folder

    return write


def without_modules(folder: Path) -> Path:
    (write_pylate(folder) / "modules.json").unlink()
    return folder


def pickled_with_another_dim(folder: Path) -> Path:
    write_stanford(folder, dim=SIZE + 1)
    import torch  # noqa: PLC0415  slow to import
    from safetensors.torch import load_file  # noqa: PLC0415  likewise

    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def on_the_left(folder: Path) -> Path:
    edit_json(write_stanford(folder) / "tokenizer_config.json", padding_side="left")
    return folder


FILLED = {"strategy": "fixed", "length": 8}
REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "token-pooling": (with_module("TokenPooling"), "a TokenPooling module, .*; supported: Transformer and then any of"),
    "router": (with_module("Router"), "a Router module, which cannot be exported in a multi-vector model"),
    "image-tokens": (with_mask(keep_only_token_ids=[7]), r"keep_only_token_ids \[7\] in .*; supported: None"),
    "mask-setting": (with_mask(words=[]), "unknown MultiVectorMask setting words in config.json; supported: skiplist"),
    "other-side": (
        with_mask(skiplist_tasks=["passage"]),
        r"skiplist_tasks \['passage'\] .* supported: query, document",
    ),
    "words": (with_mask(skiplist_words="abc"), "skiplist_words in config.json must be a list of tokens"),
    "strategy": (with_transformer(query_expansion={**FILLED, "strategy": "max"}), r"needs a strategy \(fixed or min\)"),
    "expansion": (
        with_transformer(query_expansion={**FILLED, "fill": 1}),
        "the unknown setting fill; supported: strat",
    ),
    "token": (with_transformer(query_expansion={**FILLED, "token": "[X]"}), r"token '\[X\]' .* not in the vocabulary"),
    "length": (with_transformer(query_expansion={**FILLED, "length": 99}), "filled up to 99 tokens, more than .* 64"),
    "document-length": (with_transformer(document_length=0), "document_length in .* must be a positive integer, not 0"),
    "setting": (with_transformer(colour=1), "unknown Transformer setting colour in .*, query_length"),
    "no-modules": (without_modules, "says that this is ColBERT, but modules.json is missing"),
    "prefix": (lambda folder: write_pylate(folder, query_prefix=3), "query_prefix in .* must be a text, not 3"),
    "left": (on_the_left, "queries cannot be filled up with a tokenizer that pads on the left"),
    "projection": (
        pickled_with_another_dim,
        r"linear.weight has shape \[16, 32\], but config.json requires \[17, 32\], with dim of artifact.metadata \(128",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exported_is_refused(tmp_path: Path, name: str) -> None:
    """The message says what is wrong, and what can be exported."""
    write, words = REFUSED[name]
    folder = write(tmp_path / "small")
    with pytest.raises(ExportError) as refused:
        task_model.load(opened(folder))
    assert re.search(words, str(refused.value)), refused.value
    assert str(refused.value).startswith(f"checkpoint {folder}")


def test_a_projection_has_the_size_of_its_weights(tmp_path: Path) -> None:
    """As in Sentence Transformers, which reads no `dim`."""
    from sentence_transformers import MultiVectorEncoder  # noqa: PLC0415  slow to import

    folder = write_stanford(tmp_path / "small", dim=SIZE + 1)
    (wanted,) = MultiVectorEncoder(str(folder), device="cpu", local_files_only=True).encode_document(["the server"])
    checkpoint = opened(folder)
    task_model.load(checkpoint)
    assert checkpoint.dimensions == wanted.shape[1] == SIZE


def test_another_task_is_refused(tmp_path: Path) -> None:
    folder = write_stanford(tmp_path / "small")
    with pytest.raises(ExportError, match=r"a multi-vector model .* whose task is embed_tokens; remove --task embed"):
        opened(folder, "embed")
    assert opened(folder, "embed_tokens").multi_vector == opened(folder).multi_vector


def test_every_setting_of_a_multi_vector_model_is_sorted() -> None:
    """What the library's modules take is read, or has one value that can be exported."""
    from sentence_transformers.base.modules import Transformer  # noqa: PLC0415  slow to import
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask  # noqa: PLC0415

    taken = inspect.signature(MultiVectorMask.__init__).parameters.keys() - {"self"}
    assert taken == {*multi_vector.MASK_READ, *multi_vector.MASK_FIXED}
    own = {*pooling.TRANSFORMER_READ, *pooling.TRANSFORMER_FIXED, *pooling.TRANSFORMER_UNUSED}
    assert {*Transformer.config_keys} <= own
    assert {*multi_vector.SIDES_READ} <= {*Transformer.config_keys}
