"""Cohere's routes, and reranking as Jina's and vLLM's clients ask for it, beside the checkpoints' own numbers."""

from __future__ import annotations

import base64
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import sentence_transformers
import torch

from tests.support.clients import post_json
from tests.support.expected import cosines, sentence_vectors, token_ids, words
from tests.support.models import HIDDEN_SIZE, NAME
from tests.support.tasks import MAX_LENGTH

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from tests.support.clients import HttpReply
    from tests.support.server import Server
    from tests.support.tasks import TinyModel

TEXTS = [
    "Which card computes?",
    "A graphics card for servers.",
    "The river begins in the Alps.",
    "Tea is made in a teapot.",
    "A GPU multiplies matrices.",
    "Bread is baked in the morning.",
]
DOCUMENTS = ["the server is on", "a text", "it is and is not the text", "and"]
QUERY = "what is it"
RERANKERS = ("/rerank", "/models/rerank/rerank", "/v1/rerank", "/v2/rerank")
EMBED = pytest.mark.parametrize("path", ["/v1/embed", "/v2/embed"])


def post(server: Server, path: str, **message: Any) -> HttpReply:
    return post_json(server.http, path, message, {"X-Request-Id": "r-1"})


def ask(server: Server, path: str, **message: Any) -> Any:
    reply = post(server, path, **message)
    assert reply.status == 200, reply.body
    return reply.json()


def refusal(server: Server, path: str, status: int, **message: Any) -> str:
    """The sentence of a refusal in Cohere's shape; Jina's and Voyage's clients read `detail`."""
    reply = post(server, path, **message)
    assert reply.status == status, reply.body
    assert reply.json().keys() == {"id", "message", "detail"}
    assert reply.json()["id"] == "r-1"
    assert reply.json()["detail"] == reply.json()["message"]
    return str(reply.json()["message"])


@pytest.fixture(scope="module")
def reference() -> NDArray[np.float32]:
    return sentence_vectors(TEXTS)


def order(vectors: NDArray[Any]) -> list[int]:
    """The texts by their cosine with the first."""
    return np.argsort(-cosines(np.repeat(vectors[:1], len(vectors), axis=0), vectors), kind="stable").tolist()


@EMBED
def test_vectors_are_those_of_sentence_transformers(
    fp32_server: Server, models: Path, reference: NDArray[np.float32], path: str
) -> None:
    """Version 1 answers a list where no types are asked for, version 2 an object; both say what was computed."""
    reply = ask(fp32_server, path, texts=TEXTS, model="embed-english-v3.0", input_type="search_document")
    first = path.startswith("/v1")
    vectors = np.array(reply["embeddings"] if first else reply["embeddings"]["float"], np.float32)
    assert cosines(vectors, reference).min() >= 0.9999
    assert order(vectors) == order(reference)
    assert reply["response_type"] == ("embeddings_floats" if first else "embeddings_by_type")
    assert (reply["id"], reply["texts"], reply["model"]) == ("r-1", TEXTS, NAME)
    tokens = sum(len(token_ids(models, text)) for text in TEXTS)
    assert reply["meta"] == {
        "api_version": {"version": "1" if first else "2"},
        "billed_units": {"input_tokens": tokens},
    }


@EMBED
def test_every_type_of_vector(fp32_server: Server, reference: NDArray[np.float32], path: str) -> None:
    """Each by its formula from the float32; the packed bits are those of Sentence Transformers."""
    types = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    reply = ask(fp32_server, path, texts=TEXTS, embedding_types=types)
    assert reply["response_type"] == "embeddings_by_type"
    found = reply["embeddings"]
    assert list(found) == types
    floats = np.array(found["float"], np.float32)
    np.testing.assert_array_equal([np.frombuffer(base64.b64decode(row), "<f4") for row in found["base64"]], floats)
    np.testing.assert_array_equal(found["int8"], np.rint(floats * 127))
    np.testing.assert_array_equal(np.array(found["uint8"]) - 128, found["int8"])
    for packed in ("binary", "ubinary"):
        np.testing.assert_array_equal(found[packed], sentence_transformers.quantize_embeddings(floats, packed))
    assert cosines(np.array(found["int8"]), reference).min() >= 0.995
    assert order(np.array(found["int8"])) == order(reference)
    bits = np.unpackbits(np.array(found["ubinary"], np.uint8), axis=1)
    assert bits.shape == (len(TEXTS), HIDDEN_SIZE)
    np.testing.assert_array_equal(bits, reference > 0)


