"""MPNet: no token types, RoBERTa's positions, and a bias by distance in every layer (arXiv 2004.09297)."""

from __future__ import annotations

from bertserve.export.checkpoint.families.family import (
    BERT_FIXED,
    BERT_SIZES,
    PLAIN_ATTENTION_LAYER,
    WORD_EMBEDDING,
    Family,
)

FAMILY = Family(
    model_type="mpnet",
    stem="MPNet",
    prefix="mpnet.",
    heads=("pooler.", "classifier.", "qa_outputs.", "lm_head."),
    tied={"lm_head.decoder.weight": WORD_EMBEDDING, "lm_head.decoder.bias": "lm_head.bias"},
    word_logits=lambda model, hidden: model.lm_head(hidden),
    head_activation="gelu",
    sizes=BERT_SIZES,
    settings=("layer_norm_eps", "pad_token_id", "tie_word_embeddings"),
    # Transformers uses 32 buckets of distance, whatever the setting says.
    fixed={**BERT_FIXED, "relative_attention_num_buckets": 32},
    segments=False,
    offset_positions=True,
    embedding={"SkipLayerNormalization": 1},
    layer=PLAIN_ATTENTION_LAYER,
)
