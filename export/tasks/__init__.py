"""One module for each task: what the exporter needs, beyond `serving.tasks`.

Add a task of your own by putting its `TaskExport` into `EXPORTS`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from export.tasks import answer, classify, embed, embed_tokens, fill_mask, rerank, tag

if TYPE_CHECKING:
    from export.tasks.base import TaskExport

EXPORTS: dict[str, TaskExport] = {
    "embed": embed.EXPORT,
    "embed_tokens": embed_tokens.EXPORT,
    "classify": classify.EXPORT,
    "rerank": rerank.EXPORT,
    "answer": answer.EXPORT,
    "tag": tag.EXPORT,
    "fill_mask": fill_mask.EXPORT,
}
