"""The application answers the same over our own connection, under uvicorn, and in Starlette's client."""

from __future__ import annotations

import asyncio
import enum
import json
import socket
import sys
import threading
import types
from collections import deque
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import pytest
import uvicorn
from anyio.from_thread import start_blocking_portal
from starlette.testclient import TestClient

from bertserve.serving.errors import ModelNotFound
from bertserve.serving.http import openapi
from bertserve.serving.http.apis import huggingface, tei
from bertserve.serving.http.app import App
from bertserve.serving.http.asgi import AsgiApp
from bertserve.serving.inference.requests import Outcome, Timings
from bertserve.serving.inference.served_models import Repository
from bertserve.serving.net.observer import RequestObserver
from bertserve.serving.oip.service import V2Service
from bertserve.serving.security.keys import ApiKeys
from bertserve.serving.settings import Settings
from bertserve.serving.tasks.answer import AnswerOptions, AnswerSpan
from bertserve.serving.tasks.base import go_on
from bertserve.serving.tasks.classify import ClassifyOptions, LabelScore
from bertserve.serving.tasks.embed import EmbedOptions
from bertserve.serving.tasks.embed_sparse import EmbedSparseOptions, SparseVector
from bertserve.serving.tasks.embed_tokens import EmbedTokensOptions
from bertserve.serving.tasks.fill_mask import FilledMask, FillMaskOptions
from bertserve.serving.tasks.rerank import RerankOptions
from bertserve.serving.tasks.tag import Entity, TagOptions
from bertserve.serving.telemetry.metrics import Metrics
from tests.support.clients import http_call
from tests.support.credentials import FIRST, WRONG, bearer, write_keys
from tests.support.http_app import LOOPBACK, listening_beside, ready_api
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from bertserve.serving.http.routes import Route
    from bertserve.serving.inference.requests import InferRequest, RequestTrace
    from bertserve.serving.tasks.base import Check

OURS, OTHER = "https://app.example", "https://other.example"
JSON = {"Content-Type": "application/json", "X-Request-Id": "r-1"}
LIMIT = 4096
_UNEQUAL = {"date", "connection"}
"""What a connection says and no application knows."""


class Case(NamedTuple):
    method: str
    path: str
    body: bytes | None = None
    headers: Mapping[str, str] = JSON


