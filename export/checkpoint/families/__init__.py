"""The families of checkpoints that can be exported, a module for each.

To add one, write its module beside the others, list it in `FAMILIES`, and give `tests/support/checkpoints.py` its stem:
every test of every task then runs for it too.
"""

from export.checkpoint.families import bert, distilbert, electra, megatron_bert, roberta

FAMILIES = {
    family.model_type: family
    for family in (bert.FAMILY, distilbert.FAMILY, roberta.FAMILY, electra.FAMILY, megatron_bert.FAMILY)
}
"""By the model_type of config.json."""
