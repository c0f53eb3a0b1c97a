"""Every route of text-embeddings-inference as its API describes it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support.clients import ask, get, post_json
from tests.support.expected import cosines
from tests.support.server import FAKE, SLOW_ENGINES

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.server import Server
    from tests.support.tasks import TinyModel


TEXTS = ["the server", "It is a text, and not on the server.", "a"]
LONG = "the server is " * 40 + "a text"
CLOSE = 1e-6
HEADERS = (
    *("x-compute-time", "x-compute-characters", "x-compute-tokens"),
    *("x-total-time", "x-tokenization-time", "x-queue-time", "x-inference-time"),
)


@pytest.fixture
def tei(tasks_server: Server) -> Callable[..., Any]:
    return partial(ask, tasks_server)


def refusal(server: Server, path: str, **message: Any) -> tuple[int, str, str]:
    """Status, type and sentence of a refusal in TEI's shape."""
    reply = post_json(server.http, path, message)
    assert reply.json().keys() == {"error", "error_type"}
    return reply.status, reply.json()["error_type"], reply.json()["error"]


@pytest.mark.parametrize(
    ("path", "message", "counted"),
    [
        ("/embed", {"inputs": "the server"}, ["the server"]),
        ("/embed", {"inputs": TEXTS}, TEXTS),
        ("/rerank", {"query": "the server", "texts": TEXTS}, ["the server", *TEXTS]),
    ],
    ids=["text", "texts", "query and texts"],
)
def test_headers(tasks_server: Server, path: str, message: dict[str, Any], counted: list[str]) -> None:
    """Whole numbers tell what was computed and how long it took."""
    headers = post_json(tasks_server.http, path, message).headers
    assert all(headers[name].isdigit() for name in HEADERS)
    assert (headers["x-compute-type"], headers["x-compute-characters"]) == ("cpu", str(sum(map(len, counted))))


@pytest.mark.parametrize("direction", ["Right", "Left"])
def test_truncation_cuts_the_end_or_the_beginning(
    tei: Callable[..., Any], tasks_server: Server, direction: str
) -> None:
    """`Right` keeps the beginning of a text, `Left` its end; neither is done where `truncate` is false."""
    (tokens,) = tei("/tokenize", inputs=LONG)
    ids = [token["id"] for token in tokens]
    expected = tei("/embed", inputs=[[*ids[:63], ids[-1]] if direction == "Right" else [ids[0], *ids[-63:]]])
    for written in ({"truncation_direction": direction}, {"truncation_direction": direction.lower(), "truncate": True}):
        np.testing.assert_allclose(tei("/embed", inputs=LONG, **written), expected, atol=CLOSE)
    whole = {"inputs": LONG, "truncation_direction": direction, "truncate": False}
    assert refusal(tasks_server, "/embed", **whole)[:2] == (422, "Validation")
    scores = [
        tei("/predict", inputs=LONG, raw_scores=True, **more) for more in ({}, {"truncation_direction": direction})
    ]
    assert (scores[0] == scores[1]) is (direction == "Right")


def test_truncate_left_follows_the_servers_default(serve: Callable[..., Server]) -> None:
    """Where a request does not say whether to cut, `auto_truncate` does."""
    server = serve(*FAKE, "--auto-truncate", "false")
    message = {"inputs": "server " * 300, "truncation_direction": "Left"}
    assert "tokens" in refusal(server, "/embed", **message)[2]
    assert len(ask(server, "/embed", **message, truncate=True)) == 1


def test_similarity(tei: Callable[..., Any]) -> None:
    """The cosines of the vectors of `/embed`."""
    vectors = np.array(tei("/embed", inputs=TEXTS))
    expected = cosines(np.repeat(vectors[:1], 2, axis=0), vectors[1:])
    np.testing.assert_allclose(
        tei("/similarity", inputs={"source_sentence": TEXTS[0], "sentences": TEXTS[1:]}), expected, atol=1e-5
    )
    same = {"source_sentence": "a", "sentences": ["a"]}
    assert tei("/similarity", inputs=same, parameters={"truncate": True})[0] == pytest.approx(1, abs=1e-6)
    assert tei("/similarity", inputs=same)[0] <= 1