class Pipeline:
    """Answers at once, of the shape that each task has."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository

    async def infer(self, request: InferRequest[Any]) -> Outcome[Any]:
        count = len(request.inputs)
        if "bug" in request.inputs:
            raise ValueError("a bug")
        task, make = ANSWERS[type(request.options)]
        model = self._repository.find(request.model, request.version, task)
        answer = [make(model.manifest.labels.names if model.manifest.labels else ())] * count
        vectors = isinstance(request.options, EmbedOptions)
        return Outcome(np.array(answer) if vectors else answer, model.name, model.version, Timings(1, 2, 3, 4), 5, 0)

    async def write(self, _: Outcome[Any], __: int, work: Callable[[Check], Any]) -> Any:
        return work(go_on)

    async def read(self, model: Any, _: int, work: Callable[[Any], bytes]) -> bytes:
        return work(model.tokenizer)


ANSWERS: dict[type, tuple[Any, Callable[[tuple[str, ...]], Any]]] = {
    EmbedOptions: ("embed", lambda _: np.ones(8, np.float32)),
    EmbedTokensOptions: ("embed_tokens", lambda _: np.ones((2, 8), np.float32)),
    EmbedSparseOptions: ("embed_sparse", lambda _: SparseVector(np.arange(2, dtype=np.int32), np.ones(2, np.float32))),
    ClassifyOptions: ("classify", lambda labels: [LabelScore(label, 0.5) for label in labels]),
    RerankOptions: ("rerank", lambda _: 0.5),
    AnswerOptions: ("answer", lambda _: [AnswerSpan("a", 0.5, 0, 1)]),
    TagOptions: ("tag", lambda _: [Entity("PER", 0.5, "a", 0, 1)]),
    FillMaskOptions: ("fill_mask", lambda _: [[FilledMask(0.5, 7, "a", "a b")] * 5]),
}


class Versions:
    async def load(self, name: str, version: int | None = None) -> None:
        if version is not None:
            raise ModelNotFound(f"{name} has no such version")

    def unload(self, name: str) -> None:
        pass

    def others(self) -> list[Any]:
        return []


class Observer(RequestObserver):
    def __init__(self) -> None:
        super().__init__(lambda _: None, [lambda _: None])
        self.traces: list[RequestTrace] = []

    def end(self, trace: RequestTrace) -> None:
        self.traces.append(trace)


@contextmanager
def under_uvicorn(app: App) -> Iterator[str]:
    config = uvicorn.Config(AsgiApp(app), log_config=None, lifespan="off", ws="none", server_header=False)
    server, opened = uvicorn.Server(config), socket.create_server((LOOPBACK, 0))
    with start_blocking_portal() as portal:
        serving = portal.start_task_soon(server.serve, [opened])
        yield "{}:{}".format(*opened.getsockname())
        server.should_exit = True
        serving.result()


class Everywhere:
    """One application on a listener of ours, under uvicorn, and in Starlette's client.

    Attributes:
        errors: What was recorded, in order.
    """

    def __init__(self, repository: Repository, settings: Settings, keys: ApiKeys | None) -> None:
        self.errors: list[str] = []
        self._observer = Observer()
        self._stack = ExitStack()
        pipeline: Any = Pipeline(repository)
        api = ready_api(settings, pipeline=pipeline, repository=repository)
        self.app = App(
            replace(
                api,
                v2=V2Service(pipeline, repository, api.lifecycle, settings, Versions(), Metrics()),
                status=lambda *, costs=True: {"costs": costs},
                render_metrics=lambda: b"metric 1\n",
                record_error=lambda error, *_: self.errors.append(error.reason),
                keys=keys,
                observer=self._observer,
            )
        )

    def __enter__(self) -> Self:
        self._address = self._stack.enter_context(listening_beside(self.app))
        self._uvicorn_address = self._stack.enter_context(under_uvicorn(self.app))
        self._client = self._stack.enter_context(closing(TestClient(AsgiApp(self.app))))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def case(self, route: Route) -> Case:
        """A request for a route, with the example that the document has."""
        docs, api = route.docs, self.app.context
        names = docs.models(api) if docs is not None and docs.models is not None else ["embed"]
        path = route.path.replace("{model}", (names or ["embed"])[0]).replace("{version}", "1").replace("{region}", "r")
        example = docs.example if docs is not None else {"inputs": "a"}
        body = json.dumps(example(api) if callable(example) else example).encode()
        return Case(route.method, path, body if route.method == "POST" else None)

    def ask_ours(self, case: Case) -> None:
        http_call(self._address, case.method, case.path, case.body, case.headers)
        self._taken(1)

    def ask(self, case: Case) -> int:
        method, path, body, headers = case
        self._taken(0)
        direct = http_call(self._address, method, path, body, headers)
        recorded = self._taken(1)
        if direct.status == 304:
            direct.headers.pop("content-length")  # of what it leaves out: other servers would send it
        expected = {name: value for name, value in direct.headers.items() if name not in _UNEQUAL}
        in_client = self._client.request(method, path, content=body, headers=dict(headers))
        over_uvicorn = http_call(self._uvicorn_address, method, path, body, headers)
        for status, gave, content in (
            (in_client.status_code, dict(in_client.headers), in_client.content),
            (over_uvicorn.status, over_uvicorn.headers, over_uvicorn.body),
        ):
            assert status == direct.status
            assert {name: value for name, value in gave.items() if name not in _UNEQUAL} == expected
            assert method == "HEAD" or content == direct.body
        assert self._taken(2) == tuple(2 * each for each in recorded)
        return direct.status

    def _taken(self, count: int) -> tuple[list[str], list[tuple[Any, ...]]]:
        """What was recorded of so many requests, which is done behind their replies."""
        wait_for(lambda: len(self._observer.traces) >= count, "the traces of the requests")
        traces = [
            (trace.method, trace.route, trace.request_id, trace.status, trace.reason, trace.bytes_in, trace.bytes_out)
            for trace in self._observer.traces
        ]
        errors = self.errors[:]
        self.errors.clear()
        self._observer.traces.clear()
        return errors, traces


@pytest.fixture(scope="module")
def repository(tasks_repository: Path) -> Repository:
    return Repository.open(tasks_repository, engine="fake")


def everywhere(repository: Repository, *options: str, keys: ApiKeys | None = None) -> Everywhere:
    words = ["--models", "models", "--body-limit-bytes", str(LIMIT), *options]
    return Everywhere(repository, Settings.load(words, {}), keys)


@pytest.fixture(scope="module")
def plain(repository: Repository) -> Iterator[Everywhere]:
    with everywhere(repository, "--model-control", "true") as served:
        yield served


@pytest.fixture(scope="module")
def keyed(repository: Repository, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Everywhere]:
    """Keys are needed, and the pages of one origin may ask."""
    keys = ApiKeys(write_keys(tmp_path_factory.mktemp("keys") / "keys", FIRST))
    with everywhere(repository, "--cors-origins", OURS, keys=keys) as served:
        yield served


def test_every_route_answers_the_same(plain: Everywhere) -> None:
    """With the document's own examples; GET also as HEAD."""
    for route in plain.app.routes:
        case = plain.case(route)
        hidden = route.docs is None or (route.docs.models is not None and not route.docs.models(plain.app.context))
        assert plain.ask(case) in ({200, 400, 424, 501} if hidden else {200}), route.path
        if route.method == "GET":
            plain.ask(case._replace(method="HEAD"))


