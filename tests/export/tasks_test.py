"""Every architecture with every head: what the graph answers is what Transformers answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest
import transformers

from bertserve.export import build
from bertserve.export.checkpoint.families import FAMILIES
from bertserve.export.errors import ExportError
from bertserve.export.graph import optimize, task_model
from bertserve.export.precision import emulation, half, int8, openvino, quantize
from bertserve.export.proof import parity, reference
from bertserve.export.tasks import decisions
from bertserve.serving.tasks import TASKS
from tests.support.checkpoints import HEADS, LABELS, STEMS, edit_json, edit_weights, write_task_checkpoint
from tests.support.exports import answers_together, fused, ignore, opened
from tests.support.references import TEXTS, check_answers, encoded, expected

if TYPE_CHECKING:
    from pathlib import Path

    from bertserve.serving.tasks.parts import Problem


IDENTITY = "torch.nn.modules.linear.Identity"
LENGTH = 64

EVERY = [
    (model_type, task, False)
    for model_type in STEMS
    for task in HEADS
    if model_type not in FAMILIES or task not in FAMILIES[model_type].tasks_without
]
EVERY += [("electra", "embed", True), ("electra", "fill_mask", True), ("albert", "fill_mask", True)]
ASKED = {task: task for task in ("embed_tokens", "embed_sparse")}
"""Tasks that a checkpoint of Transformers' own never says that it was made for."""

OFTEN = {
    *(("bert", task) for task in ("embed", "answer", "fill_mask")),
    *((name, "classify") for name in ("roberta", "ernie", "mpnet", "albert", "deberta-v2", "modernbert")),
    *((name, "classify") for name in ("nomic_bert", "gte", "jina_bert for code")),
    *((name, "fill_mask") for name in ("distilbert", "electra", "modernbert")),
}
"""A head of each family whose graph is built in another way; `long_texts_test` and `split_test` run what is left."""


def is_long(model_type: str, task: str, *, projected: bool) -> bool:
    return (model_type, task) not in OFTEN or (model_type == "electra" and not projected)


def test_every_head_of_every_family_is_tried() -> None:
    """The registry leaves out the heads that Transformers has no class for, and no others; each of its is a case."""
    for family in FAMILIES.values():
        missing = {task for task in TASKS if not hasattr(transformers, family.class_name(task))}
        assert family.tasks_without == missing, family.model_type
    heads = {(name, task) for name, family in FAMILIES.items() for task in TASKS if task not in family.tasks_without}
    assert heads == {case[:2] for case in EVERY if case[0] in FAMILIES}


@pytest.mark.parametrize(
    ("model_type", "task", "projected"),
    [pytest.param(*case, marks=pytest.mark.slow if is_long(*case[:2], projected=case[2]) else []) for case in EVERY],
)
def test_the_graph_answers_as_transformers_does(tmp_path: Path, model_type: str, task: str, *, projected: bool) -> None:
    """A padded batch on the serving engine is each text alone in Transformers; fusions, INT8 and fp16 are complete."""
    folder = write_task_checkpoint(tmp_path / "small", model_type, task, projected=projected)
    checkpoint = opened(folder, ASKED.get(task))
    assert checkpoint.task == task
    assert checkpoint.labels.names == (LABELS[task] if task in {"classify", "tag"} else ())
    path, texts = fused(checkpoint, tmp_path), encoded(checkpoint)
    check_answers(folder, checkpoint, path, model_type)
    cuts = int8.cuts_of(path, task_model.spec_of(checkpoint, path), texts, ignore)
    quantize.quantize(path, tmp_path / "int8.onnx", optimize.shape_of(checkpoint), cuts, static=True)
    half.convert(path, tmp_path / "fp16.onnx")
    emulation.emulate(tmp_path / "fp16.onnx", tmp_path / "twin.onnx")
    comparator, exact = build.comparator_of(checkpoint), answers_together(checkpoint, path, texts)
    # Weights that were never trained mind 8 bits more than those that were.
    for name, least in (("int8", 0.9), ("twin", 0.9999)):
        for row, right in zip(answers_together(checkpoint, tmp_path / f"{name}.onnx", texts), exact, strict=True):
            assert decisions.cosine(*comparator.pair(row, right)) > least


