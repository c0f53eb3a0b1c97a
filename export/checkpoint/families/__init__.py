"""The model families that can be exported, one module each. CONTRIBUTING.md says how to add one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bertserve.export.checkpoint.families import (
    albert,
    bert,
    camembert,
    data2vec_text,
    deberta,
    deberta_v2,
    distilbert,
    electra,
    ernie,
    gte,
    jina_bert,
    megatron_bert,
    modernbert,
    mpnet,
    nomic_bert,
    roberta,
    xlm_roberta,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bertserve.export.checkpoint.families.family import Family

_ALL = (
    bert.FAMILY,
    distilbert.FAMILY,
    roberta.FAMILY,
    xlm_roberta.FAMILY,
    camembert.FAMILY,
    electra.FAMILY,
    mpnet.FAMILY,
    albert.FAMILY,
    deberta.FAMILY,
    deberta_v2.FAMILY,
    modernbert.FAMILY,
    nomic_bert.FAMILY,
    gte.FAMILY,
    gte.NEW,
    jina_bert.FAMILY,
    megatron_bert.FAMILY,
    data2vec_text.FAMILY,
    ernie.FAMILY,
)

FAMILIES: dict[str, Family] = {family.model_type: family for family in _ALL}
"""By the model_type of config.json."""

SPECIAL = (bert.RELATIVE, jina_bert.QUERIES_NORMALISED, jina_bert.FAMILY, nomic_bert.FIRST_FORM, ernie.WITH_TASKS)
"""Families that share a model_type with another one."""


def family_of(config: Mapping[str, Any]) -> Family | None:
    """The family of a config.json; None if unknown."""
    special = next((family for family in SPECIAL if family.matches(config)), None)
    return special or FAMILIES.get(str(config.get("model_type")))