_LEAVES = (str, bytes, int, float, complex, bool, type(None), enum.Enum, PurePath)
_MOST = 1_000_000
_ROOM = "bertserve.serving"


def held(*roots: object) -> dict[str, object]:
    """By place: values that are leaves, and of all others their type and how much they hold."""
    found: dict[str, object] = {}
    modules = [(name, module) for name, module in sorted(sys.modules.items()) if name.startswith(_ROOM)]
    waiting: deque[tuple[str, Any]] = deque([*modules, *((f"root {index}", root) for index, root in enumerate(roots))])
    seen: dict[int, object] = {}  # which keeps them, so that no other one gets the same number
    while waiting:
        place, value = waiting.popleft()
        if isinstance(value, _LEAVES):
            found[place] = value
            continue
        if id(value) in seen:
            continue
        seen[id(value)] = value
        parts = list(_parts(value))
        found[place] = (type(value).__qualname__, len(parts))
        waiting.extend((f"{place}{step}", part) for step, part in parts)
        assert len(found) < _MOST
    return found


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | types.MappingProxyType):
        yield from ((f"[{key!r}]"[:80], each) for key, each in list(value.items()))
    elif isinstance(value, list | tuple | deque):
        yield from ((f"[{index}]", each) for index, each in enumerate(list(value)))
    elif isinstance(value, set | frozenset):
        yield from ((f"{{{index}}}", each) for index, each in enumerate(sorted(value, key=repr)))
    elif isinstance(value, types.FunctionType):
        cells = value.__closure__ or ()
        yield from (
            (f"<{name}>", cell.cell_contents) for name, cell in zip(value.__code__.co_freevars, cells, strict=True)
        )
        yield from ((".default", each) for each in (value.__defaults__, value.__kwdefaults__) if each)
    elif isinstance(value, types.MethodType):
        yield from ((".self", value.__self__), (".function", value.__func__))
    elif _ours(value):
        yield from ((f".{name}", each) for name, each in _fields(value))


def _ours(value: Any) -> bool:
    if isinstance(value, types.ModuleType):
        return value.__name__.startswith(_ROOM)
    kind = value if isinstance(value, type) else type(value)
    return kind.__module__.startswith(_ROOM)


def _fields(value: Any) -> Iterable[tuple[str, Any]]:
    names = dict.fromkeys(getattr(value, "__dict__", ()))
    for kind in () if isinstance(value, type) else type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names |= dict.fromkeys((slots,) if isinstance(slots, str) else slots)
    if not isinstance(value, type):
        names |= dict.fromkeys(getattr(type(value), "__struct_fields__", ()))
    for name in names:
        if name in {"__weakref__", "__dict__", "__builtins__", "__annotations__"}:
            continue
        full = (
            f"_{type(value).__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
        )
        try:
            yield name, getattr(value, full)
        except AttributeError:
            continue


CHANGES = ("._limit.", "._kinds", "._since")
"""Places that are meant to change: what is counted and timed."""


def test_no_request_changes_what_is_kept_for_others(plain: Everywhere) -> None:
    """Replies, heads, settings, tables: once every route was asked, asking again leaves all values as they are."""
    fields = {
        **JSON,
        "Origin": OURS,
        "If-None-Match": "a",
        "Prefer": "return=minimal",
        "Accept-Encoding": "gzip",
    }
    cases = [plain.case(route)._replace(headers=fields) for route in plain.app.routes]
    cases += [case._replace(method="HEAD") for case in cases if case.method == "GET"]
    cases += [Case("GET", "/nothing"), Case("PUT", "/embed", b"{}"), Case("POST", "/embed", b"{")]

    def ask() -> dict[str, object]:
        for case in cases:
            plain.ask_ours(case)
        return held(plain.app)

    before, after = ask(), ask()
    assert len(before) > 5_000
    changed = {place for place in before.keys() | after.keys() if before.get(place) != after.get(place)}
    assert not {place for place in changed if not any(name in place for name in CHANGES)}


