"""A model with three outputs on a server: each alone and together, as FlagEmbedding computes them."""

from __future__ import annotations

import contextlib
import io
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.support.clients import ask, get, metric, post_json
from tests.support.server import Server, measured
from tests.support.tasks import write_bundle
from tests.support.triton_clients import FLAVOURS, TritonClient

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from tests.support.bge_m3 import FlagModel, Vectors
    from tests.support.tasks import TinyModel

CLOSE = 1e-5
TEXTS = ["the server", "A text that is not in it, and a text.", "it", "is it on the server? " * 20]
EVERY = {"dense": 1.0, "sparse": 1.0, "tokens": 1.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.bge_m3 import write_m3  # noqa: PLC0415  PyTorch is slow to import

    return write_m3(tmp_path_factory.mktemp("checkpoint") / "m3")


@pytest.fixture(scope="module")
def repository(folder: Path) -> Path:
    from bertserve.export.cli.export import main  # noqa: PLC0415  likewise

    made = folder.with_name("models")
    with contextlib.redirect_stdout(io.StringIO()):
        assert main([str(folder), "--out", str(made), "--precision", "fp32"]) == 0
    return made


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Server]:
    with Server(repository, *measured(repository)) as running:
        yield running


@pytest.fixture(scope="module")
def library(folder: Path) -> FlagModel:
    from tests.support.bge_m3 import FlagModel  # noqa: PLC0415  likewise

    return FlagModel(folder)


@pytest.fixture(scope="module")
def wanted(library: FlagModel) -> list[Vectors]:
    return [library.encode(text) for text in TEXTS]


def same_weights(found: Mapping[int, float], wanted: Mapping[int, float]) -> None:
    assert found == pytest.approx(dict(wanted), abs=CLOSE)


def weights(vector: list[dict[str, Any]]) -> dict[int, float]:
    indices = [one["index"] for one in vector]
    assert indices == sorted(set(indices))
    return {one["index"]: one["value"] for one in vector}


def test_each_route_answers_with_its_output(server: Server, wanted: list[Vectors]) -> None:
    """The routes of the three tasks, with the model's name in the path and without."""
    for at in ("", "/models/m3"):
        dense, sparse, tokens = (
            ask(server, at + path, inputs=TEXTS) for path in ("/embed", "/embed_sparse", "/embed_all")
        )
        for text, expected in enumerate(wanted):
            np.testing.assert_allclose(dense[text], expected.dense, atol=CLOSE)
            same_weights(weights(sparse[text]), expected.lexical)
            np.testing.assert_allclose(tokens[text], expected.colbert, atol=CLOSE)
    assert any(len(expected.lexical) > 3 for expected in wanted)


def test_several_outputs_are_computed_once(server: Server, wanted: list[Vectors]) -> None:
    """One batch for all of them; a reply has those that were asked for, and is a plain list without `outputs`."""
    ran = metric(server, "bertserve_batch_size_sum")
    reply = ask(server, "/embed", inputs=TEXTS, outputs=["tokens", "dense", "sparse"])
    assert metric(server, "bertserve_batch_size_sum") == ran + len(TEXTS)
    for found, expected in zip(reply, wanted, strict=True):
        np.testing.assert_allclose(found["dense"], expected.dense, atol=CLOSE)
        same_weights(weights(found["sparse"]), expected.lexical)
        np.testing.assert_allclose(found["tokens"], expected.colbert, atol=CLOSE)
    alone = ask(server, "/embed", inputs=TEXTS)
    for output in EVERY:
        few = ask(server, "/embed", inputs=TEXTS, outputs=[output])
        assert [one.keys() for one in few] == [{output}] * len(TEXTS)
        if output == "dense":
            assert [one["dense"] for one in few] == alone
    (cut,) = ask(server, "/embed", inputs=TEXTS[0], outputs=["dense", "sparse"], dimensions=8, normalize=False)
    assert len(cut["dense"]) == 8
    for path in ("/", "/models/m3", "/invocations"):
        assert ask(server, path, inputs=TEXTS, parameters={"outputs": ["tokens", "dense", "sparse"]}) == reply
        assert ask(server, path, inputs=TEXTS, outputs=["dense"])[0].keys() == {"dense"}


