"""Multi-vector models on a server: vectors of queries and documents, and ranks, as Sentence Transformers has them."""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support.clients import ask, get, post_json
from tests.support.server import Server, measured
from tests.support.tasks import write_bundle
from tests.support.triton_clients import FLAVOURS, TritonClient

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tests.support.tasks import TinyModel

SAME, SAME_SCORE = 1e-5, 1e-4
QUERIES = [
    "what is it?",
    "the server, and a text",
    "is it that text on the server for a server with a text? not as it is",
]
DOCUMENTS = [
    "the server.",
    "it is a text: for the server, with (a) text!",
    "a text that is not in it " * 5,
    "?!",
    "and the",
]
MODELS = ("stanford", "pylate")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints whose queries are filled with tokens that attention ignores, and with such that it sees."""
    pytest.importorskip("sentence_transformers", reason="the module sentence-transformers is not installed")
    from tests.support.multi_vectors import write_pylate, write_stanford  # noqa: PLC0415  PyTorch is slow to import

    root = tmp_path_factory.mktemp("checkpoints")
    pylate = write_pylate(root / "pylate", attend_to_expansion_tokens=True, similarity_fn_name="meanmaxsim")
    return {"stanford": write_stanford(root / "stanford"), "pylate": pylate}


@pytest.fixture(scope="module")
def repository(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    from bertserve.export.cli.export import main  # noqa: PLC0415  likewise

    repository: Path = tmp_path_factory.mktemp("multi-vector")
    with contextlib.redirect_stdout(io.StringIO()):
        for folder in folders.values():
            assert main([str(folder), "--out", str(repository), "--precision", "fp32"]) == 0
    return repository


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Server]:
    with Server(repository, *measured(repository)) as running:
        yield running


@pytest.fixture(scope="module")
def libraries(folders: dict[str, Path]) -> dict[str, Any]:
    import sentence_transformers  # noqa: PLC0415  likewise

    return {
        name: sentence_transformers.MultiVectorEncoder(str(folder), device="cpu", local_files_only=True)
        for name, folder in folders.items()
    }


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def embedded(server: Server, model: str, texts: Sequence[Any], **choice: Any) -> list[NDArray[np.float32]]:
    found = ask(server, f"/models/{model}/embed_all", inputs=list(texts), **choice)
    return [np.array(vectors, np.float32) for vectors in found]


def same(found: Sequence[NDArray[np.float32]], wanted: Sequence[Any]) -> None:
    assert [len(vectors) for vectors in found] == [len(vectors) for vectors in wanted]
    for vectors, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(vectors, expected, atol=SAME)


def test_sides_have_the_vectors_of_the_library(server: Server, libraries: dict[str, Any], model: str) -> None:
    """Markers, lengths, expansion and skipped punctuation of each side; without a side a text is a document."""
    library = libraries[model]
    documents = library.encode_document(DOCUMENTS, convert_to_numpy=True)
    same(embedded(server, model, DOCUMENTS), documents)
    for side in ("document", "search_document", "passage"):
        same(embedded(server, model, DOCUMENTS, input_type=side), documents)
    queries = library.encode_query(QUERIES, convert_to_numpy=True)
    for choice in ({"input_type": "query"}, {"input_type": "search_query"}, {"prompt_name": "query"}):
        same(embedded(server, model, QUERIES, **choice), queries)
    for text, expected in zip(QUERIES, queries, strict=True):
        same(embedded(server, model, [text], input_type="query"), [expected])


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_queries_over_v2(server: Server, libraries: dict[str, Any], model: str, flavour: str) -> None:
    """The side is a parameter, and rows are padded."""
    result = TritonClient(flavour, server).infer(model, {"text": QUERIES}, parameters={"input_type": "query"})
    wanted = libraries[model].encode_query(QUERIES, convert_to_numpy=True)
    rows, counts = result.as_numpy("embeddings"), result.as_numpy("tokens").ravel()
    same([row[:count] for row, count in zip(rows, counts, strict=True)], wanted)


def scores(server: Server, path: str, **message: Any) -> list[float]:
    ranks = ask(server, path, query=QUERIES[1], **message)
    ranks = ranks if isinstance(ranks, list) else ranks["results"]
    ordered = sorted(ranks, key=lambda rank: rank["index"])
    return [rank.get("score", rank.get("relevance_score")) for rank in ordered]


def test_ranks_are_the_similarities_of_the_library(server: Server, libraries: dict[str, Any], model: str) -> None:
    """On every route; the folder says whether a score is the sum or the mean over the query, and a request may."""
    library = libraries[model]
    query, documents = library.encode_query(QUERIES[1:2]), library.encode_document(DOCUMENTS)
    wanted = library.similarity(query, documents)[0].tolist()
    path = f"/models/{model}/rerank"
    assert scores(server, path, texts=DOCUMENTS) == pytest.approx(wanted, abs=SAME_SCORE)
    for route in ("/rerank", "/v1/rerank", "/v2/rerank"):
        found = scores(server, route, documents=DOCUMENTS, model=model)
        assert found == pytest.approx(wanted, abs=SAME_SCORE)
    for raw in (True, False):
        library.similarity_fn_name = "maxsim" if raw else "meanmaxsim"
        expected = library.similarity(query, documents)[0].tolist()
        assert scores(server, path, texts=DOCUMENTS, raw_scores=raw) == pytest.approx(expected, abs=SAME_SCORE)
    library.similarity_fn_name = "maxsim" if model == "stanford" else "meanmaxsim"


def test_what_a_multi_vector_model_refuses(server: Server) -> None:
    """Windows, and texts that are too long for their side where nothing may be cut off."""
    path = "/models/stanford"
    reply = post_json(server.http, f"{path}/rerank", {"query": "a", "texts": ["b"], "long": "window"})
    assert (reply.status, reply.json()["error"].partition(";")[0]) == (422, "a multi-vector model reads no windows")
    long = {"inputs": "it is " * 8, "truncate": False}
    assert post_json(server.http, f"{path}/embed_all", long).status == 200
    reply = post_json(server.http, f"{path}/embed_all", {**long, "input_type": "query"})
    assert (reply.status, "the model takes 12" in reply.json()["error"]) == (422, True)
    reply = post_json(server.http, f"{path}/embed_all", {**long, "input_type": "query", "truncate": True})
    assert (reply.status, reply.headers["x-truncated-tokens"]) == (200, "7")
    assert reply.headers["x-compute-tokens"] == "12"


def test_token_ids_are_documents_without_a_marker(server: Server, model: str) -> None:
    """As with prompts; punctuation is skipped all the same."""
    tokens = post_json(server.http, f"/models/{model}/tokenize", {"inputs": DOCUMENTS[0], "prompt_name": "document"})
    ids = [token["id"] for token in tokens.json()[0]]
    same(embedded(server, model, [ids]), embedded(server, model, DOCUMENTS[:1]))
    bare = [ids[0], *ids[2:]]
    assert len(embedded(server, model, [bare])[0]) == len(embedded(server, model, [ids])[0]) - 1
    reply = post_json(server.http, f"/models/{model}/embed_all", {"inputs": [bare], "input_type": "query"})
    assert reply.status == 422


def test_the_model_that_ranks(
    repository: Path, tiny_models: dict[str, TinyModel], tmp_path: Path, server: Server
) -> None:
    """The named one; else a cross-encoder goes first, and several multi-vector models must be named."""
    message = {"query": "a", "texts": ["b", "the server"]}
    reply = post_json(server.http, "/rerank", message)
    assert (reply.status, "pylate, stanford" in reply.json()["error"]) == (400, True)
    unknown = {"query": "a", "documents": message["texts"], "model": "rerank-v3.5"}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        reply = post_json(server.http, path, unknown)
        assert (reply.status, b"pylate, stanford" in reply.body) == (404, True)
    paths = get(server.http, "/openapi.json").json()["paths"]
    assert {"/rerank", "/v1/rerank", "/v2/rerank"} <= paths.keys()
    for model in ("rerank", "embed_tokens"):
        write_bundle(tmp_path, tiny_models[model])
    (tmp_path / "stanford").symlink_to(repository / "stanford")
    with Server(tmp_path) as both:
        alone = scores(both, "/rerank", texts=message["texts"])
        assert alone == scores(both, "/models/rerank/rerank", texts=message["texts"])
        assert alone != scores(both, "/models/stanford/rerank", texts=message["texts"])
        assert scores(both, "/v2/rerank", documents=message["texts"]) == alone
        reply = post_json(both.http, "/models/embed_tokens/rerank", message)
        assert (reply.status, "not rerank" in reply.json()["error"]) == (424, True)


def test_a_repository_of_one_multi_vector_model_ranks_without_a_name(repository: Path, tmp_path: Path) -> None:
    """As clients of rerankers ask, with any name of their own."""
    (tmp_path / "stanford").symlink_to(repository / "stanford")
    with Server(tmp_path) as alone:
        wanted = scores(alone, "/models/stanford/rerank", texts=DOCUMENTS)
        assert scores(alone, "/rerank", texts=DOCUMENTS) == wanted
        assert scores(alone, "/v2/rerank", documents=DOCUMENTS, model="rerank-v3.5") == pytest.approx(wanted)
        assert len(embedded(alone, "stanford", DOCUMENTS)) == len(DOCUMENTS)
