"""ALBERT: one layer's weights for all layers, and embeddings narrower than the layers (arXiv 1909.11942)."""

from __future__ import annotations

from export.checkpoint.families.family import BERT_FIXED, BERT_SIZES, WORD_EMBEDDING, Family

FAMILY = Family(
    model_type="albert",
    stem="Albert",
    prefix="albert.",
    heads=("pooler.", "predictions.", "sop_classifier.", "classifier.", "qa_outputs."),
    tied={"predictions.decoder.weight": WORD_EMBEDDING, "predictions.decoder.bias": "predictions.bias"},
    word_logits=lambda model, hidden: model.predictions(hidden),
    sizes={**BERT_SIZES, "embedding_size": "embedding_size"},
    fixed={**BERT_FIXED, "type_vocab_size": 2, "num_hidden_groups": 1, "inner_group_num": 1},
    usual_activation="gelu_new",
    pretraining="fill_mask",
    projection="always",
    shared_layers=True,
)
