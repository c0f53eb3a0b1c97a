"""JinaBERT v2: BERT with ALiBi instead of positions, and gated layers (arXiv 2310.19923)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bertserve.export.checkpoint.families import bert
from bertserve.export.checkpoint.families.family import PLAIN_ATTENTION_LAYER

if TYPE_CHECKING:
    from collections.abc import Mapping


def _is_alibi(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") == "bert" and config.get("position_embedding_type") == "alibi"


FAMILY = replace(
    bert.FAMILY,
    model_type="jina_bert",
    matches=_is_alibi,
    # Its names are BERT's, except those of the gated layers.
    renamed={"mlp.wo": "output.dense", "mlp.layernorm": "output.LayerNorm"},
    split={"mlp.gated_layers": ("intermediate.gate", "intermediate.up")},
    activation="feed_forward_type",
    activations={"geglu": "gelu"},
    usual_activation="original",
    names={"feed_forward_type": "hidden_act"},
    fixed={**bert.FAMILY.fixed, "position_embedding_type": "alibi", "hidden_act": "gelu"},
    embedding={"SkipLayerNormalization": 1},
    layer=PLAIN_ATTENTION_LAYER,
    position_table=False,
    gated=True,
    products=7,
)

QUERIES_NORMALISED = replace(
    FAMILY,
    # Recognized only by the name of its code.
    matches=lambda config: _is_alibi(config) and "qk-post-norm" in str(config.get("auto_map")),
    derives=("auto_map",),
    renamed={
        "self.layer_norm_q": "self.query.norm",
        "self.layer_norm_k": "self.key.norm",
        "layer_norm_1": "attention.norm",
        "layer_norm_2": "output.LayerNorm",
        "mlp.down_layer": "output.dense",
    },
    split={"mlp.up_gated_layer": ("intermediate.up", "intermediate.gate")},
    layer={"SkipLayerNormalization": 3},
)
"""The variant for code (jina-embeddings-v2-base-code): normalizes queries, keys and attention."""