def test_openai_has_the_others_beside(server: Server, wanted: list[Vectors]) -> None:
    """In the format that is asked for."""
    message = {"model": "m3", "input": TEXTS, "outputs": ["dense", "sparse", "tokens"]}
    data = ask(server, "/v1/embeddings", **message)["data"]
    for found, expected in zip(data, wanted, strict=True):
        np.testing.assert_allclose(found["embedding"], expected.dense, atol=CLOSE)
        same_weights(weights(found["sparse_embedding"]), expected.lexical)
        np.testing.assert_allclose(found["token_embeddings"], expected.colbert, atol=CLOSE)
    (one,) = ask(server, "/v1/embeddings", input="it", outputs=["sparse"])["data"]
    assert one.keys() == {"object", "index", "sparse_embedding"}
    packed = ask(server, "/v1/embeddings", input="it", outputs=["dense"], encoding_format="base64")["data"][0]
    assert packed == ask(server, "/v1/embeddings", input="it", encoding_format="base64")["data"][0]


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_cohere_has_them_by_type(server: Server, wanted: list[Vectors], version: str) -> None:
    """Beside the types of vectors, or without any."""
    ran = metric(server, "bertserve_batch_size_sum")
    types = ["int8", "sparse", "float", "tokens"]
    reply = ask(server, f"/{version}/embed", texts=TEXTS, embedding_types=types)
    assert metric(server, "bertserve_batch_size_sum") == ran + len(TEXTS)
    assert reply["response_type"] == "embeddings_by_type"
    found = reply["embeddings"]
    assert list(found) == types
    plain = ask(server, f"/{version}/embed", texts=TEXTS, embedding_types=["int8", "float"])["embeddings"]
    assert {kind: found[kind] for kind in plain} == plain
    for text, expected in enumerate(wanted):
        np.testing.assert_allclose(found["float"][text], expected.dense, atol=CLOSE)
        same_weights(weights(found["sparse"][text]), expected.lexical)
        np.testing.assert_allclose(found["tokens"][text], expected.colbert, atol=CLOSE)
    few = ask(server, f"/{version}/embed", texts=TEXTS, embedding_types=["sparse"])["embeddings"]
    assert few == {"sparse": found["sparse"]}


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_v2_has_the_outputs_of_all_tasks(server: Server, wanted: list[Vectors], flavour: str) -> None:
    """All by default, or those that are named, which alone are made."""
    client = TritonClient(flavour, server)
    whole = client.infer("m3", {"text": TEXTS})
    names = ("embedding", "sparse_indices", "sparse_values", "row_splits", "embeddings", "tokens")
    dense, indices, values, splits, tokens, counts = map(whole.as_numpy, names)
    for text, expected in enumerate(wanted):
        np.testing.assert_allclose(dense[text], expected.dense, atol=CLOSE)
        own = slice(splits[text], splits[text + 1])
        same_weights(dict(zip(indices[own].tolist(), values[own].tolist(), strict=True)), expected.lexical)
        np.testing.assert_allclose(tokens[text, : counts[text]], expected.colbert, atol=CLOSE)
    few = client.infer("m3", {"text": TEXTS}, outputs=["row_splits", "embedding"], parameters={"top_k": 1})
    np.testing.assert_array_equal(few.as_numpy("embedding"), dense)
    assert few.as_numpy("row_splits").tolist() == list(range(len(TEXTS) + 1))
    assert few.as_numpy("embeddings") is None
    with pytest.raises(InferenceServerException, match="unexpected output; the model has"):
        client.infer("m3", {"text": TEXTS}, outputs=["label"])


WEIGHTS = [None, EVERY, {"dense": 1.0, "sparse": 0.3, "tokens": 1.0}, {"sparse": 2}, {"dense": 0.4, "tokens": 0.6}]


def test_weights_of_any_size_rank(server: Server) -> None:
    """As their ratios say, where neither their sum nor a product with a score is a float."""
    message = {"query": TEXTS[1], "texts": TEXTS}
    for vast, plain in (
        ({"dense": 1.5e308, "sparse": 1.5e308}, {"dense": 1, "sparse": 1}),
        ({"sparse": 1.5e308}, {"sparse": 1}),
        ({"sparse": 1.5e308, "dense": 5e-324}, {"sparse": 1}),
        ({"dense": 5e-324}, {"dense": 1}),
    ):
        assert ask(server, "/rerank", **message, weights=vast) == ask(server, "/rerank", **message, weights=plain)


@pytest.mark.parametrize("given", WEIGHTS, ids=str)
def test_a_hybrid_score_ranks(server: Server, library: FlagModel, given: dict[str, float] | None) -> None:
    """As `compute_score` of FlagEmbedding, with its default of equal weights, on every route."""
    query, texts = TEXTS[1], [*TEXTS, "a text"]
    wanted = [library.score(query, text, given or EVERY) for text in texts]
    message = {"query": query, **({} if given is None else {"weights": given})}
    for path, field in (("/rerank", "texts"), ("/v1/rerank", "documents"), ("/v2/rerank", "documents")):
        ranks = ask(server, path, **message, **{field: texts})
        ranks = ranks if isinstance(ranks, list) else ranks["results"]
        found = {rank["index"]: rank.get("score", rank.get("relevance_score")) for rank in ranks}
        assert list(found) == np.argsort(-np.array(wanted), kind="stable").tolist()
        assert found == pytest.approx(dict(enumerate(wanted)), abs=CLOSE)