def test_routes_that_run_a_model_say_so(plain: Everywhere) -> None:
    """All of them, whichever the protocol, and no others."""
    infer = {route.path.rpartition("/")[2] for route in plain.app.routes if route.infers}
    tasks = {"embed", "embed_all", "embed_sparse", "predict", "classify", "rerank", "answer", "tag", "fill-mask"}
    assert infer == {*tasks, "similarity", "embeddings", "infer", "", "invocations", "{model}"}


@pytest.mark.parametrize(
    ("status", "case"),
    [
        (404, Case("GET", "/no/such/path")),
        (404, Case("POST", "/embed/", b'{"inputs": "a"}')),
        (404, Case("GET", "/livez%0A")),
        (404, Case("POST", "/embed%0A", b'{"inputs": "a"}')),
        (404, Case("POST", "/models/nobody/embed", b'{"inputs": "a"}')),
        (404, Case("POST", "/v2/models/nobody/infer", b'{"inputs": []}')),
        (405, Case("GET", "/embed")),
        (405, Case("POST", "/livez", b"{}")),
        (405, Case("PUT", "/v2/models/embed/trace/setting", b"{}")),
        (405, Case("OPTIONS", "/embed", None, {**JSON, "Origin": OURS, "Access-Control-Request-Method": "POST"})),
        (200, Case("POST", "/embed?a=b", b'{"inputs": "a"}')),
        (200, Case("POST", "/%65mbed", b'{"inputs": "a"}')),
        (200, Case("GET", "/status", None, {**JSON, "Prefer": "return=minimal"})),
        (200, Case("POST", "/models/embed/embed", b'{"inputs": "a"}')),
        (400, Case("POST", "/embed", b"{")),
        (400, Case("POST", "/v2/models/embed/infer", b'{"inputs": [], "more": 1}')),
        (200, Case("POST", "/embed", b'{"inputs": "a", "more": 1}')),
        (422, Case("POST", "/embed", b'{"inputs": "a", "dimensons": 1}')),
        (400, Case("POST", "/v1/embeddings", b'{"input": 1}')),
        (422, Case("POST", "/v2/rerank", b'{"query": "a", "documents": ["b"], "top_n": -1}')),
        (422, Case("POST", "/classify", b'{"inputs": "a"}', {**JSON, "X-Request-Timeout-Ms": "soon"})),
        (422, Case("POST", "/embed", b'{"inputs": "a"}', {**JSON, "X-Request-Priority": "9"})),
        (415, Case("POST", "/embed", b'{"inputs": "a"}', {"Content-Type": "text/plain", "X-Request-Id": "r-1"})),
        (415, Case("POST", "/embed", b'{"inputs": "a"}', {**JSON, "Content-Encoding": "br"})),
        (400, Case("POST", "/embed", b'{"inputs": "a"}', {**JSON, "Content-Encoding": "gzip"})),
        (413, Case("POST", "/embed", b" " * (LIMIT + 1))),
        (424, Case("POST", "/models/classify/embed_sparse", b'{"inputs": "a"}')),
        (500, Case("POST", "/embed", b'{"inputs": ["bug"]}')),
        (404, Case("POST", "/v2/repository/models/embed/load", b'{"parameters": {"version": "9"}}')),
    ],
)
def test_what_is_out_of_the_ordinary_is_answered_the_same(plain: Everywhere, status: int, case: Case) -> None:
    """Unknown paths and methods, what breaks a schema or a limit, and our own bugs."""
    assert plain.ask(case) == status


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/v1/v1/embeddings", "unknown path; did you mean /v1/embeddings?"),
        ("/v1/embeddings/", "unknown path; did you mean /v1/embeddings?"),
        ("//embed", "unknown path; did you mean /embed?"),
        ("/v1/reranking", "unknown path; did you mean /v1/rerank?"),
        ("/V1/Embeddings", "unknown path; did you mean /v1/embeddings?"),
        ("/openai/deployments/NAME/embeddings", "unknown path; did you mean /embeddings or /v1/embeddings?"),
        ("/api/embed", "unknown path; did you mean /embed or /v1/embed or /v2/embed?"),
        ("/v2/models/stats/", "unknown path; did you mean /v2/models/stats?"),
        ("/v2/models/embed/inferr", "unknown path; did you mean /v2/models/embed/infer?"),
        ("/models/embed/v1/embeddings", "unknown path; did you mean /v1/embeddings?"),
        ("/v1/models//embed/", "unknown path; did you mean /v1/models/embed?"),
        ("/v1/chat/completions", "unknown path; see /docs"),
        ("/embedx" * 5_000, "unknown path; see /docs"),
        ("/v1/models/ORG/NAME", "unknown model; available: "),
        ("/models/ORG/NAME", "unknown model; available: "),
        ("/models/ORG/NAME/embed", "unknown model; available: "),
        ("/v2/models/ORG/NAME/infer", "unknown model; available: "),
    ],
)
def test_a_path_that_is_nearly_right_is_answered_with_the_right_one(plain: Everywhere, path: str, message: str) -> None:
    """Whatever is wrong with it; a model's name with a slash is an unknown model."""
    reply = TestClient(AsgiApp(plain.app)).get("http://testserver" + path)
    said = reply.json()["error"]
    assert reply.status_code == 404
    assert (said["message"] if isinstance(said, dict) else said).startswith(message)


