"""Sparse encoders: what is exported answers as Sentence Transformers' `SparseEncoder` does with the same folder."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest

from bertserve.export import build
from bertserve.export.checkpoint import sparse
from bertserve.export.engines import tensorrt
from bertserve.export.errors import ExportError
from bertserve.export.graph import optimize, sparse_head, task_model
from bertserve.export.precision import emulation, half, int8, openvino, quantize
from bertserve.export.tasks import decisions
from bertserve.export.tasks.embed_sparse import above_cut
from bertserve.serving.models import query_weights
from bertserve.serving.models.manifest import QUERY_WEIGHTS, Quantisation
from bertserve.serving.tasks.base import size_of
from bertserve.serving.tasks.parts import Sparse
from tests.support.checkpoints import edit_json, edit_weights, write_checkpoint, write_json
from tests.support.exports import answers_together, exported, fused, ignore, opened
from tests.support.sparse_encoders import (
    LENGTH,
    LOOKUP,
    POOLING,
    write_idf,
    write_modules_of_version_5,
    write_plain,
    write_router,
)
from tests.support.sparse_encoders import (
    query_weights as weights_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from bertserve.export.checkpoint.reader import Checkpoint
    from bertserve.serving.models.manifest import Target
    from bertserve.serving.records import Row

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("sentence_transformers") is None,
        reason="the module sentence-transformers is not installed",
    ),
    pytest.mark.usefixtures("few_texts_of_pytorch"),
]

TEXTS = ["the server", "a text that is not in it, and to a text with more of it", "it", "of the server for the text"]
MANY_WORDS = 9000
"""A vocabulary of five blocks, of which the last is not full."""


def sparse_encoder(folder: Path, **modules: Any) -> Any:
    from sentence_transformers import SparseEncoder  # noqa: PLC0415  slow to import

    return SparseEncoder(**(modules or {"model_name_or_path": str(folder)}), device="cpu")


def saved(folder: Path, pooling: str, function: str, **settings: object) -> Path:
    """An encoder as Sentence Transformers writes it today."""
    from sentence_transformers.sparse_encoder.modules import SpladePooling, Transformer  # noqa: PLC0415  likewise

    base = write_plain(folder.with_name("base"))
    modules = [Transformer(str(base), transformer_task="fill-mask"), SpladePooling(pooling, function)]  # type: ignore[arg-type]
    sparse_encoder(base, modules=modules).save(str(folder), create_model_card=False)
    edit_json(folder / "config_sentence_transformers.json", **settings)
    return folder


LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "splade-max": lambda folder: saved(folder, "max", "relu"),
    "splade-sum": lambda folder: saved(folder, "sum", "relu"),
    "splade-twice": lambda folder: saved(folder, "max", "log1p_relu"),
    "splade-sum-twice": lambda folder: saved(folder, "sum", "log1p_relu", max_active_dims=20),
    "old-modules": lambda folder: write_modules_of_version_5(write_plain(folder, "distilbert")),
    "naver-splade": write_plain,
    "splade-roberta": lambda folder: write_modules_of_version_5(write_plain(folder, "roberta"), max_active_dims=9),
    "splade-of-many-words": lambda folder: write_plain(folder, vocab_size=MANY_WORDS),
    "opensearch-doc-v3": lambda folder: write_router(write_plain(folder, "distilbert")),
    "opensearch-doc-v1": lambda folder: write_idf(write_plain(folder)),
}


def dense(rows: list[Row], checkpoint: Checkpoint) -> NDArray[np.float32]:
    weights = np.zeros((len(rows), checkpoint.encoder.vocab_size), np.float32)
    for at, (indices, values) in enumerate(rows):
        assert values[0] >= values[-1] >= 0
        weights[at, indices] = values
    return weights


def answered(checkpoint: Checkpoint, path: Path, target: Target = "cpu") -> NDArray[np.float32]:
    """The weights of a padded batch."""
    texts = checkpoint.vocabulary.encode(TEXTS, LENGTH)
    return dense(answers_together(checkpoint, path, texts, target), checkpoint)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_answers_as_sentence_transformers(tmp_path: Path, name: str) -> None:
    """A padded batch of the graph is each text in `encode`, with the padding's words and the bias where they belong."""
    folder = LAYOUTS[name](tmp_path / name)
    wanted = sparse_encoder(folder).encode(TEXTS, convert_to_sparse_tensor=False).numpy()
    assert 0 < np.count_nonzero(wanted[0]) < wanted.shape[1]
    checkpoint = opened(folder)
    assert (checkpoint.task, checkpoint.max_length) == ("embed_sparse", LENGTH)
    assert checkpoint.active == (checkpoint.sentence.sparse.max_active_dims or wanted.shape[1])  # type: ignore[union-attr]
    model = task_model.load(checkpoint)
    path = fused(checkpoint, tmp_path, model)
    np.testing.assert_allclose(answered(checkpoint, path), wanted, atol=1e-5)
    alone = [model.answer(text) for text in checkpoint.vocabulary.encode(TEXTS, LENGTH)]
    np.testing.assert_allclose(dense(alone, checkpoint), wanted, atol=1e-5)


