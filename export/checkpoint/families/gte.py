"""GTE: rotary positions and gated layers (arXiv 2407.19669); `new` on the hub, before Transformers had it."""

from __future__ import annotations

from dataclasses import replace

from bertserve.export.checkpoint.families import rope
from bertserve.export.checkpoint.families.family import (
    BERT_FIXED,
    BERT_SETTINGS,
    BERT_SIZES,
    PLAIN_ATTENTION_LAYER,
    WORD_EMBEDDING,
    Family,
)

FAMILY = Family(
    model_type="gte",
    stem="Gte",
    prefix="gte.",
    heads=("pooler.", "classifier.", "lm_head."),
    tied={"lm_head.decoder.weight": WORD_EMBEDDING, "lm_head.decoder.bias": "lm_head.bias"},
    word_logits=lambda model, hidden: model.lm_head(hidden),
    sizes=BERT_SIZES,
    settings=(*BERT_SETTINGS, "head_dim"),
    derived=lambda config: {"rope_parameters": rope.parameters(config, theta=160_000)},
    derives=rope.READ,
    fixed={
        **BERT_FIXED,
        **rope.FIXED,
        "position_embedding_type": "rope",
        "layer_norm_type": "layer_norm",
        "logn_attention_scale": False,
    },
    usual_segments=1,
    segmentless=True,
    pooling_layer=False,
    embedding={"SkipLayerNormalization": 1},
    layer=PLAIN_ATTENTION_LAYER,
    position_table=False,
    gated=True,
    renamed={
        "encoder.layer": "layers",
        "attention.o_proj": "self_attn.o_proj",
        "attention.q_proj": "self_attn.q_proj",
        "attention.k_proj": "self_attn.k_proj",
        "attention.v_proj": "self_attn.v_proj",
        "attn_ln": "post_attention_layernorm",
        "mlp_ln": "post_mlp_layernorm",
        "lm_head.norm": "lm_head.layer_norm",
    },
    split={
        "attention.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.up_gate_proj": ("mlp.up_proj", "mlp.gate_proj"),
    },
    products=7,
    tasks_without=frozenset({"answer"}),
)

NEW = replace(
    FAMILY,
    model_type="new",
    own_prefix="new.",
    derived=lambda config: {"rope_parameters": rope.parameters(config, theta=10_000)},
    # Transformers' vocabulary head has no other.
    fixed={**FAMILY.fixed, "hidden_act": "gelu"},
)
"""The variant of its first code: other names, and angles scaled by `ntk`."""
