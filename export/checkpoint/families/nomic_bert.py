"""NomicBERT as Transformers has it: rotated positions, gated layers without biases (arXiv 2402.01613)."""

from __future__ import annotations

from export.checkpoint.families.family import BERT_FIXED, BERT_SIZES, PLAIN_ATTENTION_LAYER, WORD_EMBEDDING, Family

FAMILY = Family(
    model_type="nomic_bert",
    stem="NomicBert",
    prefix="nomic_bert.",
    heads=("pooler.", "classifier.", "cls."),
    tied={"cls.predictions.decoder.weight": WORD_EMBEDDING, "cls.predictions.decoder.bias": "cls.predictions.bias"},
    word_logits=lambda model, hidden: model.cls(hidden),
    sizes=BERT_SIZES,
    settings=("rope_parameters", "head_dim"),
    fixed={**BERT_FIXED, "type_vocab_size": 2},
    usual_activation="silu",
    pooling_layer=False,
    embedding={"SkipLayerNormalization": 1},
    layer=PLAIN_ATTENTION_LAYER,
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
