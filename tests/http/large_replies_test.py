"""Large replies are written in blocks, up to the deadline, by every route that has some."""

from __future__ import annotations

import asyncio
import gzip
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import orjson
import pytest

from bertserve.serving.errors import too_late
from bertserve.serving.http.apis.vectors import rows_json
from bertserve.serving.http.app import App
from bertserve.serving.inference import pipeline as pipelines
from bertserve.serving.inference.after_engine import EndedError, Until
from bertserve.serving.inference.pipeline import Pipeline
from bertserve.serving.inference.requests import InferRequest, Outcome, Timings
from bertserve.serving.inference.served_models import Repository
from bertserve.serving.lifecycle import Lifecycle
from bertserve.serving.oip.service import V2Service
from bertserve.serving.settings import Settings
from bertserve.serving.tasks.chunks import Chunk, ChunkOptions
from bertserve.serving.tasks.combined import CombinedOptions, Embedded
from bertserve.serving.tasks.embed import EmbedOptions
from bertserve.serving.tasks.embed_sparse import EmbedSparseOptions, SparseVector
from bertserve.serving.tasks.embed_tokens import EmbedTokensOptions
from bertserve.serving.tasks.tag import Entity, TagOptions
from bertserve.serving.telemetry.metrics import Metrics
from tests.support.clients import http_call
from tests.support.http_app import listening_beside, ready_api

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

TEXTS = ["a", "b", "c"]
VECTORS = np.random.default_rng(0).standard_normal((3, 100_000), np.float32)
DENSE = VECTORS.reshape(-1, 32)
TOKENS = VECTORS.reshape(3, -1, 8)
SPARSE = SparseVector(np.arange(20_000, dtype=np.int32), VECTORS[0, :20_000])
ENTITIES = [Entity("PER", 0.5, "a", at, at + 1) for at in range(20_000)]

ANSWERS: Mapping[type, Any] = {
    EmbedOptions: DENSE,
    EmbedTokensOptions: list(TOKENS),
    EmbedSparseOptions: [SPARSE] * 12,
    ChunkOptions: [[Chunk(at, at + 1, VECTORS[0, :128]) for at in range(300)]] * 3,
    CombinedOptions: [Embedded(row, SPARSE, tokens) for row, tokens in zip(VECTORS, TOKENS, strict=True)],
    TagOptions: [ENTITIES] * 3,
}


class Route(NamedTuple):
    path: str
    body: Mapping[str, Any]
    found: Callable[[Any], Any]
    answer: Any
    encoding: str = ""


def plain(values: Any) -> Any:
    return orjson.loads(orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY))


V2 = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [3, 1], "data": TEXTS}]}
ROUTES = [
    Route("/embed", {"inputs": TEXTS}, lambda found: found, DENSE),
    Route(
        "/models/embed/embed",
        {"inputs": TEXTS, "chunk": True},
        lambda found: found[2][299]["embedding"],
        VECTORS[0, :128],
    ),
    Route("/embed_all", {"inputs": TEXTS}, lambda found: found, TOKENS),
    Route("/embed_sparse", {"inputs": TEXTS}, lambda found: [one["value"] for one in found[2]], SPARSE.values),
    Route(
        "/v1/embeddings",
        {"input": TEXTS, "model": "embed"},
        lambda found: [one["embedding"] for one in found["data"]],
        DENSE,
    ),
    Route(
        "/v1/embeddings",
        {"input": TEXTS, "model": "embed", "outputs": ["dense", "tokens"]},
        lambda found: found["data"][2]["token_embeddings"],
        TOKENS[2],
    ),
    Route(
        "/embed",
        {"inputs": TEXTS, "outputs": ["dense", "sparse", "tokens"]},
        lambda found: found[2]["tokens"],
        TOKENS[2],
    ),
    Route(
        "/v2/embed",
        {"texts": TEXTS, "model": "embed", "input_type": "classification", "embedding_types": ["float"]},
        lambda found: found["embeddings"]["float"],
        DENSE,
    ),
    Route("/v2/models/embed/infer", V2, lambda found: found["outputs"][0]["data"], VECTORS.ravel()),
    Route("/v2/models/embed/infer", V2, lambda found: found["outputs"][0]["data"], VECTORS.ravel(), "gzip"),
    Route("/tag", {"inputs": TEXTS}, lambda found: [one["start"] for one in found[2]], np.arange(20_000)),
]


class Answering(Pipeline):
    """A pipeline whose answers are given."""

    async def infer(self, request: InferRequest[Any]) -> Outcome[Any]:
        permit: Any = SimpleNamespace(deadline=asyncio.get_running_loop().time() + 600)
        return Outcome(ANSWERS[type(request.options)], "a", "1", Timings(), 60_000, 0, permit=permit)


class Counted(Until):
    """Counts the blocks of all work, and ends it before one of them."""

    begun, last = 0, 1 << 30

    def __call__(self) -> None:
        Counted.begun += 1
        if Counted.begun > Counted.last:
            raise EndedError


@pytest.fixture(scope="module")
def address(tasks_repository: Path) -> Iterator[str]:
    settings, repository = Settings.load([], {}), Repository.open(tasks_repository)
    dispatcher: Any = SimpleNamespace(missed=lambda *_: too_late(""))
    pipeline = Answering(settings=settings, repository=repository, lifecycle=Lifecycle(), dispatcher=dispatcher)
    api = ready_api(settings, pipeline=pipeline, repository=repository)
    versions: Any = SimpleNamespace(others=list)
    v2 = V2Service(pipeline, repository, api.lifecycle, settings, versions, Metrics())
    with listening_beside(App(replace(api, v2=v2), documented=False)) as port:
        yield port


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.path} {','.join(route.body)} {route.encoding}")
def test_a_large_reply_is_written_in_blocks_up_to_the_deadline(
    route: Route, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deadline that passes between two of them gets its 504; whole it holds the values of the answer."""
    monkeypatch.setattr(pipelines, "Until", Counted)
    monkeypatch.setattr(Counted, "begun", 0)
    headers = {"Content-Type": "application/json", **({"Accept-Encoding": route.encoding} if route.encoding else {})}
    reply = http_call(address, "POST", route.path, orjson.dumps(route.body), headers)
    body = gzip.decompress(reply.body) if route.encoding else reply.body
    assert reply.status == 200, reply.body
    assert route.found(orjson.loads(body)) == plain(route.answer)
    assert Counted.begun >= 8
    monkeypatch.setattr(Counted, "last", Counted.begun - 1)
    monkeypatch.setattr(Counted, "begun", 0)
    late = http_call(address, "POST", route.path, orjson.dumps(route.body), headers)
    assert (late.status, b"deadline" in late.body) == (504, True)


@pytest.mark.parametrize("rows", [VECTORS, VECTORS[:1], VECTORS[:0], VECTORS[0], ["a"] * 20_000, []])
def test_rows_in_blocks_are_those_at_once(rows: Any) -> None:
    """Vectors, numbers and texts, however many."""
    assert rows_json(rows) == orjson.dumps(rows, option=orjson.OPT_SERIALIZE_NUMPY)
