"""Prompts and types of input over every protocol: the vector is that of the text with its prompt written before it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.support.clients import ask, get, post_json
from tests.support.openai_client import client_of
from tests.support.server import Server, measured
from tests.support.skips import excused
from tests.support.tasks import write_bundle
from tests.support.triton_clients import TritonClient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from tests.support.clients import HttpReply
    from tests.support.tasks import TinyModel

    Ask = Callable[..., NDArray[np.float32]]

PROMPTS = {"query": "the text in ", "passage": "it is a server: ", "Clustering": "and not "}
TEXT = "a text on the server"


@pytest.fixture(scope="module")
def server(tiny_models: dict[str, TinyModel], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of models with several prompts, with a default one, and with none."""
    repository = tmp_path_factory.mktemp("prompted")
    tiny = tiny_models["embed"]
    write_bundle(repository, tiny, "searching", prompts=PROMPTS)
    write_bundle(repository, tiny, "default", prompts={"query": PROMPTS["query"]}, default_prompt="query")
    write_bundle(repository, tiny, "plain")
    write_bundle(repository, tiny_models["classify"])
    with Server(repository, *measured(repository)) as running:
        yield running


def post(server: Server, path: str, **message: Any) -> HttpReply:
    return post_json(server.http, path, message)


def tei(server: Server, model: str, text: str = TEXT, **choice: str) -> NDArray[np.float32]:
    """The text's vector from `/embed`."""
    return np.array(ask(server, f"/models/{model}/embed", inputs=text, **choice)[0], np.float32)


def from_openai(server: Server, model: str, **choice: Any) -> NDArray[np.float32]:
    """The same from the `openai` package's client, which hands on fields that it does not know."""
    with client_of(server) as client:
        reply = client.embeddings.create(model=model, input=TEXT, extra_body=choice)
    return np.array(reply.data[0].embedding, np.float32)


def v2_json(server: Server, model: str, **choice: str) -> NDArray[np.float32]:
    """The same from v2 over HTTP."""
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": [TEXT]}
    reply = ask(server, f"/v2/models/{model}/infer", inputs=[tensor], parameters=choice)
    return np.array(reply["outputs"][0]["data"], np.float32)


def v2_grpc(server: Server, model: str, **choice: str) -> NDArray[np.float32]:
    result = TritonClient("grpc", server).infer(model, {"text": [TEXT]}, parameters=choice)
    return np.array(result.as_numpy("embedding")[0], np.float32)


def cohere(server: Server, model: str, **choice: str) -> NDArray[np.float32]:
    """The same from Cohere's `/v2/embed`, which has types of input and no names of prompts."""
    if "prompt_name" in choice:
        pytest.skip(excused("the protocol has no prompt_name"))
    reply = ask(server, "/v2/embed", model=model, texts=[TEXT], **choice)
    return np.array(reply["embeddings"]["float"][0], np.float32)


JINA = {"query": "retrieval.query", "document": "retrieval.passage", "clustering": "separation"}


@pytest.mark.parametrize("input_type", JINA)
def test_jinas_tasks_are_types_of_input(server: Server, input_type: str) -> None:
    """And a task without a side gets no prompt."""
    found = from_openai(server, "searching", task=JINA[input_type])
    np.testing.assert_array_equal(found, from_openai(server, "searching", input_type=input_type))
    plain = from_openai(server, "searching", task="text-matching", normalized=False)
    np.testing.assert_allclose(plain / np.linalg.norm(plain), tei(server, "plain"), atol=1e-6)


