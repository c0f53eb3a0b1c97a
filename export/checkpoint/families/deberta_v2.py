"""DeBERTa v2 and v3: attention scores by content and by distance (arXiv 2006.03654, 2111.09543)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bertserve.export.checkpoint.families.family import (
    BERT_SETTINGS,
    BERT_SIZES,
    FIXED,
    HEAD_ACTIVATIONS,
    PLAIN_ATTENTION_LAYER,
    WORD_EMBEDDING,
    Family,
    require,
)

if TYPE_CHECKING:
    from collections.abc import Mapping


def _word_logits(model: Any, hidden: Any) -> Any:  # noqa: ANN401  PyTorch's, which is not imported here
    if model.legacy:
        return model.cls(hidden)
    return model.lm_predictions(hidden, model.deberta.embeddings.word_embeddings)


def checked(config: Mapping[str, Any]) -> dict[str, Any]:
    """Checks settings that depend on one another.

    Raises:
        ValueError: A combination is not supported.
    """
    hidden_size = config["hidden_size"]
    require(config, "embedding_size", hidden_size)
    require(config, "pooler_hidden_size", hidden_size)
    require(config, "attention_head_size", hidden_size // config["num_attention_heads"])
    require(config, "pooler_hidden_act", *HEAD_ACTIVATIONS)
    require(config, "conv_act", *HEAD_ACTIVATIONS)
    kernel = config.get("conv_kernel_size") or 0
    # An even kernel would shorten the text by a token.
    if not isinstance(kernel, int) or kernel < 0 or (kernel > 0 and kernel % 2 == 0):
        raise ValueError(f"conv_kernel_size {kernel!r} in config.json cannot be exported; supported: 0 and odd sizes")
    return {}


RELATIVE_SETTINGS = (
    *("relative_attention", "max_relative_positions", "pos_att_type", "position_biased_input"),
    *("pooler_hidden_act", "legacy"),
)

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
    word_logits=_word_logits,
    sizes=BERT_SIZES,
    settings=(
        *BERT_SETTINGS,
        *RELATIVE_SETTINGS,
        *("position_buckets", "norm_rel_ebd", "share_att_key"),
        *("conv_kernel_size", "conv_groups", "conv_act"),
    ),
    derived=checked,
    derives=("embedding_size", "pooler_hidden_size", "attention_head_size"),
    unused=frozenset({"pooler_dropout", "cls_dropout"}),
    fixed=FIXED,
    usual_segments=0,
    segmentless=True,
    pooling_layer=False,
    # The token types' sum, if there are any.
    embedding={"SkipLayerNormalization": 1},
    layer=PLAIN_ATTENTION_LAYER,
    folded=True,
)