@pytest.mark.parametrize("name", ["splade-of-many-words", "splade-sum"])
def test_smaller_forms_name_the_same_words(tmp_path: Path, name: str) -> None:
    """INT8 of both kinds, with the vocabulary in 8 bits and without, and the twin of fp16."""
    pytest.importorskip("openvino", reason="the extra `openvino` is not installed")
    checkpoint = opened(LAYOUTS[name](tmp_path / name))
    path = fused(checkpoint, tmp_path)
    raw, shape, comparator = tmp_path / "raw.onnx", optimize.shape_of(checkpoint), build.comparator_of(checkpoint)
    texts = checkpoint.vocabulary.encode(TEXTS, LENGTH)
    exact = answers_together(checkpoint, path, texts)
    cuts = {graph: int8.cuts_of(graph, task_model.spec_of(checkpoint, graph), texts, ignore) for graph in (path, raw)}
    half.convert(path, tmp_path / "fp16.onnx")
    emulation.emulate(tmp_path / "fp16.onnx", tmp_path / "twin.onnx")
    forms: dict[str, Target] = {"twin": "cpu"}
    for words in (True, False):
        for static in (True, False):
            one, other = f"ort-{words}-{static}", f"openvino-{words}-{static}"
            quantize.quantize(path, tmp_path / f"{one}.onnx", shape, cuts[path], static=static, words=words)
            openvino.quantize(raw, tmp_path / f"{other}.onnx", shape, cuts[raw] if static else None, words=words)
            forms |= {one: "cpu", other: "openvino"}
    for form, target in forms.items():
        rows = answers_together(checkpoint, tmp_path / f"{form}.onnx", texts, target)
        agreement = comparator.agreement(rows, exact, texts)
        assert agreement is not None
        # Weights that were never trained mind 8 bits more than those that were.
        assert agreement > (0.97 if form == "twin" else 0.7), form
        for row, right in zip(rows, exact, strict=True):
            assert comparator.cosine(row, right) > (0.9999 if form == "twin" else 0.95), form
    blocks = sparse.blocks(checkpoint.encoder.vocab_size)
    eight, seven = (optimize.operators(tmp_path / f"ort-{words}-True.onnx") for words in (True, False))
    assert eight["MatMulIntegerToFloat"] - seven["MatMulIntegerToFloat"] == blocks
    graph = onnx.load(tmp_path / "ort-True-True.onnx").graph
    values = {node.input[0] for node in graph.node if "/sparse/blocks" in node.name and node.op_type != "Add"}
    assert len([name for name in values if name.endswith(".values")]) == 1


