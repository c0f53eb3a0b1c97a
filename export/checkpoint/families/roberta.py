"""RoBERTa: no token types, positions start behind the padding id (arXiv 1907.11692)."""

from __future__ import annotations

from bertserve.export.checkpoint.families.family import BERT_FIXED, BERT_SIZES, WORD_EMBEDDING, Family

FAMILY = Family(
    model_type="roberta",
    stem="Roberta",
    prefix="roberta.",
    heads=("pooler.", "classifier.", "qa_outputs.", "lm_head."),
    tied={"lm_head.decoder.weight": WORD_EMBEDDING, "lm_head.decoder.bias": "lm_head.bias"},
    word_logits=lambda model, hidden: model.lm_head(hidden),
    head_activation="gelu",
    sizes=BERT_SIZES,
    fixed=BERT_FIXED,
    segments=False,
    first_segment=True,
    offset_positions=True,
    embedding={},
)