def test_integers_are_of_vectors_of_length_1(tasks_server: Server) -> None:
    """Also where the first components alone are kept; bits that fill no byte are followed by zeros."""
    wanted = {"texts": ["the server"], "embedding_types": ["float", "int8", "ubinary"], "output_dimension": 12}
    found = ask(tasks_server, "/v2/embed", **wanted)["embeddings"]
    (row,) = np.array(found["float"])
    np.testing.assert_array_equal(found["int8"][0], np.rint(row / np.linalg.norm(row) * 127))
    assert len(found["ubinary"][0]) == 2
    assert found["ubinary"][0][1] % 16 == 0


@EMBED
def test_what_is_too_long_is_cut_where_asked(fp32_server: Server, models: Path, path: str) -> None:
    """At the end, at the start, or not at all."""
    text = f"{words(models, 302)} {words(models, 302, 'card')}"
    for truncate, direction in (("END", "Right"), ("START", "Left"), (None, "Right")):
        reply = post(fp32_server, path, texts=[text], truncate=truncate, embedding_types=["float"])
        expected = ask(fp32_server, "/embed", inputs=text, truncation_direction=direction)
        assert cosines(np.array(reply.json()["embeddings"]["float"]), np.array(expected)).min() >= 0.9999
        assert reply.headers["x-truncated-tokens"] == "346"
    assert "input 1 has 602 tokens" in refusal(fp32_server, path, 422, texts=["a", text], truncate="NONE")


@EMBED
def test_so_many_tokens_are_embedded(fp32_server: Server, path: str) -> None:
    """`max_tokens` keeps the first, with START the last; with NONE what has more is refused."""
    text = "Which card computes? The river begins in the Alps."  # 12 tokens
    for truncate, tokens, kept in (("END", 3, "Which card compute"), ("START", 4, "in the Alps.")):
        message = {"texts": [text, "Which"], "truncate": truncate, "embedding_types": ["float"]}
        reply = post(fp32_server, path, **message, max_tokens=tokens)
        assert reply.status == 200, reply.body
        expected = np.array(ask(fp32_server, "/embed", inputs=[kept, "Which"]))
        assert cosines(np.array(reply.json()["embeddings"]["float"]), expected).min() >= 0.9999, truncate
        assert reply.json()["texts"] == [text, "Which"]
        assert reply.headers["x-truncated-tokens"] == str(12 - tokens)
    message = {"texts": ["Which", text], "max_tokens": 4}
    said = refusal(fp32_server, path, 422, **message, truncate="NONE")
    assert said.startswith("input 1 has 12 tokens; `max_tokens` is 4")
    assert "the minimum is 1" in refusal(fp32_server, path, 422, texts=["a"], max_tokens=0)
    assert ask(fp32_server, path, texts=["a"], max_tokens=100_000)


