"""The families of checkpoints that can be exported, a module for each.

CONTRIBUTING.md says how to add one.
"""

from export.checkpoint.families import (
    albert,
    bert,
    camembert,
    data2vec_text,
    deberta_v2,
    distilbert,
    electra,
    ernie,
    gte,
    megatron_bert,
    modernbert,
    mpnet,
    nomic_bert,
    roberta,
    xlm_roberta,
)
from export.checkpoint.families.family import Family

_ALL = (
    bert,
    distilbert,
    roberta,
    xlm_roberta,
    camembert,
    electra,
    mpnet,
    albert,
    deberta_v2,
    modernbert,
    nomic_bert,
    gte,
    megatron_bert,
    data2vec_text,
    ernie,
)

FAMILIES: dict[str, Family] = {module.FAMILY.model_type: module.FAMILY for module in _ALL}
"""By the model_type of config.json."""
