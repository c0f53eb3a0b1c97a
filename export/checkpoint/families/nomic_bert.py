"""NomicBERT: rotary positions, gated layers without biases (arXiv 2402.01613); first with GPT-2's settings."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bertserve.export.checkpoint.families import rope
from bertserve.export.checkpoint.families.family import (
    BERT_FIXED,
    BERT_SETTINGS,
    BERT_SIZES,
    FIXED,
    PLAIN_ATTENTION_LAYER,
    WORD_EMBEDDING,
    Family,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

FAMILY = Family(
    model_type="nomic_bert",
    stem="NomicBert",
    prefix="nomic_bert.",
    heads=("pooler.", "classifier.", "cls."),
    tied={"cls.predictions.decoder.weight": WORD_EMBEDDING, "cls.predictions.decoder.bias": "cls.predictions.bias"},
    word_logits=lambda model, hidden: model.cls(hidden),
    sizes=BERT_SIZES,
    settings=(*BERT_SETTINGS, "head_dim"),
    derived=lambda config: {"rope_parameters": rope.parameters(config, theta=1000)},
    derives=rope.READ,
    fixed={**BERT_FIXED, **rope.FIXED},
    usual_activation="silu",
    pooling_layer=False,
    embedding={"SkipLayerNormalization": 1},
    layer=PLAIN_ATTENTION_LAYER,
    position_table=False,
    gated=True,
    renamed={
        "encoder.layers": "layers",
        "emb_ln": "embeddings.LayerNorm",
        "attn.out_proj": "self_attn.o_proj",
        "fc11": "up_proj",
        "fc12": "gate_proj",
        "fc2": "down_proj",
        "norm1": "post_attention_layernorm",
        "norm2": "post_mlp_layernorm",
    },
    split={"attn.Wqkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")},
    products=7,
    tasks_without=frozenset({"answer"}),
)


def _first_derived(config: Mapping[str, Any]) -> dict[str, Any]:
    if config.get("rotary_scaling_factor") is not None:
        rope.positive("rotary_scaling_factor", config["rotary_scaling_factor"])
    for key, usual in (("max_trained_positions", 2048), ("rotary_emb_base", 10_000)):
        rope.positive(key, config.get(key, usual))
    theta = float(config.get("rotary_emb_base", 10_000))
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


FIRST_FORM = replace(
    FAMILY,
    own_prefix="bert.",
    matches=lambda config: config.get("model_type") == "nomic_bert" and "n_embd" in config,
    pretraining="fill_mask",
    sizes={
        "hidden_size": "n_embd",
        "layers": "n_layer",
        "heads": "n_head",
        "intermediate_size": "n_inner",
        "positions": "n_positions",
        "vocab_size": "vocab_size",
    },
    names={
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "n_positions": "max_position_embeddings",
        "layer_norm_epsilon": "layer_norm_eps",
        "activation_function": "hidden_act",
    },
    settings=("type_vocab_size", "pad_token_id", "tie_word_embeddings"),
    derived=_first_derived,
    derives=("rotary_emb_base", "rotary_scaling_factor", "max_trained_positions"),
    activation="activation_function",
    activations={"swiglu": "silu", "geglu": "gelu"},
    usual_activation="gelu",
    zero=frozenset({"cls.predictions.transform.dense.bias", "cls.predictions.bias"}),
    fixed={
        **FIXED,
        "prenorm": False,
        "parallel_block": False,
        "causal": False,
        "use_rms_norm": False,
        "qkv_proj_bias": False,
        "mlp_fc1_bias": False,
        "mlp_fc2_bias": False,
        "rotary_emb_fraction": 1,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "moe_every_n_layers": 0,
    },
)
"""The variant with the settings and weights of its first code."""