@pytest.mark.parametrize(
    ("model_type", "task"),
    [
        pytest.param(*case[:2], marks=[] if case[:2] == ("deberta-v2", "embed") else pytest.mark.slow)
        for case in EVERY
        if not case[2]
    ],
)
def test_openvino_runs_every_graph_in_int8(tmp_path: Path, model_type: str, task: str) -> None:
    """The graph before the fusions, with fixed ranges, as OpenVINO takes it."""
    pytest.importorskip("openvino", reason="the extra `openvino` is not installed")
    folder = write_task_checkpoint(tmp_path / "small", model_type, task)
    checkpoint = opened(folder, ASKED.get(task))
    raw, shape, texts = tmp_path / "raw.onnx", optimize.shape_of(checkpoint), encoded(checkpoint)
    task_model.write(task_model.load(checkpoint), raw)
    cuts = int8.cuts_of(raw, task_model.spec_of(checkpoint, raw), texts, ignore)
    openvino.quantize(raw, tmp_path / "int8.onnx", shape, cuts)
    comparator, exact = build.comparator_of(checkpoint), answers_together(checkpoint, raw, texts)
    for row, right in zip(answers_together(checkpoint, tmp_path / "int8.onnx", texts, "openvino"), exact, strict=True):
        assert decisions.cosine(*comparator.pair(row, right)) > 0.97


def test_groups_of_layers_are_stored_once_each(tmp_path: Path) -> None:
    """ALBERT with two groups of two layers, of which each is run three times, answers as Transformers does."""
    sizes = {"num_hidden_layers": 6, "num_hidden_groups": 2, "inner_group_num": 2}
    folder = write_task_checkpoint(tmp_path / "small", "albert", "classify", **sizes)
    checkpoint = opened(folder)
    assert (checkpoint.encoder.layers, checkpoint.encoder.stored_layers) == (12, 4)
    path = fused(checkpoint, tmp_path)
    check_answers(folder, checkpoint, path)
    matrices = [tensor for tensor in onnx.load(path).graph.initializer if list(tensor.dims) == [32, 128]]
    assert len(matrices) == 4


@pytest.mark.parametrize(
    ("model_type", "task", "settings"),
    [
        # The head that its authors trained, which multiplies with the word embedding itself.
        ("deberta", "fill_mask", {"legacy": False}),
        *(("bert", "classify", {"hidden_act": name}) for name in ("relu", "gelu_new", "gelu_pytorch_tanh")),
    ],
)
def test_other_settings_are_computed_as_they_are(
    tmp_path: Path, model_type: str, task: str, settings: dict[str, object]
) -> None:
    """Another head or activation than the family's own answers as in Transformers, fused where there is an operator."""
    folder = write_task_checkpoint(tmp_path / "small", model_type, task, **settings)
    checkpoint = opened(folder)
    check_answers(folder, checkpoint, fused(checkpoint, tmp_path))


def test_pytorchs_own_answers_are_those_of_transformers(tmp_path: Path) -> None:
    """What artifacts are compared with is not made up either; best words come as int32."""
    folder = write_task_checkpoint(tmp_path / "small", "bert", "fill_mask")
    checkpoint = opened(folder)
    texts = encoded(checkpoint)
    rows = task_model.answers(task_model.load(checkpoint), texts, threads=2, count=ignore)
    for row, text in zip(rows, texts, strict=True):
        assert row[0].dtype == np.int32
        for found, right in zip(row, expected(folder, checkpoint, text), strict=True):
            np.testing.assert_allclose(found, right, atol=1e-5)


def test_robertas_positions_begin_behind_the_padding_id(tmp_path: Path) -> None:
    """Of 66 positions 64 can be used: the first token stands at the padding id + 1."""
    checkpoint = opened(write_task_checkpoint(tmp_path / "small", "roberta", "classify"))
    assert checkpoint.max_length == 64
    with pytest.raises(ExportError, match="must be 4 to 64"):
        opened(checkpoint.source.path, max_length=65)


def test_a_byte_level_tokenizer_is_understood(tmp_path: Path) -> None:
    """RoBERTa's special tokens are found by their roles, and pairs carry no segments."""
    checkpoint = opened(write_task_checkpoint(tmp_path / "small", "roberta", "answer"))
    assert checkpoint.vocabulary.special_ids == {"pad": 1, "unk": 3, "cls": 0, "sep": 2, "mask": 4}
    (pair,) = checkpoint.vocabulary.encode([("a", "b")], LENGTH)
    assert pair.type_ids is None
    assert [pair.ids[at] for at in (0, 2, 3, 5)] == [0, 2, 2, 2]
    assert build.comparator_of(checkpoint).context(pair) == (4, 5)


@pytest.mark.parametrize(
    ("saved", "asked", "expected_task"),
    [("fill_mask", "embed", "embed"), ("classify", "embed", "embed"), ("rerank", "classify", "classify")],
)
def test_a_task_can_be_asked_for(tmp_path: Path, saved: str, asked: str, expected_task: str) -> None:
    """A checkpoint serves another task where its weights do; heads that are not used are left out."""
    folder = write_task_checkpoint(tmp_path / "small", "bert", saved)
    checkpoint = opened(folder, asked)
    assert checkpoint.task == expected_task
    rows = task_model.answers(task_model.load(checkpoint), encoded(checkpoint), threads=1, count=ignore)
    assert rows[0][0].shape == ((32,) if asked == "embed" else (1,))
    assert (checkpoint.labels.problem == "multi_label") is (asked == "classify")


