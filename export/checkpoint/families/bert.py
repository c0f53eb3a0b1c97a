"""BERT (arXiv 1810.04805), with absolute or relative positions (arXiv 2009.13658)."""

from __future__ import annotations

from dataclasses import replace

from bertserve.export.checkpoint.families.family import (
    BERT_FIXED,
    BERT_SIZES,
    PLAIN_ATTENTION_LAYER,
    WORD_EMBEDDING,
    Family,
)

FAMILY = Family(
    model_type="bert",
    stem="Bert",
    prefix="bert.",
    heads=("pooler.", "cls.", "classifier.", "qa_outputs."),
    tied={"cls.predictions.decoder.weight": WORD_EMBEDDING, "cls.predictions.decoder.bias": "cls.predictions.bias"},
    word_logits=lambda model, hidden: model.cls(hidden),
    sizes=BERT_SIZES,
    fixed=BERT_FIXED,
    pretraining="fill_mask",
)

DISTANCES = ("relative_key", "relative_key_query")
"""What scores a distance: the query, or query and key."""

RELATIVE = replace(
    FAMILY,
    matches=lambda config: config.get("model_type") == "bert" and config.get("position_embedding_type") in DISTANCES,
    derives=("position_embedding_type",),
    # Stored by Transformers, but not used then.
    ignored=("embeddings.position_embeddings.",),
    fixed={key: only for key, only in FAMILY.fixed.items() if key != "position_embedding_type"},
    embedding={"SkipLayerNormalization": 1},
    layer=PLAIN_ATTENTION_LAYER,
)
"""The variant with relative positions in every layer, which Transformers had before version 5."""
