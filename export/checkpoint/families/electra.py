"""ELECTRA: embeddings may be narrower than layers (arXiv 2003.10555)."""

from __future__ import annotations

from bertserve.export.checkpoint.families.family import BERT_FIXED, BERT_SIZES, WORD_EMBEDDING, Family

FAMILY = Family(
    model_type="electra",
    stem="Electra",
    prefix="electra.",
    heads=("classifier.", "qa_outputs.", "generator_predictions.", "generator_lm_head.", "discriminator_predictions."),
    tied={"generator_lm_head.weight": WORD_EMBEDDING},
    word_logits=lambda model, hidden: model.generator_lm_head(model.generator_predictions(hidden)),
    head_activation="gelu",
    sizes={**BERT_SIZES, "embedding_size": "embedding_size"},
    # Settings of a multiple choice head.
    unused=frozenset(
        {
            *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
            *("summary_first_dropout", "summary_last_dropout"),
        }
    ),
    fixed=BERT_FIXED,
    # Its pre-training detects replaced tokens, which is no task here.
    pretraining="embed",
    pooling_layer=False,
    projection="narrower",
)