def test_no_tensor_holds_a_logit_for_each_token_and_word(tmp_path: Path) -> None:
    """Every product with the vocabulary has at most a block of columns and is pooled at once, in fp16 too."""
    checkpoint = opened(write_plain(tmp_path / "splade", vocab_size=MANY_WORDS))
    path = fused(checkpoint, tmp_path)
    half.convert(tmp_path / "raw.onnx", tmp_path / "fp16.onnx")
    for file in (tmp_path / "raw.onnx", path, tmp_path / "fp16.onnx"):
        graph = onnx.load(file).graph
        shapes = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
        products = [node for node in graph.node if node.op_type == "MatMul" and node.input[1] in shapes]
        words = [node for node in products if "/sparse/blocks" in node.name]
        assert [shapes[node.input[1]][1] for node in words] == [sparse.BLOCK] * 4 + [MANY_WORDS - 4 * sparse.BLOCK]
        assert max(shapes[node.input[1]][1] for node in products) == sparse.BLOCK
        for node in words:
            assert [user.op_type for user in graph.node if node.output[0] in user.input] == ["ReduceMax"]


def test_an_export_knows_how_many_words_a_text_has(tmp_path: Path) -> None:
    """Twice as many as PyTorch finds in the longest texts, or what TensorRT can choose where that is less.

    A query whose weights are looked up may have one for each token.
    """
    checkpoint = opened(write_plain(tmp_path / "splade", vocab_size=MANY_WORDS))
    model = task_model.load(checkpoint)
    texts = checkpoint.vocabulary.encode([*TEXTS, "a b c d e f g h i j k l m n o p q r s t u v w x y z " * 2], LENGTH)
    largest = max(int(np.count_nonzero(model.answer(text)[1])) for text in texts)
    limited = task_model.limit_active(model, checkpoint, texts, None, threads=1)
    assert limited.active % 64 == 0
    assert 2 * largest <= limited.active < 2 * largest + 64
    assert model.answer(texts[0])[1].shape == model.outputs[1].shape[1:] == (limited.active,)
    assert task_model.limit_active(model, checkpoint, texts, 40, threads=1).active == 40
    plain = write_plain(tmp_path / "doc", vocab_size=MANY_WORDS, max_position_embeddings=512)
    looking_up = opened(write_idf(plain), "embed_sparse", 512)
    model = task_model.load(looking_up)
    model.sparse.bias.data -= 1e6  # type: ignore[union-attr]  # leaves no text a word
    assert task_model.limit_active(model, looking_up, texts, None, threads=1).active == 512
    edit_json(tmp_path / "splade/config.json", _name_or_path=None)
    own = opened(write_modules_of_version_5(tmp_path / "splade", max_active_dims=7))
    assert task_model.limit_active(task_model.load(own), own, texts, None, threads=1).active == 7


def test_an_exported_router_has_the_weights_of_queries(tmp_path: Path) -> None:
    """Both sides are proven by Sentence Transformers; INT8 names the words and does not mind its neighbors."""
    folder = write_router(write_plain(tmp_path / "doc"))
    bundle = exported(folder, "--precision", "fp32", "--precision", "int8", "--allow", "int8.agreement")
    manifest = bundle.manifest
    assert (manifest.task, manifest.sparse) == ("embed_sparse", Sparse(query_weights=True, similarity="dot"))
    assert size_of(manifest, "weights") <= manifest.vocab_size
    np.testing.assert_array_equal(query_weights.read(bundle.path, manifest.vocab_size), weights_of(folder).numpy())
    assert manifest.reference_library is not None
    assert manifest.reference_library.library.startswith("Sentence Transformers")
    assert not manifest.reference_library.unproven
    for artifact in bundle.artifacts:
        assert artifact.batch_invariant
        assert artifact.end_to_end is not None
        assert artifact.parity is not None
        assert artifact.parity.agreement is not None
        assert artifact.parity.agreement > (0.999 if artifact.precision == "fp32" else 0.7)
    assert bundle.artifact("fp32").end_to_end.max_difference < 1e-5  # type: ignore[union-attr]


