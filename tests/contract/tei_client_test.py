"""A client of text-embeddings-inference against every route of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.support.clients import get
from tests.support.expected import cosines
from tests.support.tei_client import TeiClient, TeiError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.server import Server
    from tests.support.tasks import TinyModel

TEXTS = ["the server", "It is a text, and not on the server.", "a"]
LONG = "the server is " * 40 + "a text"


@pytest.fixture
def tei(tasks_server: Server) -> TeiClient:
    return TeiClient(tasks_server.http)


def test_embed(tei: TeiClient) -> None:
    """One input or several, as texts or token ids, cut and scaled as asked."""
    (one,) = tei.embed("the server")
    assert tei.headers["x-compute-characters"] == str(len("the server"))
    np.testing.assert_allclose(tei.embed(TEXTS)[0], one, atol=1e-6)
    assert tei.headers["x-compute-characters"] == str(sum(map(len, TEXTS)))
    (tokens,) = tei.tokenize("the server")
    np.testing.assert_allclose(tei.embed([[token["id"] for token in tokens]])[0], one, atol=1e-6)
    raw = tei.embed("the server", normalize=False)[0]
    np.testing.assert_allclose(raw / np.linalg.norm(raw), one, atol=1e-6)
    assert len(tei.embed("the server", dimensions=8)[0]) == 8


def test_truncation_cuts_the_end_or_the_beginning(tei: TeiClient) -> None:
    """`Right` keeps the beginning of a text, `Left` its end; neither is done where `truncate` is false."""
    (ids,) = [[token["id"] for token in tokens] for tokens in tei.tokenize(LONG)]
    for direction, kept in (("Right", [*ids[:63], ids[-1]]), ("Left", [ids[0], *ids[-63:]])):
        expected = tei.embed([kept])
        np.testing.assert_allclose(tei.embed(LONG, truncation_direction=direction), expected, atol=1e-6)
        found = tei.embed(LONG, truncation_direction=direction.lower(), truncate=True)
        np.testing.assert_allclose(found, expected, atol=1e-6)
        with pytest.raises(TeiError, match="tokens") as refused:
            tei.embed(LONG, truncation_direction=direction, truncate=False)
        assert (refused.value.status, refused.value.error_type) == (422, "Validation")


def test_truncate_left_follows_the_servers_default(serve: Callable[..., Server]) -> None:
    """Where a request does not say whether to cut, `auto_truncate` does."""
    server = serve("--engine", "fake", "--precision", "fp32", "--auto-truncate", "false")
    tei = TeiClient(server.http)
    with pytest.raises(TeiError, match="tokens"):
        tei.embed("server " * 300, truncation_direction="Left")
    assert len(tei.embed("server " * 300, truncation_direction="Left", truncate=True)) == 1


def test_predict(tei: TeiClient) -> None:
    """A text, a pair, or a list of either."""
    one = tei.predict("the server")
    assert sum(entry["score"] for entry in one) == pytest.approx(1, abs=1e-5)
    batch = tei.predict([["the server"], ["the server", "a text"]])
    assert [entry["label"] for entry in batch[0]] == [entry["label"] for entry in one]
    assert len(batch) == 2
    left = tei.predict(LONG, truncation_direction="Left", raw_scores=True)
    assert left != tei.predict(LONG, raw_scores=True)


def test_rerank(tei: TeiClient) -> None:
    """Texts by score, with their text where asked."""
    ranks = tei.rerank("the server", TEXTS, return_text=True)
    assert [entry["text"] for entry in ranks] == [TEXTS[entry["index"]] for entry in ranks]
    assert all(0 <= entry["score"] <= 1 for entry in ranks)
    assert tei.headers["x-compute-characters"] == str(len("the server") + sum(map(len, TEXTS)))


def test_similarity(tei: TeiClient) -> None:
    """The cosines of the vectors of `/embed`."""
    vectors = np.array(tei.embed(TEXTS))
    expected = cosines(np.repeat(vectors[:1], 2, axis=0), vectors[1:])
    np.testing.assert_allclose(tei.similarity(TEXTS[0], TEXTS[1:]), expected, atol=1e-5)
    assert tei.similarity("a", ["a"], truncate=True)[0] == pytest.approx(1, abs=1e-6)
    assert tei.similarity("a", ["a"])[0] <= 1


def test_tokenize_and_decode(tei: TeiClient, tiny_models: dict[str, TinyModel]) -> None:
    """Tokens point into the text, and their ids lead back to it."""
    text = "The server, a text é!"
    (tokens,) = tei.tokenize(text)
    assert [token["id"] for token in tokens] == tiny_models["embed"].tokenizer.encode(text)
    assert [token["text"] for token in tokens if token["special"]] == ["[CLS]", "[SEP]"]
    inside = [token for token in tokens if not token["special"]]
    assert all(text[token["start"] : token["stop"]] == token["text"] for token in inside)
    bare = tei.tokenize([text, "a"], add_special_tokens=False)
    assert bare[0] == inside
    ids = [token["id"] for token in tei.tokenize("the server is on")[0]]
    assert tei.decode(ids) == ["the server is on"]
    assert tei.decode([ids, ids[1:2]], skip_special_tokens=False)[1] == "the"
    assert tei.decode([ids], skip_special_tokens=False)[0].startswith("[CLS]")


def test_long_texts_are_tokenised_too(tei: TeiClient) -> None:
    """Beyond what a model reads, and beyond what is done at once on the event loop."""
    assert len(tei.tokenize(["a " * 1000] * 4)[3]) == 1002


def test_info_and_health(tei: TeiClient, fake_server: Server, tasks_server: Server) -> None:
    """The model's kind and the limits; with several models, of the one that `/embed` asks, or of the one named."""
    info = TeiClient(fake_server.http).info()
    assert info["served_model_name"] == "minilm"
    assert info["model_type"] == {"embedding": {"pooling": "mean"}}
    assert info["max_input_length"] == 256
    assert {"max_concurrent_requests", "max_batch_tokens", "max_batch_requests", "tokenization_workers"} <= info.keys()
    assert tei.info()["served_model_name"] == "embed"
    labels = TeiClient(tasks_server.http, "/models/classify").info()["model_type"]["classifier"]
    assert labels["id2label"] == {"0": "calm", "1": "glad", "2": "sad"}
    assert "reranker" in TeiClient(tasks_server.http, "/models/rerank").info()["model_type"]
    assert tei.healthy()


