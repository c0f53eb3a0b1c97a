"""Whatever Transformers loads for a body that is taken: its settings, the names of its class, its labels."""

from __future__ import annotations

import inspect
import json
import re
import sys
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError

from bertserve.export.checkpoint.families import FAMILIES
from bertserve.export.checkpoint.families.family import FIXED, READ, UNUSED
from bertserve.export.errors import ExportError
from bertserve.export.graph import task_model
from bertserve.serving.tasks import classify
from bertserve.serving.tasks.classify import ClassifyOptions
from tests.support.checkpoints import HEADS, edit_json, edit_weights, write_json, write_task_checkpoint
from tests.support.exports import answers_together, fused, opened
from tests.support.references import check_answers, encoded

if TYPE_CHECKING:
    from pathlib import Path

    from bertserve.export.checkpoint.reader import Checkpoint


def check(folder: Path, task: str) -> Checkpoint:
    """Holds the fused graph's answers against those of Transformers."""
    checkpoint = opened(folder, task)
    check_answers(folder, checkpoint, fused(checkpoint, folder.parent))
    return checkpoint


SETTINGS: list[tuple[str, str, dict[str, Any]]] = [
    *((kind, "embed_tokens", {"type_vocab_size": 1}) for kind in ("bert", "electra", "albert")),
    *((kind, "embed_tokens", {"type_vocab_size": 3}) for kind in ("megatron-bert", "nomic_bert")),
    ("bert", "embed_tokens", {"num_attention_heads": 2}),
    ("gte", "embed_tokens", {"type_vocab_size": 0}),
    ("deberta-v2", "embed_tokens", {"conv_kernel_size": 3, "type_vocab_size": 2, "position_biased_input": True}),
    ("deberta-v2", "embed_tokens", {"conv_kernel_size": 5, "conv_groups": 4, "conv_act": "relu"}),
    # As its largest ones have it.
    ("deberta-v2", "fill_mask", {"conv_kernel_size": 3, "conv_act": "gelu"}),
    (
        "deberta-v2",
        "classify",
        {
            **dict.fromkeys(("hidden_act", "pooler_hidden_act", "conv_act"), "gelu_new"),
            "conv_kernel_size": 3,
            "norm_rel_ebd": "none",
            "share_att_key": False,
            "pos_att_type": "c2p",
        },
    ),
    ("deberta-v2", "fill_mask", {"legacy": False, "relative_attention": False, "position_biased_input": True}),
    ("deberta", "classify", {"pos_att_type": "p2c", "max_relative_positions": 6, "type_vocab_size": 2}),
    ("bert", "fill_mask", {"hidden_act": "gelu_fast", "tie_word_embeddings": False}),
    ("modernbert", "classify", {"classifier_pooling": "mean", "classifier_activation": "tanh"}),
    ("modernbert", "embed_tokens", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    ("gte", "embed_tokens", {"head_dim": 16, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
]
SHORT = {0, 3, 5, 7, 10, 12}
"""Between them they have what differs most; the others take as long and are tried with the slow tests."""


@pytest.mark.parametrize(
    ("model_type", "task", "settings"),
    [pytest.param(*case, marks=[] if at in SHORT else pytest.mark.slow) for at, case in enumerate(SETTINGS)],
)
def test_settings_that_change_the_graph_are_built(
    tmp_path: Path, model_type: str, task: str, settings: dict[str, Any]
) -> None:
    """A padded batch of the fused graph is each text alone in what `AutoModel` and its kin load."""
    check(write_task_checkpoint(tmp_path / "small", model_type, task, **settings), task)


def with_null(folder: Path, model_type: str, task: str, key: str) -> Path:
    """A checkpoint with a null in config.json, and without the settings that would hide it."""
    config = json.loads((write_task_checkpoint(folder, model_type, task) / "config.json").read_text())
    for name in ("rope_parameters", "layer_types", "id2label", "label2id"):
        config.pop(name, None)
    write_json(folder / "config.json", config | {key: None})
    return folder


@pytest.mark.parametrize(
    ("model_type", "key"),
    [
        ("modernbert", "pad_token_id"),
        ("modernbert", "rope_scaling"),
        ("bert", "pad_token_id"),
        ("nomic_bert", "head_dim"),
    ],
)
@pytest.mark.sampled(2)
def test_a_null_that_transformers_takes_means_the_same(tmp_path: Path, model_type: str, key: str) -> None:
    """Which is not the default of its class: that of ModernBERT's padding is beyond a small vocabulary."""
    check(with_null(tmp_path / "small", model_type, "embed_tokens", key), "embed_tokens")


@pytest.mark.parametrize(
    ("model_type", "task", "key"),
    [
        ("modernbert", "embed_tokens", "local_rope_theta"),
        ("modernbert", "embed_tokens", "global_attn_every_n_layers"),
        ("gte", "embed_tokens", "rope_theta"),
        ("deberta-v2", "embed_tokens", "embedding_size"),
        ("deberta-v2", "classify", "pooler_hidden_size"),
        ("bert", "embed_tokens", "hidden_dropout_prob"),
        ("bert", "classify", "num_labels"),
    ],
)
def test_a_null_that_transformers_rejects_is_rejected_by_name(
    tmp_path: Path, model_type: str, task: str, key: str
) -> None:
    """A folder that its library cannot load is not exported with a default in its place, whatever the setting does."""
    folder = with_null(tmp_path / "small", model_type, task, key)
    # Of many kinds, by where Transformers needs the value.
    with pytest.raises((TypeError, ValueError, StrictDataclassError)):
        getattr(transformers, f"AutoModel{HEADS[task].removeprefix('Model')}").from_pretrained(folder)
    with pytest.raises(ExportError, match=rf"sets {key} to null|'{key}'.* None|{key} .*not None"):
        task_model.load(opened(folder, task))


# Whoever wrote a model reads settings that no class of settings declares.
_READ = re.compile(r"""(?:\bconfig\.|getattr\((?:self\.)?config, ")([a-z]\w*)""")
_METHODS = {"get_text_config", "to_dict", "use_return_dict", "name_or_path"}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_setting_of_transformers_is_sorted(name: str) -> None:
    """Read, built with the values that are named, or without effect; what a newer Transformers adds is noticed."""
    family = FAMILIES[name]
    model = getattr(transformers, family.class_name("embed"))
    declared = {field.name for field in fields(model.config_class)} | model.config_class.attribute_map.keys()
    used = set(_READ.findall(inspect.getsource(sys.modules[model.__module__]))) - _METHODS
    without_effect = UNUSED | family.unused
    sorted_ones = [{*READ, *family.read(), *family.names.values()}, {*FIXED, *family.fixed}, without_effect]
    known = set.union(*map(set, sorted_ones)) | model.config_class.attribute_map.keys()
    assert (declared | used) - known == set()
    assert not {*family.read()} & without_effect
    assert not {*family.fixed} & without_effect


@pytest.mark.parametrize(
    "architecture",
    ["BertForCL", "Contriever", "BertForNextSentencePrediction", "BertLMHeadModel", "BertForPreTraining", "X"],
)
@pytest.mark.sampled(2)
def test_a_class_name_is_no_reason_to_refuse(tmp_path: Path, architecture: str) -> None:
    """With --task any class's encoder is taken, and what stands beside it in the files is left out."""
    folder = write_task_checkpoint(tmp_path / "small", "bert", "fill_mask")
    edit_json(folder / "config.json", architectures=[architecture])
    edit_weights(folder, lambda held: held.update({"mlp.dense.weight": torch.ones(2, 2), "queue": torch.ones(3)}))
    assert check(folder, "embed_tokens").encoder.architecture == architecture


def test_an_encoder_without_a_prefix_may_have_company(tmp_path: Path) -> None:
    """Contriever's and others' own heads, beside an encoder that was saved alone; a strange part of it is refused."""
    folder = write_task_checkpoint(tmp_path / "small", "distilbert", "embed")
    edit_json(folder / "config.json", architectures=["Contriever"])
    edit_weights(folder, lambda held: held.update({"projection.weight": torch.ones(2, 2)}))
    check(folder, "embed_tokens")
    edit_weights(folder, lambda held: held.update({"transformer.layer.0.adapter.weight": torch.ones(2)}))
    with pytest.raises(ExportError, match=r"does not, first transformer\.layer\.0\.adapter\.weight"):
        task_model.load(opened(folder, "embed_tokens"))


def test_a_class_of_another_family_says_which_head_there_is(tmp_path: Path) -> None:
    """`AutoModelFor...` goes by `model_type`, whatever the class was called when it was saved."""
    folder = write_task_checkpoint(tmp_path / "small", "bert", "classify")
    edit_json(folder / "config.json", architectures=["OurOwnForSequenceClassification"])
    assert opened(folder).task == "classify"


@pytest.mark.parametrize("names", [{"0": 0, "1": True, "2": "x"}, {"0": "same", "1": "other", "2": "same"}])
def test_labels_are_those_of_the_pipeline(tmp_path: Path, names: dict[str, object]) -> None:
    """Numbers are told as their digits; of two labels with one name each keeps its score."""
    folder = write_task_checkpoint(tmp_path / "small", "bert", "classify")
    edit_json(folder / "config.json", id2label=names, label2id=None)
    checkpoint = opened(folder)
    rows = answers_together(checkpoint, fused(checkpoint, tmp_path), encoded(checkpoint, ["the server", "it"]))
    labels = checkpoint.labels.names
    found = classify.finish(rows, ClassifyOptions(), labels, multi_label=False)
    pipeline = transformers.pipeline("text-classification", str(folder), device="cpu", top_k=None)
    for ours, right in zip(found, pipeline(["the server", "it"]), strict=True):
        assert [each.label for each in ours] == [str(each["label"]) for each in right]
        np.testing.assert_allclose([each.score for each in ours], [each["score"] for each in right], atol=1e-5)
    in_order = classify.finish(rows, ClassifyOptions(ranked=False), labels, multi_label=False)
    assert [[each.label for each in ours] for ours in in_order] == [list(labels)] * 2
    assert [sorted(each.score for each in ours) for ours in in_order] == [
        sorted(each.score for each in ours) for ours in found
    ]
