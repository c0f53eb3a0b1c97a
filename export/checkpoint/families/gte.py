"""GTE as Transformers has it (`new` on the hub): rotated positions and gated layers (arXiv 2407.19669)."""

from __future__ import annotations

from export.checkpoint.families.family import BERT_FIXED, BERT_SIZES, PLAIN_ATTENTION_LAYER, WORD_EMBEDDING, Family

FAMILY = Family(
    model_type="gte",
    stem="Gte",
    prefix="gte.",
    heads=("pooler.", "classifier.", "lm_head."),
    tied={"lm_head.decoder.weight": WORD_EMBEDDING, "lm_head.decoder.bias": "lm_head.bias"},
    word_logits=lambda model, hidden: model.lm_head(hidden),
    sizes=BERT_SIZES,
    settings=("rope_parameters",),
    fixed=BERT_FIXED,
    pooling_layer=False,
    embedding={"SkipLayerNormalization": 1},
    layer=PLAIN_ATTENTION_LAYER,
    gated=True,
    renamed={
        "encoder.layer": "layers",
        "attention.o_proj": "self_attn.o_proj",
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
