"""One module a task: what the exporter asks, beside `serving.tasks`.

A task of your own is exported once its module has put what it says into `EXPORTS`.
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
