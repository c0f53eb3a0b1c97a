"""Example replies of the OpenAPI document: the endpoints' own output for recorded answers.

Each example has the real shape of the route's replies, and needs no computing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import msgspec

from bertserve.serving.errors import BertserveError
from bertserve.serving.http.exchange import JSON, HttpRequest
from bertserve.serving.inference.requests import Outcome, Timings
from bertserve.serving.tasks import TASK_ROUTES, TASKS
from bertserve.serving.tasks.base import go_on
from bertserve.serving.tasks.combined import CombinedOptions, recorded
from bertserve.serving.tasks.hybrid import HybridOptions
from bertserve.serving.tasks.maxsim import MaxSimOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from bertserve.serving.http.app_context import AppContext
    from bertserve.serving.http.routes import Route
    from bertserve.serving.inference.pipeline import Pipeline
    from bertserve.serving.inference.requests import InferRequest
    from bertserve.serving.inference.served_models import Repository, ServedModel
    from bertserve.serving.inference.tokenizer import TextTokenizer
    from bertserve.serving.tasks.base import Check

_OK = 200


async def reply_to(route: Route, path: str, parameters: dict[str, str], body: bytes, context: AppContext) -> Any:  # noqa: ANN401  any JSON
    """A route's reply to its example request; None if it has no answer now."""
    if route.method == "POST":
        pipeline = cast("Pipeline", _Recorded(context.repository))
        context = replace(context, pipeline=pipeline, v2=context.v2.with_pipeline(pipeline))
    headers = {b"content-type": JSON, b"prefer": b"return=minimal"}
    request = HttpRequest(route.method, path, headers, body, "6f1c0b6e2f0d-1", 0.0, parameters=parameters)
    try:
        reply = await route.endpoint(context, request)
    except BertserveError:
        return None
    return msgspec.json.decode(reply.body) if reply.status == _OK else None


class _Recorded:
    """Stands in for the pipeline and answers requests from a record."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository

    async def infer(self, request: InferRequest[Any]) -> Outcome[Any]:
        model = self._repository.find(request.model, request.version, TASK_ROUTES[type(request.options)].task)
        count = len(request.inputs)
        way = TASK_ROUTES[type(request.options)]
        ranks = isinstance(request.options, MaxSimOptions | HybridOptions)
        if isinstance(request.options, CombinedOptions):
            answer = recorded(request.options, model.manifest, count)
        else:
            task = TASKS["rerank" if ranks else way.task or model.manifest.task]
            answer = task.recorded(request.options, model.manifest, count)
        return Outcome(answer, model.name, model.version, Timings(48, 112, 1874, 2211), 9 * count, 0)

    async def write(self, _: Outcome[Any], __: int, work: Callable[[Check], Any]) -> Any:  # noqa: ANN401  its result
        return work(go_on)

    async def read(self, model: ServedModel, _: int, work: Callable[[TextTokenizer], bytes]) -> bytes:
        return work(model.tokenizer)
