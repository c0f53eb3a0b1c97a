"""Sparse vectors over every protocol: those of Sentence Transformers' `SparseEncoder` with the same folder.

The encoder is one of OpenSearch's layout: documents are computed, and queries take weights from a table.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from bertserve.serving.bulk.predictor import Model, Predictor
from tests.support.clients import ask, get, metric, post_json
from tests.support.exports import exported
from tests.support.server import Server, measured
from tests.support.sparse_encoders import LENGTH, write_plain, write_router
from tests.support.triton_clients import FLAVOURS, TritonClient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    Vectors = NDArray[np.float32]
    Library = Callable[[Sequence[str], str], Vectors]

PROMPTS = {"query": "is it ", "document": "a text of "}
TEXTS = ["the server", "It is a text, and not on the server.", "a"]
LONG = "server x1 is not in the text, but y2 " * 30
CLOSE = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_router(write_plain(tmp_path_factory.mktemp("sparse") / "small"), prompts=PROMPTS)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    exported(folder, "--precision", "fp32")
    models = folder.with_name("models")
    with Server(models, *measured(models)) as running:
        yield running


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Any:
    from sentence_transformers import SparseEncoder  # noqa: PLC0415  slow to import

    return SparseEncoder(str(folder), device="cpu")


@pytest.fixture(scope="module")
def library(encoder: Any) -> Library:
    """The vectors of texts as queries or documents, with a component for each word of the vocabulary."""

    def encode(texts: Sequence[str], side: str) -> Vectors:
        way = {"query": encoder.encode_query, "document": encoder.encode_document}[side]
        found: Vectors = way(list(texts), convert_to_sparse_tensor=False).numpy()
        return found

    return encode


def dense(vectors: Sequence[Sequence[dict[str, Any]]], size: int) -> Vectors:
    """The vectors of a reply with the zeros that it leaves out; it names no word twice, in order, and none with 0."""
    whole = np.zeros((len(vectors), size), np.float32)
    for row, vector in zip(whole, vectors, strict=True):
        indices = [one["index"] for one in vector]
        assert indices == sorted(set(indices))
        row[indices] = [one["value"] for one in vector]
        assert np.count_nonzero(row) == len(vector)
    return whole


@pytest.mark.parametrize("side", ["document", "query"])
def test_vectors_are_the_librarys(server: Server, library: Library, side: str) -> None:
    """With the prompt of each side, of long texts too, in a list and alone, and where the protocol has another name."""
    texts = [*TEXTS, LONG]
    wanted = library(texts, side)
    assert 0 < np.count_nonzero(wanted[0]) < wanted.shape[1]
    reply = ask(server, "/embed_sparse", inputs=texts, input_type=side)
    np.testing.assert_allclose(dense(reply, wanted.shape[1]), wanted, atol=CLOSE)
    for choice in ({"input_type": f"search_{side}"}, {"prompt_name": side}):
        assert ask(server, "/embed_sparse", inputs=texts[0], **choice) == reply[:1]
    for path in ("/models/small/embed_sparse", "/", "/invocations"):
        assert ask(server, path, inputs=texts, input_type=side) == reply
    instances = [{"inputs": text, "input_type": side} for text in texts]
    assert ask(server, "/vertex", instances=instances)["predictions"] == [[vector] for vector in reply]


def test_texts_without_a_side_are_documents_without_a_prompt(server: Server, library: Library) -> None:
    """As the library encodes them, and as text-embeddings-inference's clients send them."""
    reply = ask(server, "/embed_sparse", inputs="the server")
    prompted = PROMPTS["document"] + "the server"
    assert reply != ask(server, "/embed_sparse", inputs="the server", input_type="document")
    same = ask(server, "/embed_sparse", inputs=prompted)
    wanted = library(["the server"], "document")
    np.testing.assert_allclose(dense(same, wanted.shape[1]), wanted, atol=CLOSE)
    assert ask(server, "/embed_sparse", inputs=["the server"]) == reply
    assert get(server.http, "/info").json()["model_type"] == {"embedding": {"pooling": "splade"}}


def test_a_query_needs_no_engine(server: Server) -> None:
    """No batch is computed for it; its tokens are counted without special ones, and a long one is truncated."""
    computed = metric(server, "bertserve_batch_size_count")
    short = post_json(server.http, "/embed_sparse", {"inputs": "the server", "input_type": "query"})
    assert short.headers["x-compute-tokens"] == "4"  # with its prompt
    long = post_json(server.http, "/embed_sparse", {"inputs": LONG, "input_type": "query"})
    assert long.headers["x-compute-tokens"] == str(LENGTH)
    assert int(long.headers["x-truncated-tokens"]) > LENGTH
    assert metric(server, "bertserve_batch_size_count") == computed
    assert "compute;dur=0.000" in short.headers["server-timing"]
    refused = post_json(server.http, "/embed_sparse", {"inputs": LONG, "input_type": "query", "truncate": False})
    assert (refused.status, refused.json()["error_type"]) == (422, "Validation")
    assert "tokens; the model takes 64" in refused.json()["error"]


