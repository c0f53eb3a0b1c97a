"""Requests for a dispatcher, with a permit of a model and a deadline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving.records import DEFAULT_PRIORITY
from serving.scheduling.admission import Permit

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence
    from typing import Any

    from serving.inference.dispatcher import Dispatcher, PendingRequest
    from serving.records import EncodedText, ModelIndex


def run_request(
    dispatcher: Dispatcher, model: ModelIndex, texts: Sequence[EncodedText], deadline: float
) -> Coroutine[Any, Any, PendingRequest]:
    """`Dispatcher.run` with a permit of its own."""
    return dispatcher.run(Permit(dispatcher._scheduler.admission, model, DEFAULT_PRIORITY, deadline), texts)
