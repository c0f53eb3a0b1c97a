"""ELECTRA: embeddings may be narrower than the layers (arXiv 2003.10555)."""

from __future__ import annotations

from export.checkpoint.families.family import BERT_FIXED, BERT_SIZES, WORD_EMBEDDING, Family

FAMILY = Family(
    model_type="electra",
    stem="Electra",
    prefix="electra.",
    heads=("classifier.", "qa_outputs.", "generator_predictions.", "generator_lm_head.", "discriminator_predictions."),
    tied={"generator_lm_head.weight": WORD_EMBEDDING},
    word_logits=lambda model, hidden: model.generator_lm_head(model.generator_predictions(hidden)),
    sizes=BERT_SIZES,
    fixed={**BERT_FIXED, "type_vocab_size": 2},
    # Its pre-training tells replaced tokens from real ones, which is none of our tasks.
    pretraining="embed",
    pooling_layer=False,
    projection="narrower",
)