@pytest.mark.parametrize(
    ("family", "saved", "asked", "sentence"),
    [
        *(
            ("bert", saved, asked, "a head that was never trained")
            for saved, asked in (("embed", "classify"), ("classify", "answer"), ("tag", "fill_mask"))
        ),
        ("gte", "embed", "answer", "Transformers has no Gte with a head for the task answer"),
    ],
)
def test_a_head_that_is_not_there_is_refused(
    tmp_path: Path, family: str, saved: str, asked: str, sentence: str
) -> None:
    """Asking for a task whose head is not in the weights, or in Transformers, is refused; no number is made up."""
    folder = write_task_checkpoint(tmp_path / "small", family, saved)
    with pytest.raises(ExportError, match=sentence):
        task_model.load(opened(folder, asked))


def test_a_cross_encoder_of_sentence_transformers_is_a_reranker(tmp_path: Path) -> None:
    """Its modules.json has no pooling: the head is the model's own."""
    folder = write_task_checkpoint(tmp_path / "small", "bert", "rerank")
    edit_json(folder / "config_sentence_transformers.json", model_type="CrossEncoder")
    (folder / "modules.json").write_text(
        '[{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"}]'
    )
    edit_json(folder / "sentence_bert_config.json", max_seq_length=48)
    checkpoint = opened(folder)
    assert (checkpoint.task, checkpoint.max_length) == ("rerank", 48)
    prompts = {"model_type": "CrossEncoder", "prompts": {"query": "q: "}, "default_prompt_name": "query"}
    edit_json(folder / "config_sentence_transformers.json", **prompts)
    with pytest.raises(ExportError, match="a cross-encoder with the default prompt 'query' cannot be exported"):
        opened(folder)


ACTIVATIONS: list[tuple[dict[str, object], dict[str, object], str]] = [
    ({}, {}, "sigmoid"),
    ({"sentence_transformers": {"activation_fn": IDENTITY}}, {}, "identity"),
    ({"sbert_ce_default_activation_function": IDENTITY}, {}, "identity"),
    (
        {"sentence_transformers": {"activation_fn": IDENTITY}},
        {"activation_fn": "torch.nn.modules.activation.Sigmoid"},
        "sigmoid",
    ),
]


@pytest.mark.parametrize(("config", "settings", "activation"), ACTIVATIONS)
def test_a_cross_encoders_activation_is_read_from_every_form(
    tmp_path: Path, config: dict[str, object], settings: dict[str, object], activation: str
) -> None:
    """That of config_sentence_transformers.json before both of config.json; a sigmoid where nothing says."""
    folder = write_task_checkpoint(tmp_path / "small", "bert", "rerank")
    edit_json(folder / "config.json", sentence_transformers=None)
    edit_json(folder / "config.json", **config)
    edit_json(folder / "config_sentence_transformers.json", **settings)
    assert opened(folder, "rerank").score_activation == activation


HINTS: list[tuple[dict[str, object], str | None, tuple[str, Problem]]] = [
    ({"sbert_ce_default_activation_function": IDENTITY}, None, ("rerank", "single_label")),
    ({"sentence_transformers": {"activation_fn": IDENTITY}}, None, ("rerank", "single_label")),
    ({"problem_type": "regression"}, None, ("classify", "regression")),
    ({"problem_type": "multi_label_classification"}, None, ("classify", "multi_label")),
    ({}, "rerank", ("rerank", "single_label")),
    ({}, "classify", ("classify", "multi_label")),
    ({}, "regression", ("classify", "regression")),
]


@pytest.mark.parametrize(("words", "asked", "found"), HINTS)
def test_what_one_number_is_stands_in_the_checkpoint_or_is_asked_for(
    tmp_path: Path, words: dict[str, object], asked: str | None, found: tuple[str, Problem]
) -> None:
    """A relevance, a value or a probability: what config.json or --task says, and never a guess.

    A regression head must not become a reranker with a sigmoid: without words the sentence names the three.
    """
    folder = write_task_checkpoint(tmp_path / "small", "bert", "rerank")
    edit_json(folder / "config.json", sentence_transformers=None)
    with pytest.raises(ExportError, match=r"--task rerank .* --task classify .* or --task regression"):
        opened(folder)
    edit_json(folder / "config.json", **words)
    checkpoint = opened(folder, asked)
    assert (checkpoint.task, checkpoint.labels.problem) == found