def test_inputs_in_parts(fp32_server: Server) -> None:
    """The text parts of an input are one text, each on a line."""
    parts = [{"type": "text", "text": text} for text in TEXTS[:2]]
    reply = ask(fp32_server, "/v2/embed", inputs=[{"content": parts}, {"content": parts[:1]}])
    joined = ["\n".join(TEXTS[:2]), TEXTS[0]]
    assert reply["texts"] == joined
    assert reply["embeddings"] == ask(fp32_server, "/v2/embed", texts=joined)["embeddings"]


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@EMBED
@pytest.mark.parametrize(
    ("message", "status", "said"),
    [
        ({"images": ["data:image/png;base64,AAAA"], "input_type": "image"}, 422, "`images`.*text"),
        ({"inputs": [{"content": [{"type": "text", "text": "a"}, IMAGE]}]}, 422, "input 0 has an `image_url`"),
        ({"inputs": [{"content": [{"type": "video"}]}]}, 422, "text, image_url"),
        ({"inputs": [{"content": []}]}, 400, "`content` of input 0 is empty"),
        ({"texts": ["a"], "inputs": []}, 422, "either `texts` or `inputs`"),
        ({}, 422, "either `texts` or `inputs`"),
        ({"texts": []}, 400, "empty"),
        ({"texts": ["a"] * 2049, "max_tokens": 1}, 422, "the request has 2049 inputs; the maximum is 2048"),
        ({"texts": ["a"], "embedding_types": ["int4"]}, 422, "float, int8|base64"),
        ({"texts": ["a"], "input_type": "question"}, 422, "search_document"),
        ({"texts": ["a"], "truncate": "MIDDLE"}, 422, "NONE"),
        ({"texts": ["a"], "output_dimension": 385}, 422, "1 to 384"),
        ({"texts": ["a"], "output_dimensions": 8}, 422, 'did you mean "output_dimension"'),
    ],
)
def test_what_is_refused(fp32_server: Server, path: str, message: dict[str, Any], status: int, said: str) -> None:
    """By a sentence that says what is wrong, in Cohere's shape."""
    assert re.search(said, refusal(fp32_server, path, status, **message))


def scores(tiny: TinyModel, documents: list[str]) -> list[float]:
    found = []
    for document in documents:
        encoded = tiny.tokenizer(QUERY, document, truncation=True, max_length=MAX_LENGTH, return_tensors="pt")
        with torch.inference_mode():
            found.append(torch.sigmoid(tiny.model(**encoded).logits[0, 0]).item())
    return found


