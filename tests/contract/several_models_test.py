"""Several models at once: by their names, by defaults, and on the routes of other servers' clients."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import openai
import pytest

from bertserve.serving.tasks import TASKS as KNOWN
from tests.support.clients import get, post_json
from tests.support.models import ROOT
from tests.support.openai_client import client_of
from tests.support.server import Server, measured, refused_start
from tests.support.specs import parts
from tests.support.tasks import TASKS, tiny_model, write_bundle

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


TEXTS = ["the server", "a text"]
ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "embed": ("/embed", {"inputs": TEXTS}),
    "embed_tokens": ("/embed_all", {"inputs": TEXTS}),
    "embed_sparse": ("/embed_sparse", {"inputs": TEXTS}),
    "classify": ("/classify", {"inputs": TEXTS}),
    "rerank": ("/rerank", {"query": "is it", "texts": TEXTS}),
    "answer": ("/answer", {"inputs": {"question": "is it", "context": "it is a text"}}),
    "tag": ("/tag", {"inputs": TEXTS}),
    "fill_mask": ("/fill-mask", {"inputs": "the [MASK] is"}),
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models of every task, called `{task}-0` and `{task}-1`; the folder of `embed-1` does not scale vectors."""
    root = tmp_path_factory.mktemp("several")
    for task in TASKS:
        for seed in (0, 1):
            fields = parts("embed", normalize=False) if (task, seed) == ("embed", 1) else {}
            write_bundle(root, tiny_model(task, seed), f"{task}-{seed}", **fields)
    return root


@pytest.fixture(scope="module")
def several(repository: Path) -> Iterator[Server]:
    """A server of all of them, two of which are their tasks' defaults."""
    with Server(repository, *measured(repository), "--default", "answer=answer-1,tag=tag-0") as server:
        yield server


def test_the_announced_request_works(several: Server) -> None:
    """It names the model that several others could stand for."""
    several.wait_logged("curl ")
    path, body = re.findall(r"curl http://[^/]+(/\S+) .* -d '(.*)'", several.log)[0]
    assert path == "/models/answer-0/answer"
    assert post_json(several.http, path, body.encode()).status == 200


@pytest.mark.parametrize("task", TASKS)
def test_each_tasks_announced_request_works(tasks_server: Server, task: str) -> None:
    """As the server of that model alone shows it, and the page about protocols, with the reply's fields."""
    known = KNOWN[task]
    path, body = known.path, json.dumps(known.example)
    reply = post_json(tasks_server.http, path, body.encode())
    assert reply.status == 200
    page = (ROOT / "docs/reference/protocols.md").read_text(encoding="utf-8")
    row = re.findall(rf"^\| {task} \| (.*) \|$", page, re.MULTILINE)[0]
    shown_path, shown_body, gives = row.split(" | ")
    assert (shown_path, shown_body) == (f"`{path}`", f"`{body}`")
    if reply.json():  # random weights may find nothing in a text
        assert set(re.findall(r"`(\w+)`", gives)) <= set(re.findall(r'"(\w+)":', reply.body.decode()))


@pytest.mark.parametrize("task", TASKS)
def test_each_model_has_routes_of_its_own(several: Server, task: str) -> None:
    """Below its name a model answers, and differently from the other one."""
    path, message = ROUTES[task]
    replies = [post_json(several.http, f"/models/{task}-{seed}{path}", message) for seed in (0, 1)]
    assert [reply.status for reply in replies] == [200, 200], replies[0].body
    assert replies[0].json() != replies[1].json()


@pytest.mark.parametrize("task", TASKS)
def test_the_plain_route_goes_to_the_default_or_asks_for_a_name(several: Server, task: str) -> None:
    """Without a default, several models of a task are 400 in the body of the route's own protocol, which says how.

    What it says to ask is answered.
    """
    path, message = ROUTES[task]
    reply = post_json(several.http, path, message)
    defaults = {"answer": 1, "tag": 0}
    if task in defaults:
        assert reply.json() == post_json(several.http, f"/models/{task}-{defaults[task]}{path}", message).json()
        return
    assert reply.status == 400
    error = reply.json()["error"]
    said = error if isinstance(error, str) else error["message"]
    assert said.startswith("2 models are available")
    route = said.rpartition("name one in the path: POST ")[2].replace("NAME", f"{task}-0")
    assert post_json(several.http, route, message).status == 200
    reply = post_json(several.http, "/", message)
    assert reply.json()["error"].endswith("; name one in the path: POST /models/NAME")


