"""Examples of replies for the OpenAPI document: what the endpoints themselves make of recorded answers.

So that each has the shape that the route really answers, and that making them computes nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np

from serving.errors import BertserveError
from serving.http.exchange import JSON, HttpRequest
from serving.records import (
    AnswerOptions,
    AnswerSpan,
    ClassifyOptions,
    EmbedOptions,
    EmbedTokensOptions,
    Entity,
    FilledMask,
    FillMaskOptions,
    LabelScore,
    Outcome,
    RerankOptions,
    TagOptions,
    Timings,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from serving.http.api import Api
    from serving.http.routes import ApiRoute
    from serving.inference.pipeline import Pipeline
    from serving.inference.served_models import Repository, ServedModel
    from serving.inference.tokenizer import TextTokenizer
    from serving.models.manifest import Task
    from serving.records import InferRequest

_VECTOR = np.array([0.3713, -0.2118, 0.5302, 0.1446, -0.4409, 0.2877, -0.3365, 0.3641], np.float32)
"""In place of a model's, which would fill the page."""

_OK = 200


async def reply_to(route: ApiRoute, path: str, parameters: dict[str, str], body: bytes, api: Api) -> Any:  # noqa: ANN401  any JSON
    """What a route answers to its example; None where it has no answer now."""
    if route.method == "POST":
        pipeline = cast("Pipeline", _Recorded(api.repository))
        api = replace(api, pipeline=pipeline, v2=api.v2.over(pipeline))
    headers = {b"content-type": JSON, b"prefer": b"return=minimal"}
    request = HttpRequest(route.method, path, headers, body, "6f1c0b6e2f0d-1", 0.0, parameters=parameters)
    try:
        reply = await route.direct(api, request)
    except BertserveError:
        return None
    return msgspec.json.decode(reply.body) if reply.status == _OK else None


class _Recorded:
    """Answers requests as the pipeline would, from a record."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository

    async def infer(self, request: InferRequest[Any]) -> Outcome[Any]:
        task, record = _RECORDS[type(request.options)]
        model = self._repository.find(request.model, request.version, task)
        answers = [record(request.options, model) for _ in request.inputs]
        if task == "rerank":
            answers[-1] = 0.9637  # the last text of the examples is the one that is meant
        answer = np.array(answers) if isinstance(answers[0], np.ndarray) and task == "embed" else answers
        return Outcome(answer, model.name, model.version, Timings(48, 112, 1874, 2211), 9 * len(answers), 0)

    async def read(self, model: ServedModel, _: int, work: Callable[[TextTokenizer], bytes]) -> bytes:
        return work(model.tokenizer)


def _classes(options: ClassifyOptions, model: ServedModel) -> list[LabelScore]:
    labels = model.manifest.labels or ("score",)
    scores = [0.9412 if index == 0 else 0.0588 / (len(labels) - 1) for index in range(len(labels))]
    return [LabelScore(*pair) for pair in zip(labels, scores, strict=True)][: options.top_k]


def _masks(options: FillMaskOptions, _: ServedModel) -> Sequence[Sequence[FilledMask]]:
    words = [("card", 4003), ("chip", 9090), ("engine", 3194), ("board", 2604), ("unit", 3131)]
    found = [
        FilledMask(round(0.48 / 2**index, 4), number, word, f"a t4 is a graphics {word}.")
        for index, (word, number) in enumerate(words)
    ]
    return [found[: options.top_k]]


_RECORDS: Mapping[type, tuple[Task, Callable[[Any, ServedModel], Any]]] = {
    EmbedOptions: ("embed", lambda _, __: _VECTOR),
    EmbedTokensOptions: ("embed_tokens", lambda _, __: np.stack([_VECTOR, _VECTOR[::-1]])),
    ClassifyOptions: ("classify", _classes),
    RerankOptions: ("rerank", lambda _, __: 0.0214),
    AnswerOptions: ("answer", lambda _, __: [AnswerSpan("a graphics card", 0.8713, 8, 23)]),
    TagOptions: (
        "tag",
        lambda _, __: [Entity("ORG", 0.9871, "Nvidia", 19, 25), Entity("LOC", 0.9926, "Santa Clara", 29, 40)],
    ),
    FillMaskOptions: ("fill_mask", _masks),
}
"""For the examples that requests have; see `Docs.example`."""