def test_the_documentation_is_read_once(plain: Everywhere, monkeypatch: pytest.MonkeyPatch) -> None:
    """And in a thread: its scripts are larger than what the event loop should wait for."""
    readers: list[str] = []
    read = openapi.files

    def watched(package: str) -> Any:
        readers.append(threading.current_thread().name)
        return read(package)

    openapi._asset.cache_clear()
    monkeypatch.setattr(openapi, "files", watched)
    bodies = {TestClient(AsgiApp(plain.app)).get("/docs/swagger-ui-bundle.js").content for _ in range(2)}
    assert [len(body) > 1 << 20 for body in bodies] == [True]
    assert [name.startswith("asyncio") for name in readers] == [True]


def test_a_page_that_has_not_changed_is_not_sent_again(plain: Everywhere) -> None:
    """The console's files have tags."""
    client = TestClient(AsgiApp(plain.app))
    tag = client.get("/").headers["etag"]
    assert plain.ask(Case("GET", "/", None, {**JSON, "If-None-Match": tag})) == 304


def test_keys_are_asked_for_the_same(keyed: Everywhere) -> None:
    """On every route but the public ones, and before anything tells whether there is such a route."""
    of_tei = {route.path for router in (tei.router, huggingface.any_task) for route in router.routes}
    for route in keyed.app.routes:
        case = keyed.case(route)
        expected = 200 if route.public else 401
        # Errors of some protocols carry the request's id, which differs where its head is refused.
        if route.public or route.path in of_tei:
            assert keyed.ask(case) == expected, route.path
    assert keyed.ask(Case("POST", "/embed", b'{"inputs": "a"}', {**JSON, **bearer(WRONG)})) == 401
    assert keyed.ask(Case("POST", "/embed", b'{"inputs": "a"}', {**JSON, **bearer(FIRST)})) == 200
    assert keyed.ask(Case("GET", "/embed", None, {**JSON, **bearer(FIRST)})) == 405


@pytest.mark.parametrize("origin", [OURS, OTHER, None])
@pytest.mark.parametrize("path", ["/embed", "/livez", "/no/such/path"])
def test_pages_of_other_origins_are_told_the_same(keyed: Everywhere, origin: str | None, path: str) -> None:
    """By preflights, answers and refusals."""
    headers = {**JSON, **({"Origin": origin} if origin else {})}
    method, body = ("POST", b'{"inputs": "a"}') if path == "/embed" else ("GET", None)
    keyed.ask(Case(method, path, body, {**headers, **bearer(FIRST)}))
    if path == "/embed":
        assert keyed.ask(Case(method, path, body, headers)) == 401
    if origin:
        assert keyed.ask(Case("OPTIONS", path, None, {**headers, "Access-Control-Request-Method": "POST"})) == 200


def test_pages_may_read_every_header(keyed: Everywhere) -> None:
    """That the document names for any reply."""
    reply = TestClient(AsgiApp(keyed.app)).get("/openapi.json", headers={"Origin": OURS, **bearer(FIRST)})
    named = {
        name.lower()
        for operations in reply.json()["paths"].values()
        for operation in operations.values()
        for answer in operation["responses"].values()
        for name in answer.get("headers", ())
    }
    assert {"server-timing", "etag", "x-cache", "allow"} <= named
    assert named - set(reply.headers["access-control-expose-headers"].split(", ")) == set()


def test_the_document_leaves_out_what_no_model_answers(repository: Repository) -> None:
    """And what a client cannot use: pages, and routes that only refuse."""
    alone = Repository([repository.find("embed")])
    with everywhere(alone) as served:
        paths = asyncio.run(served.app.described())["paths"].keys()
    assert {"/embed", "/models/{model}/embed", "/v1/embeddings", "/"} <= paths
    left_out = {"/predict", "/rerank", "/v2/rerank", "/docs", "/embed_sparse", "/v2/logging"}
    assert not paths & {*left_out, "/v2/repository/models/{model}/load"}