def test_tokenize_and_decode(tei: Callable[..., Any], tiny_models: dict[str, TinyModel]) -> None:
    """Tokens point into the text, and their ids lead back to it."""
    text = "The server, a text é!"
    (tokens,) = tei("/tokenize", inputs=text)
    assert [token["id"] for token in tokens] == tiny_models["embed"].tokenizer.encode(text)
    assert [token["text"] for token in tokens if token["special"]] == ["[CLS]", "[SEP]"]
    assert all((token["start"] is None) == (token["stop"] is None) == token["special"] for token in tokens)
    inside = [token for token in tokens if not token["special"]]
    assert all(text[token["start"] : token["stop"]] == token["text"] for token in inside)
    bare = tei("/tokenize", inputs=[text, "a"], add_special_tokens=False)
    assert bare[0] == inside
    ids = [token["id"] for token in tei("/tokenize", inputs="the server is on")[0]]
    assert tei("/decode", ids=ids) == ["the server is on"]
    assert tei("/decode", ids=[ids, ids[1:2]], skip_special_tokens=False)[1] == "the"
    assert tei("/decode", ids=[ids], skip_special_tokens=False)[0].startswith("[CLS]")


def test_long_texts_are_tokenised_too(tei: Callable[..., Any]) -> None:
    """Beyond what a model reads, and beyond what is done at once on the event loop."""
    assert len(tei("/tokenize", inputs=["a " * 1000] * 4)[3]) == 1002


def test_info_and_health(fake_server: Server, tasks_server: Server) -> None:
    """The model's kind and the limits; with several models, of the one that `/embed` asks, or of the one named."""
    info = get(fake_server.http, "/info").json()
    assert info["served_model_name"] == "minilm"
    assert info["model_type"] == {"embedding": {"pooling": "mean"}}
    assert info["max_input_length"] == 256
    assert {"max_concurrent_requests", "max_batch_tokens", "max_batch_requests", "tokenization_workers"} <= info.keys()
    assert get(tasks_server.http, "/info").json()["served_model_name"] == "embed"
    labels = get(tasks_server.http, "/models/classify/info").json()["model_type"]["classifier"]
    assert labels["id2label"] == {"0": "calm", "1": "glad", "2": "sad"}
    assert "reranker" in get(tasks_server.http, "/models/rerank/info").json()["model_type"]
    sparse = get(tasks_server.http, "/models/embed_sparse/info").json()["model_type"]
    assert sparse == {"embedding": {"pooling": "splade"}}
    health = get(tasks_server.http, "/health")
    assert (health.status, health.body) == (200, b"")


@pytest.mark.parametrize(
    ("path", "message", "status", "kind"),
    [
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}, 400, "Empty"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["a"] * 2048}}, 422, "Validation"),
        ("/tokenize", {"inputs": []}, 400, "Empty"),
        ("/tokenize", {"inputs": ["a"] * 2049}, 422, "Validation"),
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
        ("/models/embed/embed_sparse", {"inputs": "a"}, 424, "Backend"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_errors(tasks_server: Server, path: str, message: dict[str, object], status: int, kind: str) -> None:
    """Each has TEI's body and status."""
    assert refusal(tasks_server, path, **message)[:2] == (status, kind)


def test_empty_texts(tei: Callable[..., Any], tasks_server: Server) -> None:
    """An empty text is refused in TEI's words, with a prompt too; blanks and pairs with one empty side are answered."""
    for message in ({}, {"prompt_name": "query"}):
        assert refusal(tasks_server, "/embed", inputs="", **message) == (400, "Empty", "`inputs` cannot be empty")
    assert len(tei("/embed", inputs=[" "])) == 1
    assert len(tei("/rerank", query="", texts=["a"])) == 1
    assert len(tei("/predict", inputs=["a", ""])) == 3


def test_health_while_the_server_starts(serve: Callable[..., Server]) -> None:
    """It is 503 with TEI's body until the server is ready."""
    fails = ("--engine", "fake", "--fake-faults", "101:exit")
    server = serve(*fails, env=SLOW_ENGINES, cold=True, wait_ready=False)
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
