"""A scheduler under test, and requests for it."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from bertserve.serving.records import DEFAULT_PRIORITY, EncodedText, ModelIndex
from bertserve.serving.scheduling.admission import Permit
from bertserve.serving.scheduling.queue import WorkItem

if TYPE_CHECKING:
    from bertserve.serving.scheduling.batcher import Assignment
    from bertserve.serving.scheduling.scheduler import Scheduler

FIRST = ModelIndex(0)


def items(*lengths: int, model: int = 0, owner: object = None) -> list[WorkItem]:
    """Texts of so many tokens."""
    return [
        WorkItem(ModelIndex(model), EncodedText(array("i", range(tokens))), tokens, owner, index)
        for index, tokens in enumerate(lengths)
    ]


def start(
    scheduler: Scheduler, request: list[WorkItem], priority: int, deadline: float, now: float
) -> Assignment | None:
    """Admits a request and submits it; its permit is not given back."""
    permit = Permit(scheduler.admission, request[0].model, priority, deadline)
    permit.confirm([item.tokens for item in request], now)
    return scheduler.submit(request, permit, now)


def start_one(scheduler: Scheduler, timeout: float = 1.0) -> Assignment:
    """A text that starts at once, at the time 0."""
    batch = start(scheduler, items(8), DEFAULT_PRIORITY, timeout, 0.0)
    assert batch is not None
    return batch


def submit(
    scheduler: Scheduler, *lengths: int, now: float = 0.0, timeout: float = 60.0, priority: int = DEFAULT_PRIORITY
) -> list[WorkItem]:
    request = items(*lengths)
    start(scheduler, request, priority, now + timeout, now)
    return request


def began(scheduler: Scheduler, now: float) -> Assignment:
    batch = scheduler.next(now)
    assert batch is not None
    return batch