def test_both_ends_are_cut(server: Server) -> None:
    """Of queries as of documents."""
    words = f"text {'a ' * 200}server"
    for side in ("query", "document"):
        left, right = (
            ask(server, "/embed_sparse", inputs=words, input_type=side, truncation_direction=direction)
            for direction in ("Left", "Right")
        )
        assert left != right


def test_weights_are_chosen(server: Server) -> None:
    """By number and by size, of each text."""
    whole = ask(server, "/embed_sparse", inputs=TEXTS)
    values = [sorted((one["value"] for one in vector), reverse=True) for vector in whole]
    few = ask(server, "/embed_sparse", inputs=TEXTS, top_k=3)
    assert [sorted((one["value"] for one in vector), reverse=True) for vector in few] == [each[:3] for each in values]
    least = values[0][5]
    above = ask(server, "/embed_sparse", inputs=TEXTS, threshold=least)
    assert above == [[one for one in vector if one["value"] >= least] for vector in whole]
    assert len(above[0]) == 6
    assert ask(server, "/embed_sparse", inputs=TEXTS, threshold=1e9) == [[], [], []]


def test_tokens_and_formats(server: Server) -> None:
    """The names of the vocabulary, and the same weights in each format."""
    (whole,) = ask(server, "/embed_sparse", inputs="the server")
    (named,) = ask(server, "/embed_sparse", inputs="the server", tokens=True)
    assert [{"index": one["index"], "value": one["value"]} for one in named] == whole
    ids = [[one["index"]] for one in named]
    shown = ask(server, "/decode", ids=ids[:32], skip_special_tokens=False)
    assert [one["token"].removeprefix("##") for one in named[:32]] == [text.removeprefix("##") for text in shown]
    (tokens,) = ask(server, "/embed_sparse", inputs="the server", format="tokens")
    assert tokens == {one["token"]: one["value"] for one in named}
    (arrays,) = ask(server, "/embed_sparse", inputs="the server", format="arrays")
    assert arrays == {"indices": [one["index"] for one in whole], "values": [one["value"] for one in whole]}
    (both,) = ask(server, "/embed_sparse", inputs="the server", format="arrays", tokens=True)
    assert both == {**arrays, "tokens": [one["token"] for one in named]}


def test_qdrant_takes_a_reply(server: Server) -> None:
    """As its sparse vector; the page of vector databases shows it so."""
    from qdrant_client import models  # noqa: PLC0415  slow to import

    (whole,) = ask(server, "/embed_sparse", inputs="the server")
    (arrays,) = ask(server, "/embed_sparse", inputs="the server", format="arrays")
    vector = models.SparseVector(**arrays)
    assert vector.indices == [one["index"] for one in whole]
    assert vector.values == [one["value"] for one in whole]


@pytest.mark.parametrize(
    ("message", "status", "kind"),
    [
        ({"inputs": ""}, 400, "Empty"),
        ({"inputs": []}, 400, "Empty"),
        ({"inputs": "a", "top_k": 0}, 422, "Validation"),
        ({"inputs": "a", "format": "dict"}, 422, "Validation"),
        ({"inputs": "a", "treshold": 1}, 422, "Validation"),
        ({"inputs": "a", "prompt_name": "none"}, 422, "Validation"),
        ({"inputs": [[5, 6]], "input_type": "query"}, 422, "Validation"),
        ({"inputs": ["a"] * 2049}, 422, "Validation"),
    ],
    ids=str,
)
def test_errors(server: Server, message: dict[str, Any], status: int, kind: str) -> None:
    """Each has text-embeddings-inference's body and status."""
    reply = post_json(server.http, "/embed_sparse", message)
    assert (reply.status, reply.json()["error_type"]) == (status, kind)


