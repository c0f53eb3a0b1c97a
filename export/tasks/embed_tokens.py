"""The task embed_tokens: the encoder without a head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from export.tasks.accuracy import Reader
from export.tasks.base import TaskExport
from export.tasks.decisions import Undecided, cosine
from export.tasks.embed import Encoder
from export.tasks.libraries.answers import vector
from export.tasks.limits import limits_for

if TYPE_CHECKING:
    from serving.records import Row


@dataclass(slots=True, frozen=True)
class _Comparator(Undecided):
    def cosine(self, row: Row, other: Row) -> float:
        """The cosine of the worst token, because each token has a direction of its own."""
        return float(cosine(row[0], other[0]).min())


EXPORT = TaskExport(
    forward=lambda own, common, _: (own.model(**common).last_hidden_state,),
    # These limits apply to the worst token of each text, which pooling would average with the others.
    limits=limits_for(int8={"cosine_mean": 0.98, "cosine_p01": 0.94, "cosine_min": 0.85}),
    comparator=_Comparator,
    reader=Reader,
    library=Encoder,
    read=lambda answer, _: vector(answer),
    vectors=True,
)