@pytest.mark.parametrize("path", RERANKERS)
def test_documents_in_the_order_of_the_model(
    tasks_server: Server, tiny_models: dict[str, TinyModel], path: str
) -> None:
    """Cohere's, Jina's and vLLM's clients get index and score of the best, and what was computed."""
    reply = ask(tasks_server, path, query=QUERY, documents=DOCUMENTS, model="jina-reranker-v2", top_n=3)
    expected = scores(tiny_models["rerank"], DOCUMENTS)
    best = sorted(range(len(DOCUMENTS)), key=lambda index: -expected[index])[:3]
    assert [entry["index"] for entry in reply["results"]] == best
    for entry in reply["results"]:
        assert entry["relevance_score"] == pytest.approx(expected[entry["index"]], rel=1e-4)
        repeated = None if path.startswith("/v") else {"text": DOCUMENTS[entry["index"]]}
        assert entry.get("document") == repeated
    tokens = reply["meta"]["tokens"]["input_tokens"]
    assert reply["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert tokens == sum(len(tiny_models["rerank"].tokenizer(QUERY, text).input_ids) for text in DOCUMENTS)
    assert (reply["id"], reply["model"]) == ("r-1", "rerank")


@pytest.mark.parametrize("path", RERANKERS)
def test_a_top_n_of_0_means_all(tasks_server: Server, path: str) -> None:
    """As in vLLM, whose default it is, and infinity; Voyage's `top_k` likewise."""
    for field in ("top_n", "top_k"):
        assert len(ask(tasks_server, path, query=QUERY, documents=DOCUMENTS, **{field: 0})["results"]) == len(DOCUMENTS)
    if path.startswith("/v"):
        said = refusal(tasks_server, path, 422, query=QUERY, documents=DOCUMENTS, top_n=-1)
        assert said == "`top_n` is -1; the minimum is 0, which returns all"
    else:
        assert len(ask(tasks_server, path, query=QUERY, texts=DOCUMENTS, top_n=0)) == len(DOCUMENTS)


@pytest.mark.parametrize("path", RERANKERS)
def test_documents_that_are_objects(tasks_server: Server, tiny_models: dict[str, TinyModel], path: str) -> None:
    """Their `text` is read, or the fields that are named; where asked they come back as they came."""
    documents = [{"text": "it is", "title": "a text"}, "a text", {"text": "the server", "title": "and"}]
    for fields, read in ((None, ["it is", "a text", "the server"]), (["title"], ["a text", "a text", "and"])):
        message = {"query": QUERY, "documents": documents, "rank_fields": fields, "return_documents": True}
        expected = scores(tiny_models["rerank"], read)
        for entry in ask(tasks_server, path, **message)["results"]:
            assert entry["relevance_score"] == pytest.approx(expected[entry["index"]], rel=1e-4)
            document = documents[entry["index"]]
            assert entry["document"] == ({"text": document} if isinstance(document, str) else document)
    both = {**message, "rank_fields": ["title", "text"], "documents": [documents[0]], "return_documents": False}
    (entry,) = ask(tasks_server, path, **both)["results"]
    assert entry.keys() == {"index", "relevance_score"}
    assert entry["relevance_score"] == pytest.approx(scores(tiny_models["rerank"], ["a text\nit is"])[0], rel=1e-4)


@pytest.mark.parametrize("path", RERANKERS)
def test_long_documents(tasks_server: Server, path: str) -> None:
    """They are cut at so many tokens, and then at the model's length or read in so many windows."""
    long = "the server is in the text " * 41  # 246 tokens

    def score(document: str = long, **options: int) -> tuple[float, int]:
        reply = post(tasks_server, path, query=QUERY, documents=[document], return_documents=True, **options)
        assert reply.status == 200, reply.body
        (entry,) = reply.json()["results"]
        assert entry["document"] == {"text": document}
        return entry["relevance_score"], int(reply.headers["x-truncated-tokens"])

    def tei(text: str, **options: str) -> Any:
        return pytest.approx(ask(tasks_server, "/rerank", query=QUERY, texts=[text], **options)[0]["score"], rel=1e-4)

    room = MAX_LENGTH - 3 - 6  # beside special tokens and the query
    assert score() == score(max_tokens_per_doc=4096) == score(max_chunks_per_doc=1) == (tei(long), 246 - room)
    assert score(max_tokens_per_doc=6) == (tei("the server is in the text"), 240)
    assert score(max_chunks_per_doc=100) == (tei(long, long="window"), 0)
    two = room + room - MAX_LENGTH // 4
    assert score(max_chunks_per_doc=2) == (score(max_chunks_per_doc=100, max_tokens_per_doc=two)[0], 246 - two)
    low = "that " * 60 + long  # a beginning that says less
    assert score(low, max_chunks_per_doc=2)[0] > score(low)[0]


def test_the_body_tells_whose_shape_it_has(tasks_server: Server) -> None:
    """`texts` are TEI's, also where a text is the other word; errors are those of the route."""
    ranks = ask(tasks_server, "/rerank", query="documents", texts=["documents", '"documents": []'])
    assert {entry.keys() == {"index", "score"} for entry in ranks} == {True}
    reply = post(tasks_server, "/rerank", query="a", documents=["b"], top_n=-1)
    assert (reply.status, reply.json()["error_type"]) == (422, "Validation")
    assert ask(tasks_server, "/models/rerank", query="a", documents=["b"])["results"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
def test_documents_that_are_refused(tasks_server: Server, path: str) -> None:
    """The one that lacks what is read is named."""
    for documents, fields, said in (
        (["a", {"title": "b"}], None, "document 1 has no `text`; name the fields"),
        ([{"text": "b"}], ["title"], "document 0 lacks a field that `rank_fields` names"),
        ([{"text": 5}], None, "expected `str`"),
    ):
        assert said in refusal(tasks_server, path, 422, query="a", documents=documents, rank_fields=fields)
    # As at Cohere: 400, "list of documents must not be empty".
    assert "empty" in refusal(tasks_server, path, 400, query="a", documents=[])
