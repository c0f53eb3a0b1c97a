"""ModernBERT: rotary positions, mostly local attention, gated layers without biases (arXiv 2412.13663)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bertserve.export.checkpoint.families import rope
from bertserve.export.checkpoint.families.family import BERT_SIZES, FIXED, HEAD_ACTIVATIONS, Family, require

if TYPE_CHECKING:
    from collections.abc import Mapping


def _derived(config: Mapping[str, Any]) -> dict[str, Any]:
    rope.check_nested(config)
    require(config, "head_dim", config["hidden_size"] // config["num_attention_heads"])
    require(config, "classifier_activation", *HEAD_ACTIVATIONS)
    require(config, "classifier_pooling", "cls", "mean")
    return {}


FAMILY = Family(
    model_type="modernbert",
    stem="ModernBert",
    prefix="model.",
    heads=("head.", "decoder.", "classifier."),
    tied={"decoder.weight": "embeddings.tok_embeddings.weight"},
    word_logits=lambda model, hidden: model.decoder(model.head(hidden)),
    sizes=BERT_SIZES,
    settings=(
        "pad_token_id",
        "tie_word_embeddings",
        "norm_eps",
        "norm_bias",
        "attention_bias",
        "mlp_bias",
        "decoder_bias",
        "classifier_bias",
        "classifier_pooling",
        "classifier_activation",
        "local_attention",
        "sliding_window",
        "layer_types",
        "rope_parameters",
        "rope_scaling",
        "global_attn_every_n_layers",
        "global_rope_theta",
        "local_rope_theta",
    ),
    derived=_derived,
    derives=("head_dim",),
    unused=frozenset(
        {
            *("attention_dropout", "embedding_dropout", "mlp_dropout", "initializer_cutoff_factor"),
            *("cls_token_id", "sep_token_id", "deterministic_flash_attn", "sparse_pred_ignore_index"),
        }
    ),
    fixed={**FIXED, "sparse_prediction": False},
    activation="hidden_activation",
    segments=False,
    pooling_layer=False,
    embedding={},
    # The fused attention has no rotary positions.
    layer={},
    position_table=False,
    gated=True,
    products=4,
    head_products=1,
)