def test_a_plain_folder_with_idf_is_proven_with_the_module_for_queries(tmp_path: Path) -> None:
    """OpenSearch's first encoders: Sentence Transformers reads the table where it is given it."""
    bundle = exported(write_idf(write_plain(tmp_path / "doc", "distilbert")), "--precision", "fp32")
    assert bundle.manifest.sparse == Sparse(query_weights=True)
    assert (bundle.path / QUERY_WEIGHTS).is_file()
    assert not bundle.manifest.reference_library.unproven  # type: ignore[union-attr]


def test_a_vocabulary_that_breaks_a_limit_in_8_bits_stays_in_fp32(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself, with a notice; how it was quantised stands in the manifest."""
    whole = quantize.quantize

    def spoiled(fused: Path, quantized: Path, *others: Any, words: bool, **more: Any) -> None:
        whole(fused, quantized, *others, words=words, **more)
        if words:
            model = onnx.load(quantized)
            for tensor in model.graph.initializer:
                if "/sparse/blocks" in tensor.name and tensor.name.endswith(".scale"):
                    tensor.CopyFrom(onnx.numpy_helper.from_array(np.zeros(tensor.dims, np.float32), tensor.name))
            onnx.save(model, quantized)

    monkeypatch.setattr(quantize, "quantize", spoiled)
    folder = write_plain(tmp_path / "splade")
    bundle = exported(folder, "--precision", "fp32", "--precision", "int8", "--allow", "int8.agreement")
    said = capsys.readouterr().out
    assert "static ranges failed, trying static ranges with the vocabulary in fp32: model.int8.onnx does not" in said
    assert "its name says SPLADE: exporting sparse vectors; for masked words, set --task fill_mask" in said
    artifact = bundle.artifact("int8")
    assert artifact is not None
    assert artifact.quantisation == Quantisation("static", "built-in texts", 16, fp32_words=True)
    assert "the vocabulary in fp32" in (bundle.path / "report.html").read_text()


def test_a_task_can_be_asked_for(tmp_path: Path) -> None:
    """A folder that its name does not betray; a sparse encoder fills masks; an encoder of vectors has no words."""
    folder = write_plain(tmp_path / "small")
    assert opened(folder).task == "fill_mask"
    assert opened(folder, "embed_sparse").task == "embed_sparse"
    assert opened(write_modules_of_version_5(folder), "fill_mask").candidates
    with pytest.raises(ExportError, match="the task embed_sparse needs SpladePooling"):
        opened(write_checkpoint(tmp_path / "vectors"), "embed_sparse")


def test_a_head_without_a_product_of_its_own_is_refused(tmp_path: Path) -> None:
    """DeBERTa's first form multiplies with the word embedding itself."""
    folder = write_plain(tmp_path / "splade", "deberta", legacy=False)
    with pytest.raises(ExportError, match="this form of Deberta's vocabulary head cannot be exported"):
        task_model.load(opened(folder))


Spoil = dict[str, Any]
ROUTERS: dict[str, tuple[Callable[[Path], object], str]] = {
    **{
        f"a route of {kind}": (
            lambda folder, route=route: edit_json(
                folder / "router_config.json", structure={"query": route, "document": ["", POOLING]}
            ),
            r"must map names to classes \(types\) and routes to names \(structure\)",
        )
        for kind, route in {"lists": [["a"]], "a number": 3}.items()
    },
    "routes": (
        lambda folder: edit_json(folder / "router_config.json", structure={"query": [LOOKUP], "text": ["", POOLING]}),
        "has the routes query, text; supported: query and document",
    ),
    "default": (
        lambda folder: edit_json(folder / "router_config.json", parameters={"default_route": None}),
        "has the default_route 'query'; supported: 'document'",
    ),
    "mappings": (
        lambda folder: edit_json(
            folder / "router_config.json",
            parameters={"default_route": "document", "route_mappings": {"('query', 'text')": "query"}},
        ),
        "has route_mappings, which cannot be exported",
    ),
    "code": (
        lambda folder: edit_json(folder / "router_config.json", types={LOOKUP: "own.Code"}),
        r"has a own\.Code module, which is custom code",
    ),
    "queries": (
        lambda folder: edit_json(
            folder / "router_config.json", structure={"query": [POOLING], "document": ["", POOLING]}
        ),
        "gives queries the modules SpladePooling of their own; supported: SparseStaticEmbedding",
    ),
    "documents": (
        lambda folder: edit_json(folder / "router_config.json", structure={"query": [LOOKUP], "document": [LOOKUP]}),
        "the modules SparseStaticEmbedding cannot be exported as a sparse encoder",
    ),
    "path": (
        lambda folder: write_json(folder / LOOKUP / "config.json", {"path": "org/name/idf.json"}),
        r"path 'org/name/idf\.json' in config\.json cannot be exported",
    ),
    "tokenizer": (
        lambda folder: edit_json(folder / LOOKUP / "tokenizer.json", normalizer=None),
        "the tokenizer of queries differs from that of documents",
    ),
    "length": (
        lambda folder: edit_json(folder / LOOKUP / "tokenizer_config.json", model_max_length=32),
        "queries are truncated to 32 tokens, but documents to 64; set --max-length 32",
    ),
    "most": (
        lambda folder: edit_json(folder / "config_sentence_transformers.json", max_active_dims=0),
        r"max_active_dims in config_sentence_transformers\.json must be a positive integer, not 0",
    ),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_that_does_something_else_is_refused(tmp_path: Path, name: str) -> None:
    """One sentence says what it does and what is supported."""
    spoil, sentence = ROUTERS[name]
    folder = write_router(write_plain(tmp_path / "doc"))
    spoil(folder)
    with pytest.raises(ExportError, match=sentence):
        opened(folder)


def test_both_sides_may_be_one_encoder(tmp_path: Path) -> None:
    """A Router whose routes are the same modules is the encoder without one."""
    folder = write_router(write_plain(tmp_path / "doc"))
    both = {side: ["", POOLING] for side in ("query", "document")}
    edit_json(folder / "router_config.json", structure=both)
    assert opened(folder).query_weights is None


@pytest.mark.parametrize("change", [lambda tensors: tensors.update(weight=tensors["weight"][:8].clone())])
def test_a_table_of_another_size_is_refused(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """A token without a weight is not made up."""
    folder = write_router(write_plain(tmp_path / "doc"))
    edit_weights(folder / LOOKUP, change)
    with pytest.raises(ExportError, match=r"weight has shape \[8\]"):
        sparse_head.query_weights(opened(folder))


def test_the_end_of_a_full_row_is_not_compared() -> None:
    """Which of two nearly equal weights comes last is rounding; a word in front that is missing counts."""
    weights = np.array([0.0, 5.0, 1.0, 3.0, 0.99], np.float32)
    np.testing.assert_allclose(above_cut(weights, 3), [0, 4, 0, 2, 0])
    np.testing.assert_allclose(above_cut(weights, 5), weights)
    assert decisions.cosine(above_cut(weights, 3), weights) > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("name", ["splade-of-many-words", "splade-sum"])
def test_a_sparse_encoder_builds_for_a_t4(tmp_path: Path, name: str) -> None:
    """TensorRT takes the blocks and the choice, in fp16 and in INT8."""
    folder = LAYOUTS[name](tmp_path / name)
    words = ["--precision", "fp32", "--max-length", "16", "--tensorrt", "t4", "--tensorrt-precision", "int8"]
    bundle = exported(folder, *words, "--tensorrt-precision", "fp16", "--allow", "int8-tensorrt.agreement")
    assert {artifact.file for artifact in bundle.artifacts} >= {"model.sm75.fp16.engine", "model.sm75.int8.engine"}
    assert size_of(bundle.manifest, "weights") <= tensorrt.LARGEST_TOP_K