@pytest.mark.parametrize("way", [tei, from_openai, cohere, v2_json, v2_grpc])
@pytest.mark.parametrize(
    ("model", "choice", "prompt"),
    [
        ("searching", {}, ""),
        ("searching", {"prompt_name": "passage"}, PROMPTS["passage"]),
        ("searching", {"input_type": "query"}, PROMPTS["query"]),
        ("searching", {"input_type": "search_query"}, PROMPTS["query"]),
        ("searching", {"input_type": "document"}, PROMPTS["passage"]),
        ("searching", {"input_type": "search_document"}, PROMPTS["passage"]),
        ("searching", {"input_type": "clustering"}, PROMPTS["Clustering"]),
        ("default", {}, PROMPTS["query"]),
        ("default", {"input_type": "passage"}, ""),
        ("plain", {"input_type": "classification"}, ""),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else None,
)
def test_a_prompt_is_put_before_the_text(
    server: Server, way: Ask, model: str, choice: dict[str, str], prompt: str
) -> None:
    """Types of input find the prompt of their side; documents have none where only queries have one."""
    np.testing.assert_allclose(way(server, model, **choice), tei(server, "plain", prompt + TEXT), atol=1e-6)


def test_prompts_of_tei_routes(server: Server) -> None:
    """`/similarity` and `/tokenize` put prompts as `/embed` does."""
    written = post(server, "/models/plain/tokenize", inputs=PROMPTS["query"] + TEXT).json()
    assert post(server, "/models/searching/tokenize", inputs=TEXT, input_type="query").json() == written
    inputs = {"source_sentence": TEXT, "sentences": ["a"]}
    found = post(server, "/models/searching/similarity", inputs=inputs, parameters={"input_type": "query"}).json()
    both = [tei(server, "plain", PROMPTS["query"] + text) for text in (TEXT, "a")]
    np.testing.assert_allclose(found, [np.dot(*both)], atol=1e-6)


def test_each_chunk_has_the_prompt(server: Server) -> None:
    """Offsets are those of the text without it."""
    text = "a text that is not on the server, and it is in the text for a server. " * 4
    for model, choice in (("searching", {"input_type": "document"}), ("default", {})):
        prompt = PROMPTS["passage" if choice else "query"]
        reply = post(server, f"/models/{model}/embed", inputs=text, chunk=True, **choice)
        chunks = reply.json()[0]
        assert len(chunks) > 1
        for chunk in chunks:
            alone = tei(server, "plain", prompt + text[chunk["start"] : chunk["end"]])
            np.testing.assert_allclose(chunk["embedding"], alone, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "choice", "words"),
    [
        ("searching", {"prompt_name": "quary"}, ["available: Clustering, passage, query"]),
        ("plain", {"prompt_name": "query"}, ["available: none"]),
        ("searching", {"input_type": "classification"}, ["no prompt for", "classification", "Clustering, passage"]),
        ("searching", {"input_type": "query", "prompt_name": "query"}, ["send one of them"]),
        ("classify", {"input_type": "query"}, ["for embeddings", "task classify"]),
    ],
    ids=["name", "none", "type", "both", "task"],
)
def test_a_prompt_that_is_not_there_is_refused(
    server: Server, model: str, choice: dict[str, str], words: list[str]
) -> None:
    """A text is never embedded with another prompt than was meant; the message lists those there are."""
    with pytest.raises(InferenceServerException) as refused:
        v2_grpc(server, model, **choice)
    assert refused.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert all(word in refused.value.message() for word in words)
    if model != "classify":
        reply = post(server, "/v1/embeddings", model=model, input=TEXT, **choice)
        assert (reply.status, reply.json()["error"]["message"]) == (400, refused.value.message())


def test_unknown_types_of_input_are_refused(server: Server) -> None:
    """On either wire, with those that there are."""
    with pytest.raises(InferenceServerException, match=r"`input_type` must be one of query, .*clustering"):
        v2_grpc(server, "plain", input_type="image")
    assert post(server, "/models/plain/embed", inputs=TEXT, input_type="image").status == 422


def test_token_ids_take_no_prompt(server: Server) -> None:
    """A type of input that means a prompt is refused for them, and one that means none is not."""
    ids = [token["id"] for token in post(server, "/models/plain/tokenize", inputs=TEXT).json()[0]]
    reply = post(server, "/models/searching/embed", inputs=[ids], input_type="query")
    assert (reply.status, reply.json()["error"]) == (422, "`input_type` needs texts as inputs, not token IDs")
    assert post(server, "/models/plain/embed", inputs=[ids], input_type="query").status == 200


def test_prompts_are_listed(server: Server) -> None:
    """`/info`, the list of models and the v2 configuration say which prompts there are."""
    for model, prompts, default in (
        ("searching", PROMPTS, None),
        ("default", {"query": PROMPTS["query"]}, "query"),
        ("plain", {}, None),
    ):
        info = json.loads(get(server.http, f"/models/{model}/info").body)
        card = json.loads(get(server.http, f"/v1/models/{model}").body)
        for found in (info, card):
            assert (found["prompts"], found["default_prompt_name"]) == (prompts, default)
        parameters = json.loads(get(server.http, f"/v2/models/{model}/config").body)["parameters"]
        assert json.loads(parameters.get("prompts", {"string_value": "{}"})["string_value"]) == prompts
