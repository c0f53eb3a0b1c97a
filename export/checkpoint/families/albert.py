"""ALBERT: layers share weights, and embeddings are narrower than layers (arXiv 1909.11942)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bertserve.export.checkpoint.families.family import BERT_FIXED, BERT_SIZES, WORD_EMBEDDING, Family

if TYPE_CHECKING:
    from collections.abc import Mapping


def groups(config: Mapping[str, Any]) -> dict[str, int]:
    """The number of layer groups, and of layers in each group.

    Raises:
        ValueError: There are more groups than layers.
    """
    most = {"num_hidden_groups": config["num_hidden_layers"], "inner_group_num": 1 << 10}
    counts = {name: config.get(name, 1) for name in most}
    for name, count in counts.items():
        if not isinstance(count, int) or not 1 <= count <= most[name]:
            raise ValueError(f"{name} in config.json must be an integer from 1 to {most[name]}, not {count!r}")
    return counts


FAMILY = Family(
    model_type="albert",
    stem="Albert",
    prefix="albert.",
    heads=("pooler.", "predictions.", "sop_classifier.", "classifier.", "qa_outputs."),
    tied={"predictions.decoder.weight": WORD_EMBEDDING, "predictions.decoder.bias": "predictions.bias"},
    word_logits=lambda model, hidden: model.predictions(hidden),
    sizes={**BERT_SIZES, "embedding_size": "embedding_size"},
    derived=groups,
    derives=("num_hidden_groups", "inner_group_num"),
    unused=frozenset({"classifier_dropout_prob"}),
    fixed=BERT_FIXED,
    usual_activation="gelu_new",
    pretraining="fill_mask",
    projection="always",
    shared_layers=True,
)