def test_prompts_for_other_ends_are_not_those_of_a_search(
    repository: Path, folder: Path, library: FlagModel, tmp_path: Path
) -> None:
    """Nor is the default, as in Sentence Transformers."""
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415  slow to import

    from tests.support.checkpoints import edit_json  # noqa: PLC0415  likewise

    prompts, default = {"clustering": "a text of "}, "clustering"
    encoder = SentenceTransformer(str(folder), device="cpu", prompts=prompts, default_prompt_name=default)
    query, texts = TEXTS[1], TEXTS[:3]
    for found, text in ((encoder.encode_query(query), query), (encoder.encode_document(texts[0]), texts[0])):
        np.testing.assert_allclose(found, library.encode(text).dense, atol=CLOSE)
    copy = shutil.copytree(repository / "m3", tmp_path / "m3")
    (version,) = copy.iterdir()
    edit_json(version / "manifest.json", prompts=prompts, default_prompt=default)
    with Server(tmp_path) as server:
        ranks = ask(server, "/rerank", query=query, texts=texts)
    wanted = {index: library.score(query, text, EVERY) for index, text in enumerate(texts)}
    assert {rank["index"]: rank["score"] for rank in ranks} == pytest.approx(wanted, abs=CLOSE)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "/embed",
        {"inputs": "a", "outputs": ["colbert"]},
        "unknown output in `outputs`; this model has dense, sparse, tokens",
    ),
    ("/embed", {"inputs": "a", "outputs": []}, "`outputs` is empty; this model has dense, sparse, tokens"),
    ("/embed", {"inputs": "a", "outputs": ["dense"], "chunk": True}, "`outputs` cannot be combined with `chunk`"),
    ("/embed", {"inputs": "a", "chunk": True, "late_chunking": True}, "for MaxSim, not for late chunking"),
    ("/v1/embeddings", {"input": "a", "outputs": ["lexical"]}, "unknown output in `outputs`"),
    ("/rerank", {"query": "a", "texts": ["b"], "weights": {"colbert": 1}}, "unknown output in `weights`"),
    ("/rerank", {"query": "a", "texts": ["b"], "weights": {"dense": -1, "sparse": 2}}, "must not be negative"),
    ("/rerank", {"query": "a", "texts": ["b"], "weights": {"dense": 0}}, "one of them must be above 0"),
    ("/rerank", {"query": "a", "texts": ["b"], "long": "window"}, "reads no windows"),
]


@pytest.mark.parametrize(("path", "message", "said"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_refused_says_what_there_is(server: Server, path: str, message: dict[str, Any], said: str) -> None:
    """With a client's status."""
    reply = post_json(server.http, path, message)
    assert 400 <= reply.status < 500
    assert said in reply.body.decode().replace('\\"', '"')


def test_the_server_names_the_outputs(server: Server) -> None:
    """In the model's information, the status, and the document, whose examples answer."""
    assert get(server.http, "/info").json()["outputs"] == ["dense", "sparse", "tokens"]
    (model,) = get(server.http, "/status").json()["models"]
    assert (model["task"], model["also"]) == ("embed", ["embed_sparse", "embed_tokens"])
    document = get(server.http, "/openapi.json").json()
    for path in ("/embed", "/embed_sparse", "/embed_all", "/rerank", "/v1/rerank"):
        content = document["paths"][path]["post"]["responses"]["200"]["content"]
        assert content["application/json"]["example"]


def test_beside_other_models(repository: Path, tiny_models: dict[str, TinyModel], tmp_path: Path) -> None:
    """It is one of the models of each of its tasks: a default for one of them, and behind a cross-encoder."""
    for name in ("embed", "embed_sparse", "rerank"):
        write_bundle(tmp_path, tiny_models[name])
    (tmp_path / "m3").symlink_to(repository / "m3")
    with Server(tmp_path, "--default", "embed_sparse=m3") as both:
        text = {"inputs": "the server"}
        assert ask(both, "/embed_sparse", **text) == ask(both, "/models/m3/embed_sparse", **text)
        assert ask(both, "/embed_all", **text) == ask(both, "/models/m3/embed_all", **text)
        reply = post_json(both.http, "/embed", text)
        assert (reply.status, "embed, m3" in reply.body.decode()) == (400, True)
        ranked = {"query": "a", "texts": ["b", "the server"]}
        assert ask(both, "/rerank", **ranked) == ask(both, "/models/rerank/rerank", **ranked)
        reply = post_json(both.http, "/rerank", {**ranked, "weights": {"dense": 1}})
        assert (reply.status, "needs a model with several outputs" in reply.body.decode()) == (422, True)
        (dense,) = ask(both, "/models/embed/embed", **text, outputs=["dense"])
        assert [dense["dense"]] == ask(both, "/models/embed/embed", **text)
        reply = post_json(both.http, "/models/embed/embed", {**text, "outputs": ["sparse"]})
        assert (reply.status, "this model has dense" in reply.body.decode()) == (422, True)
        reply = post_json(both.http, "/v2/embed", {"model": "embed", "texts": ["a"], "embedding_types": ["sparse"]})
        assert (reply.status, 'unknown output \\"sparse\\" in `embedding_types`' in reply.body.decode()) == (422, True)
