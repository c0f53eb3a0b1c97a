"""DeBERTa v1: every distance has a place, and one product makes queries, keys and values (arXiv 2006.03654)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from export.checkpoint.families import deberta_v2


def _word_logits(model: Any, hidden: Any) -> Any:  # noqa: ANN401  PyTorch's, which is not imported here
    if model.legacy:
        return model.cls(hidden)
    return model.lm_predictions(hidden, model.deberta.embeddings.word_embeddings)


FAMILY = replace(
    deberta_v2.FAMILY,
    model_type="deberta",
    stem="Deberta",
    word_logits=_word_logits,
    settings=(
        "relative_attention",
        "max_relative_positions",
        "pos_att_type",
        "position_biased_input",
        "pooler_hidden_size",
        "pooler_hidden_act",
        "legacy",
    ),
    fixed={"is_decoder": False, "quantization_config": None, "embedding_size": None, "talking_head": False},
    products=4,
)