def test_vectors_are_scaled_as_the_folder_says(several: Server) -> None:
    """Where the request does not say, on every route."""
    for seed in (0, 1):
        name = f"embed-{seed}"
        (vector,) = post_json(several.http, f"/models/{name}/embed", {"inputs": TEXTS[0]}).json()
        assert (abs(np.linalg.norm(vector) - 1) < 1e-5) == (seed == 0)
        assert post_json(several.http, f"/models/{name}", {"inputs": TEXTS[0]}).json() == [vector]
        by_openai = post_json(several.http, "/v1/embeddings", {"model": name, "input": TEXTS[0]}).json()
        assert by_openai["data"][0]["embedding"] == vector
        by_cohere = post_json(several.http, "/v1/embed", {"model": name, "texts": TEXTS[:1]}).json()
        assert by_cohere["embeddings"] == [vector]
        (scaled,) = post_json(
            several.http, f"/models/{name}", {"inputs": TEXTS[0], "parameters": {"normalize": True}}
        ).json()
        np.testing.assert_allclose(scaled, vector / np.linalg.norm(vector), atol=1e-6)


def test_names_that_lead_nowhere(several: Server) -> None:
    """A model of another task is 424 on TEI's routes and 400 on ours, a path with nothing behind the name 404."""
    reply = post_json(several.http, "/models/tag-0/embed", {"inputs": "a"})
    assert (reply.status, reply.json()["error_type"]) == (424, "Backend")
    assert post_json(several.http, "/models/embed-0/tag", {"inputs": "a"}).status == 400
    for path in ("/models/embed-0/", "/models//embed", "/models/embed-0/nothing"):
        assert post_json(several.http, path, {"inputs": "a"}).status == 404


@pytest.fixture
def client(several: Server) -> Iterator[openai.OpenAI]:
    with client_of(several) as opened:
        yield opened


def test_openai_names_select(several: Server, client: openai.OpenAI) -> None:
    """With several models an exact name selects, and any other is its client's NotFoundError."""
    replies = [client.embeddings.create(model=f"embed-{seed}", input=TEXTS[0]) for seed in (0, 1)]
    assert [reply.model for reply in replies] == ["embed-0", "embed-1"]
    assert not np.allclose(replies[0].data[0].embedding, replies[1].data[0].embedding)
    with pytest.raises(openai.NotFoundError) as unknown:
        client.embeddings.create(model="text-embedding-3-small", input=TEXTS[0])
    assert unknown.value.code == "model_not_found"
    said = "(embed-0, embed-1); start the server with --default embed=NAME, or name one in `model`"
    assert said in unknown.value.message
    with pytest.raises(openai.BadRequestError) as other:
        client.embeddings.create(model="tag-0", input=TEXTS[0])
    assert other.value.code == "wrong_task"
    for path, message in (("/v1/embeddings", {"input": "a"}), ("/v2/embed", {"texts": ["a"]})):
        assert post_json(several.http, path, message).status == 400
        assert post_json(several.http, path, {**message, "model": "embed-english-v3.0"}).status == 404
        assert post_json(several.http, path, {**message, "model": "embed-1"}).json()["model"] == "embed-1"


def test_openai_lists_the_models(client: openai.OpenAI, fake_server: Server) -> None:
    """Every model is in the list and can be asked for; what is not served is the client's NotFoundError."""
    assert {model.id for model in client.models.list()} == {f"{task}-{seed}" for task in TASKS for seed in (0, 1)}
    card = client.models.retrieve("tag-1")
    assert (card.id, card.object, card.created) == ("tag-1", "model", 1_767_225_600)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")
    assert [model["id"] for model in get(fake_server.http, "/v1/models").json()["data"]] == ["minilm"]


@pytest.mark.parametrize("version", ["1", "2"])
def test_coheres_rerank(several: Server, tasks_server: Server, version: str) -> None:
    """Of several models the one named answers, else a 404 or 400."""
    path = f"/v{version}/rerank"
    message = {"query": "is it", "documents": [*TEXTS, "it is"], "model": "rerank-1", "top_n": 2}
    reply = post_json(several.http, path, message).json()
    assert (reply["model"], reply["meta"]["api_version"]) == ("rerank-1", {"version": version})
    unknown = post_json(several.http, path, {**message, "model": "rerank-v3.5"})
    assert unknown.status == 404
    assert unknown.json().keys() == {"id", "message", "detail"}
    assert re.search(
        r"2 models are available for rerank \(rerank-0, rerank-1\).*--default.*`model`", unknown.json()["message"]
    )
    assert post_json(tasks_server.http, path, {**message, "model": "rerank-v3.5"}).json()["model"] == "rerank"
    for change, status in (
        ({"top_n": -1}, 422),
        ({"documents": []}, 400),
        ({"max_tokens_per_doc": 0}, 422),
        ({"max_chunks_per_doc": 0}, 422),
        ({"max_tokens_per_doc": 4096}, 200),
        ({"return_embeddings": True}, 422),
        ({"model": None}, 400),
    ):
        assert post_json(several.http, path, {**message, **change}).status == status, change


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("embed", "must look like"),
        ("embed=nobody", "the repository has no model"),
        ("tag=embed", "the repository has no model"),
        ("dance=embed", "the repository has no model"),
    ],
)
def test_a_default_must_be_a_model_of_its_task(tasks_repository: Path, value: str, words: str) -> None:
    """Otherwise the server does not start, and says so."""
    done = refused_start("--models", str(tasks_repository), "--default", value)
    assert done.returncode in {1, 2}
    assert words in done.stderr