def test_a_regression_agrees_by_the_order_of_its_values(tmp_path: Path) -> None:
    """Of a value no label is chosen: each column is held to PyTorch's order of the texts."""
    folder = write_task_checkpoint(tmp_path / "small", "bert", "classify")
    edit_json(folder / "config.json", problem_type="regression")
    comparator = build.comparator_of(opened(folder))
    wanted = [(np.array([value, -value, 1.0], np.float32),) for value in (1.0, 2.0, 3.0)]
    assert comparator.agreement(wanted, wanted, []) == 1.0
    assert comparator.agreement(wanted[::-1], wanted, []) == pytest.approx(1 / 3)


def test_a_tied_matrix_that_differs_is_refused(tmp_path: Path) -> None:
    """Which of the two matrices was meant cannot be known; stored twice and equal is fine."""
    folder = write_task_checkpoint(tmp_path / "small", "bert", "fill_mask")
    words = "bert.embeddings.word_embeddings.weight"
    edit_weights(folder, lambda t: t.update({"cls.predictions.decoder.weight": t[words].clone()}))
    task_model.load(opened(folder))
    edit_weights(folder, lambda t: t["cls.predictions.decoder.weight"].add_(1))
    with pytest.raises(ExportError, match=r"decoder\.weight must equal embeddings\.word_embeddings\.weight"):
        task_model.load(opened(folder))


def test_labels_may_be_independent(tmp_path: Path) -> None:
    """problem_type says whether labels exclude one another."""
    folder = write_task_checkpoint(tmp_path / "small", "bert", "classify")
    assert opened(folder).labels.problem == "single_label"
    edit_json(folder / "config.json", problem_type="multi_label_classification")
    assert opened(folder).labels.problem == "multi_label"


@pytest.mark.parametrize("task", list(HEADS))
def test_the_recorded_reference_comes_back_whole(tmp_path: Path, task: str) -> None:
    """What PyTorch answered is read back from the bundle's file to the last bit, with its texts."""
    checkpoint = opened(write_task_checkpoint(tmp_path / "small", "bert", task))
    texts, comparator = encoded(checkpoint), build.comparator_of(checkpoint)
    rows = task_model.answers(task_model.load(checkpoint), texts, threads=1, count=ignore)
    path = tmp_path / reference.REFERENCE
    reference.write(path, comparator, parity.Reference(TEXTS, texts, rows))
    found = reference.read(path, comparator)
    assert found.texts == TEXTS
    assert [list(text.ids) for text in found.encoded] == [list(text.ids) for text in texts]
    for one, other in zip(found.rows, rows, strict=True):
        for left, right in zip(one, other, strict=True):
            np.testing.assert_array_equal(left, right)
            assert left.dtype == right.dtype


@pytest.mark.parametrize("kept", [slice(-8), slice(0), slice(100, None)])
def test_a_damaged_reference_is_refused(tmp_path: Path, kept: slice) -> None:
    """A file that was cut is not compared with."""
    checkpoint = opened(write_task_checkpoint(tmp_path / "small", "bert", "embed"))
    texts, comparator = encoded(checkpoint), build.comparator_of(checkpoint)
    path = tmp_path / reference.REFERENCE
    reference.write(path, comparator, parity.Reference(TEXTS, texts, [(np.zeros(32, np.float32),)] * len(texts)))
    path.write_bytes(path.read_bytes()[kept])
    with pytest.raises(ExportError, match="not the reference of this model"):
        reference.read(path, comparator)


def test_a_pre_normalised_graph_keeps_its_sums(tmp_path: Path) -> None:
    """Megatron's embeddings are added up once, since the first layer adds to the sum itself."""
    path = fused(opened(write_task_checkpoint(tmp_path / "small", "megatron-bert", "embed")), tmp_path)
    operators = optimize.operators(path)
    assert operators == {"Attention": 2, "BiasGelu": 2, "SkipLayerNormalization": 4}
    assert sum(node.op_type == "Softmax" for node in onnx.load(path).graph.node) == 0


def test_an_embedding_that_is_fused_holds_its_words_once(tmp_path: Path) -> None:
    """DistilBERT takes the length of a batch from its words' vectors, for which nothing looks them up once more."""
    path = fused(opened(write_task_checkpoint(tmp_path / "small", "distilbert", "embed")), tmp_path)
    half.convert(path, tmp_path / "fp16.onnx")
    for file in (path, tmp_path / "fp16.onnx"):
        graph = onnx.load(file).graph
        words = [tensor.name for tensor in graph.initializer if "word_embeddings" in tensor.name]
        assert len(words) == 1
        assert [node.op_type for node in graph.node if words[0] in node.input] == ["EmbedLayerNormalization"]
