"""DeBERTa v2 and v3: every layer's scores are by content and by distance (arXiv 2006.03654, 2111.09543)."""

from __future__ import annotations

from export.checkpoint.families.family import BERT_SIZES, PLAIN_ATTENTION_LAYER, WORD_EMBEDDING, Family

FAMILY = Family(
    model_type="deberta-v2",
    stem="DebertaV2",
    prefix="deberta.",
    heads=(
        "pooler.",
        "classifier.",
        "qa_outputs.",
        "cls.",
        "lm_predictions.",
        "mask_predictions.",
    ),
    ignored=("embeddings.position_embeddings.",),
    tied={"cls.predictions.decoder.weight": WORD_EMBEDDING, "cls.predictions.decoder.bias": "cls.predictions.bias"},
    word_logits=lambda model, hidden: model.cls(hidden),
    sizes=BERT_SIZES,
    settings=(
        "relative_attention",
        "max_relative_positions",
        "position_buckets",
        "norm_rel_ebd",
        "share_att_key",
        "pos_att_type",
        "position_biased_input",
        "conv_kernel_size",
        "conv_groups",
        "conv_act",
        "pooler_hidden_size",
        "pooler_hidden_act",
        "attention_head_size",
    ),
    fixed={"legacy": True, "is_decoder": False, "quantization_config": None, "embedding_size": None},
    usual_segments=0,
    pooling_layer=False,
    embedding={},
    layer=PLAIN_ATTENTION_LAYER,
    folded=True,
)