def test_token_ids_are_documents(server: Server) -> None:
    """With their special tokens, as the text that they come from."""
    (tokens,) = ask(server, "/tokenize", inputs="the server")
    by_ids = ask(server, "/embed_sparse", inputs=[[token["id"] for token in tokens]])
    assert by_ids == ask(server, "/embed_sparse", inputs="the server")


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_v2(server: Server, flavour: str) -> None:
    """The vectors of all texts in one tensor each, and where each begins."""
    client = TritonClient(flavour, server)
    for choice in ({}, {"input_type": "query"}, {"top_k": 3}, {"threshold": 0.25}):
        result = client.infer("small", {"text": TEXTS}, parameters=choice)
        indices, values, splits = map(result.as_numpy, ("sparse_indices", "sparse_values", "row_splits"))
        assert (indices.dtype, values.dtype, splits.dtype) == (np.int32, np.float32, np.int32)
        assert (splits[0], splits[-1], len(splits)) == (0, len(indices), len(TEXTS) + 1)
        expected = ask(server, "/embed_sparse", inputs=TEXTS, **choice)
        for row, (begin, end) in zip(expected, pairwise(splits), strict=True):
            assert indices[begin:end].tolist() == [one["index"] for one in row]
            np.testing.assert_allclose(values[begin:end], [one["value"] for one in row], rtol=1e-6)
    none = client.infer("small", {"text": TEXTS}, parameters={"threshold": 1e9})
    assert none.as_numpy("row_splits").tolist() == [0, 0, 0, 0]
    for wrong in ({"top_k": 0}, {"top_k": 1.5}, {"threshold": "low"}):
        with pytest.raises(InferenceServerException, match=min(wrong)):
            client.infer("small", {"text": TEXTS}, parameters=wrong)


def test_v2_refuses_a_threshold_that_no_weight_compares_with(server: Server) -> None:
    """An integer beyond a float in JSON, and NaN, which only gRPC can send."""
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a"]}
    message = {"inputs": [tensor], "parameters": {"threshold": 10**400}}
    refused = post_json(server.http, "/v2/models/small/infer", message)
    assert (refused.status, refused.json()["error"]) == (400, "the parameter `threshold` is out of range")
    client = TritonClient("grpc", server)
    with pytest.raises(InferenceServerException, match="`threshold` is NaN") as rejected:
        client.infer("small", {"text": TEXTS}, parameters={"threshold": float("nan")})
    assert rejected.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_v2_describes_itself(server: Server) -> None:
    """Shapes that vary with the request; the raw outputs of the graph are the other name's."""
    told = get(server.http, "/v2/models/small").json()
    assert told["outputs"] == [
        {"name": "sparse_indices", "datatype": "INT32", "shape": [-1]},
        {"name": "sparse_values", "datatype": "FP32", "shape": [-1]},
        {"name": "row_splits", "datatype": "INT32", "shape": [-1]},
    ]
    raw = get(server.http, "/v2/models/small.tokens").json()["outputs"]
    assert [output["name"] for output in raw] == ["indices", "weights"]
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a"]}
    refused = post_json(server.http, "/v2/models/small.tokens/infer", {"inputs": [tensor], "parameters": {"top_k": 1}})
    assert refused.status == 400


@pytest.mark.parametrize("side", ["document", "query"])
def test_bulk_work(server: Server, folder: Path, library: Library, side: str) -> None:
    """A column of records; queries run no engine there either."""
    assert server.http  # which has exported the model
    model = Model(folder.with_name("models"), threads=1, options={"query": side == "query"}, prompt_name=side)
    assert model.engineless == (side == "query")
    in_bulk(model, library(TEXTS, side))


def test_bulk_queries_keep_their_side_with_any_prompt(server: Server, folder: Path, encoder: Any) -> None:
    """An explicit side goes before that of the prompt's name."""
    assert server.http  # which has exported the model
    for query, encode in ((True, encoder.encode_query), (False, encoder.encode_document)):
        other = "document" if query else "query"
        model = Model(folder.with_name("models"), threads=1, options={"query": query}, prompt_name=other)
        assert model.engineless == query
        in_bulk(model, encode(TEXTS, prompt_name=other, convert_to_sparse_tensor=False).numpy())


def in_bulk(model: Model, wanted: Vectors) -> None:
    """Its answers for the texts are these."""
    found = model.column.array([one.answer for one in Predictor(model).predict(TEXTS)]).to_pylist()
    vectors = [
        [{"index": index, "value": value} for index, value in zip(one["indices"], one["values"], strict=True)]
        for one in found
    ]
    np.testing.assert_allclose(dense(vectors, wanted.shape[1]), wanted, atol=CLOSE)


def test_the_document_shows_it(server: Server) -> None:
    """With its fields, and a reply in the default format."""
    operation = get(server.http, "/openapi.json").json()["paths"]["/embed_sparse"]["post"]
    example = operation["responses"]["200"]["content"]["application/json"]["example"]
    assert example[0][0].keys() == {"index", "value"}
    schema = get(server.http, "/openapi.json").json()["components"]["schemas"]["EmbedSparseRequest"]
    assert {"inputs", "truncate", "prompt_name", "input_type", "top_k", "threshold", "format", "tokens"} == (
        schema["properties"].keys() - {"truncation_direction"}
    )
