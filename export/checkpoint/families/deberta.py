"""DeBERTa v1: a position for every distance, and one product for queries, keys and values (arXiv 2006.03654)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bertserve.export.checkpoint.families import deberta_v2
from bertserve.export.checkpoint.families.family import BERT_SETTINGS, FIXED

if TYPE_CHECKING:
    from collections.abc import Mapping

_LARGEST_EPSILON = 1e-4
"""The largest epsilon of a normalization in plain operators that ONNX Runtime still fuses."""


def _checked(config: Mapping[str, Any]) -> dict[str, Any]:
    epsilon = config.get("layer_norm_eps", 0)
    if isinstance(epsilon, float) and epsilon > _LARGEST_EPSILON:
        raise ValueError(
            f"layer_norm_eps {epsilon!r} in config.json cannot be exported; supported: up to {_LARGEST_EPSILON}"
        )
    return deberta_v2.checked(config)


FAMILY = replace(
    deberta_v2.FAMILY,
    model_type="deberta",
    stem="Deberta",
    settings=(*BERT_SETTINGS, *deberta_v2.RELATIVE_SETTINGS),
    derived=_checked,
    derives=("embedding_size", "pooler_hidden_size"),
    fixed={**FIXED, "talking_head": False},
    products=4,
)
