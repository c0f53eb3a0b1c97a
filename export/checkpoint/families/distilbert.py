"""DistilBERT: no token types, and settings with names of their own (arXiv 1910.01108)."""

from __future__ import annotations

from typing import Any

from bertserve.export.checkpoint.families.family import FIXED, WORD_EMBEDDING, Family


def _word_logits(model: Any, hidden: Any) -> Any:  # noqa: ANN401  PyTorch's, which is not imported here
    transformed = model.activation(model.vocab_transform(hidden))
    return model.vocab_projector(model.vocab_layer_norm(transformed))


FAMILY = Family(
    model_type="distilbert",
    stem="DistilBert",
    prefix="distilbert.",
    heads=(
        "pre_classifier.",
        "classifier.",
        "qa_outputs.",
        "vocab_transform.",
        "vocab_layer_norm.",
        "vocab_projector.",
    ),
    tied={"vocab_projector.weight": WORD_EMBEDDING},
    word_logits=_word_logits,
    sizes={
        "hidden_size": "dim",
        "layers": "n_layers",
        "heads": "n_heads",
        "intermediate_size": "hidden_dim",
        "positions": "max_position_embeddings",
        "vocab_size": "vocab_size",
    },
    settings=("pad_token_id", "tie_word_embeddings"),
    # Positions are stored, however they were made.
    unused=frozenset({"dropout", "attention_dropout", "qa_dropout", "seq_classif_dropout", "sinusoidal_pos_embds"}),
    fixed=FIXED,
    activation="activation",
    segments=False,
    pooling_layer=False,
)