@pytest.mark.parametrize(
    ("path", "message", "status", "kind"),
    [
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}, 400, "Empty"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["a"] * 32}}, 422, "Validation"),
        ("/tokenize", {"inputs": []}, 400, "Empty"),
        ("/tokenize", {"inputs": ["a"] * 33}, 422, "Validation"),
        # What `is_empty` of TEI's core/src/tokenization.rs says is empty, and `decode` beside it.
        ("/embed", {"inputs": ["a", ""]}, 400, "Empty"),
        ("/embed", {"inputs": [[]]}, 400, "Empty"),
        ("/predict", {"inputs": ["", ""]}, 400, "Empty"),
        ("/rerank", {"query": "", "texts": ["a", ""]}, 400, "Empty"),
        ("/similarity", {"inputs": {"source_sentence": "", "sentences": ["a"]}}, 400, "Empty"),
        ("/tokenize", {"inputs": ""}, 400, "Empty"),
        ("/decode", {"ids": [[], [1]]}, 400, "Empty"),
        ("/models/embed", {"inputs": ""}, 400, "Empty"),
        ("/models/classify", {"inputs": ""}, 400, "Empty"),
        ("/tokenize", {"inputs": "a " * 2000}, 422, "Validation"),
        ("/tokenize", {"inputs": "a", "prompt_name": "none"}, 422, "Validation"),
        ("/decode", {"ids": []}, 400, "Empty"),
        ("/decode", {"ids": [1, [2]]}, 422, "Validation"),
        ("/decode", {"ids": [-1]}, 422, "Validation"),
        ("/decode", {"ids": [[10**6]]}, 422, "Validation"),
        ("/decode", {"ids": [2**70]}, 422, "Validation"),
        ("/decode", {"ids": [1] * 3000}, 422, "Validation"),
        ("/embed", {"inputs": "a", "truncation_direction": "Up"}, 422, "Validation"),
        ("/embed", {"inputs": "a", "prompt_name": "none"}, 422, "Validation"),
        ("/models/embed/embed_all", {"inputs": "a"}, 424, "Backend"),
        ("/embed_sparse", {"inputs": "a"}, 424, "Backend"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_errors(tei: TeiClient, path: str, message: dict[str, object], status: int, kind: str) -> None:
    """Each has TEI's body and status."""
    with pytest.raises(TeiError) as refused:
        tei.post(path, **message)
    assert (refused.value.status, refused.value.error_type) == (status, kind)


def test_empty_texts(tei: TeiClient) -> None:
    """An empty text is refused in TEI's words, with a prompt too; blanks and pairs with one empty side are answered."""
    for message in ({}, {"prompt_name": "query"}):
        with pytest.raises(TeiError) as refused:
            tei.post("/embed", inputs="", **message)
        assert (refused.value.status, refused.value.error) == (400, "`inputs` cannot be empty")
    assert len(tei.post("/embed", inputs=[" "])) == 1
    assert len(tei.post("/rerank", query="", texts=["a"])) == 1
    assert len(tei.post("/predict", inputs=["a", ""])) == 3


def test_health_while_the_server_starts(serve: Callable[..., Server]) -> None:
    """It is 503 with TEI's body until the server is ready."""
    server = serve("--engine", "fake", "--fake-faults", "101:exit", "--engine-crash-limit", "1", wait_ready=False)
    statuses = set()
    while server.process.poll() is None:
        try:
            reply = get(server.http, "/health")
        except OSError:
            continue
        statuses.add(reply.status)
        if reply.status == 503:
            assert reply.json() == {"error": "unhealthy", "error_type": "Unhealthy"}
    assert statuses <= {200, 503}
    assert 503 in statuses
