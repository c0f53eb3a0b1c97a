"""BERT (arXiv 1810.04805)."""

from __future__ import annotations

from export.checkpoint.families.family import BERT_FIXED, BERT_SIZES, WORD_EMBEDDING, Family

FAMILY = Family(
    model_type="bert",
    stem="Bert",
    prefix="bert.",
    heads=("pooler.", "cls.", "classifier.", "qa_outputs."),
    tied={"cls.predictions.decoder.weight": WORD_EMBEDDING, "cls.predictions.decoder.bias": "cls.predictions.bias"},
    word_logits=lambda model, hidden: model.cls(hidden),
    sizes=BERT_SIZES,
    fixed={**BERT_FIXED, "type_vocab_size": 2},
    pretraining="fill_mask",
)
