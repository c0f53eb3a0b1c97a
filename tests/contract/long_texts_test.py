"""Texts of more tokens than the model takes, in windows or in chunks, beside the same model asked for each alone."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.support.clients import post_json
from tests.support.tasks import LABELS, MAX_LENGTH
from tests.support.triton_clients import TritonClient

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.server import Server

LONG = "It is a text. The server is in the text, and that is not on it for a server with text. Paris é 12! " * 8
QUERY = "what is in the text"


def ask(server: Server, path: str, **message: Any) -> Any:
    """The decoded reply to a request that is answered without cutting anything off."""
    reply = post_json(server.http, path, message)
    assert reply.status == 200, reply.body
    assert reply.headers["x-truncated-tokens"] == "0"
    return reply.json()


def spans(server: Server, text: str) -> list[tuple[int, int]]:
    """The characters of each token of a text, without special tokens."""
    tokens = post_json(server.http, "/models/classify/tokenize", {"inputs": text, "add_special_tokens": False}).json()[
        0
    ]
    return [(token["start"], token["stop"]) for token in tokens]


def cut(text: str, positions: Sequence[tuple[int, int]], step: int, size: int) -> list[str]:
    """The windows of a text that go on by `step` tokens and have `size`, as far as they are whole words."""
    starts = range(0, max(1, len(positions) - size + step), step)
    return [text[positions[at][0] : positions[min(at + size, len(positions)) - 1][1]] for at in starts]


def test_classes_of_windows(server: Server) -> None:
    """Each class has its highest or its mean probability over windows that are those texts asked alone."""
    text = "the server is in the text " * 40  # of words that are one token each, so that windows are texts
    windows = cut(text, spans(server, text), step=24, size=30)
    alone = [{e["label"]: e["score"] for e in ask(server, "/predict", inputs=window)} for window in windows]
    table = np.array([[scores[label] for label in LABELS["classify"]] for scores in alone])
    assert len(table) > 5
    for choice, expected in ((None, table.max(axis=0)), ("max", table.max(axis=0)), ("mean", table.mean(axis=0))):
        message = {"inputs": text, "long": "window", "window_tokens": 32, "window_overlap": 6, "window_scores": choice}
        found = {e["label"]: e["score"] for e in ask(server, "/predict", **message)}
        np.testing.assert_allclose([found[label] for label in LABELS["classify"]], expected, rtol=1e-4)
        if choice is not None:
            parameters = {name: value for name, value in message.items() if name != "inputs"}
            assert {
                e["label"]: e["score"] for e in ask(server, "/classify", inputs=text, parameters=parameters)[0]
            } == {label: pytest.approx(score, rel=1e-4) for label, score in found.items()}
            tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": [text]}
            reply = ask(server, "/v2/models/classify/infer", inputs=[tensor], parameters=parameters)
            np.testing.assert_allclose(reply["outputs"][0]["data"], expected, rtol=1e-4)
            np.testing.assert_allclose(over_grpc(server, text, **parameters), expected, rtol=1e-4)


def over_grpc(server: Server, text: str, **parameters: Any) -> np.ndarray[Any, Any]:
    result = TritonClient("grpc", server).infer("classify", {"text": [text]}, parameters=parameters)
    scores: np.ndarray[Any, Any] = result.as_numpy("scores")
    return scores[0]


def test_a_text_that_fits_is_answered_as_it_is(server: Server) -> None:
    """Windows change nothing where one holds the whole, special tokens, queries and pairs included."""
    text = "It is a text."
    for path, message in (
        ("/predict", {"inputs": [[text], [QUERY, text], ["the server is in " * 10, text]]}),
        ("/rerank", {"query": "the server is in " * 10, "texts": [text, "a"]}),
    ):
        assert ask(server, path, **message, long="window") == ask(server, path, **message)
    assert ask(server, "/tag", inputs=text, parameters={"long": "window"}) == ask(server, "/tag", inputs=text)


def test_a_reranker_finds_what_stands_at_the_end(server: Server) -> None:
    """A document's score is the best of its windows, each read beside the query."""
    text = "the server is in the text " * 40
    windows = cut(text, spans(server, text), step=20, size=24)
    query = "what is it"
    alone = ask(server, "/rerank", query=query, texts=windows[:32], raw_scores=True)
    wide = {"window_tokens": 24 + 3 + len(spans(server, query)), "window_overlap": 4, "raw_scores": True}
    for how, expected in (("max", max), ("mean", lambda scores: sum(scores) / len(scores))):
        message = {"query": query, "texts": [text, "a"], "long": "window", "window_scores": how, **wide}
        found = {rank["index"]: rank["score"] for rank in ask(server, "/rerank", **message)}
        assert found[0] == pytest.approx(expected([rank["score"] for rank in alone]), rel=1e-4)
        assert found[1] == pytest.approx(ask(server, "/rerank", query=query, texts=["a"], raw_scores=True)[0]["score"])


@pytest.mark.parametrize("strategy", ["first", "simple", "max"])
def test_entities_of_a_long_text(server: Server, strategy: str) -> None:
    """They stand at their offsets in the text, in its order, and none is found twice where windows overlap."""
    for overlap in (0, 7, 32):
        parameters = {"aggregation_strategy": strategy, "long": "window", "window_overlap": overlap}
        found = ask(server, "/tag", inputs=[LONG, "Paris é 12!"], parameters=parameters)
        assert found[1] == ask(server, "/tag", inputs="Paris é 12!", parameters={"aggregation_strategy": strategy})
        entities = found[0]
        assert all(LONG[entity["start"] : entity["end"]] == entity["word"] for entity in entities)
        assert max(entity["end"] for entity in entities) > len(LONG) * 0.9
        ends = [0, *(entity["end"] for entity in entities)]
        assert all(entity["start"] >= end for entity, end in zip(entities, ends, strict=False))


def test_tokens_of_windows_are_tagged_where_most_of_the_text_is_around_them(server: Server) -> None:
    """Each token of the text has exactly one tag, and its score is that of one of the windows that hold it."""
    text = "the server is in the text " * 20
    positions = spans(server, text)
    keep_all = {"aggregation_strategy": "none", "ignore_labels": []}
    windowed = {"long": "window", "window_tokens": 32, "window_overlap": 10}
    tokens = ask(server, "/tag", inputs=text, parameters=keep_all | windowed)
    assert [(token["start"], token["end"]) for token in tokens] == positions
    windows = cut(text, positions, step=20, size=30)
    alone = [ask(server, "/tag", inputs=window, parameters=keep_all) for window in windows]
    # Windows go on by 20 tokens and share 10: the first 25 tokens are the first window's, then each has 20.
    expected = [*alone[0][:25], *(token for window in alone[1:-1] for token in window[5:25]), *alone[-1][5:]]
    assert [token["entity"] for token in tokens] == [token["entity"] for token in expected]
    np.testing.assert_allclose([t["score"] for t in tokens], [t["score"] for t in expected], rtol=1e-4)


@pytest.mark.parametrize(
    ("path", "message", "words"),
    [
        (
            "/predict",
            {"inputs": "a", "long": "window", "window_tokens": MAX_LENGTH + 1},
            ["`window_tokens` is 65", "64"],
        ),
        ("/predict", {"inputs": "a", "long": "window", "window_tokens": 3}, ["`window_tokens` is 3; between 16"]),
        (
            "/predict",
            {"inputs": "a", "long": "window", "window_overlap": 33},
            ["`window_overlap` is 33; between 0", "32"],
        ),
        ("/predict", {"inputs": "a", "window_overlap": 3}, ["need `long` to be `window`"]),
        ("/rerank", {"query": "a", "texts": ["a"], "long": "windows"}, []),
        ("/predict", {"inputs": "a" * 1_000_001, "long": "window"}, ["1000001 bytes; at most 1000000"]),
    ],
    ids=["long", "short", "overlap", "not-asked", "unknown", "size"],
)
def test_windows_that_are_refused(server: Server, path: str, message: dict[str, Any], words: list[str]) -> None:
    """One sentence says what is wrong and what would be right."""
    reply = post_json(server.http, path, message)
    assert reply.status == 422
    assert all(word in reply.json()["error"] for word in words), reply.body


def test_v2_refuses_windows_of_other_tasks(server: Server) -> None:
    """An embedding is no score: long texts have chunks."""
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a"]}
    reply = post_json(server.http, "/v2/models/embed/infer", {"inputs": [tensor], "parameters": {"long": "window"}})
    assert (reply.status, "classify, rerank and tag" in reply.json()["error"]) == (400, True)
    with pytest.raises(InferenceServerException, match="`window_tokens` must be a whole number"):
        over_grpc(server, "a", long="window", window_tokens="12")


@pytest.mark.parametrize(("tokens", "overlap"), [(None, 0), (16, 0), (16, 5), (8, 0)])
def test_a_chunk_is_embedded_as_if_it_were_asked_alone(server: Server, tokens: int | None, overlap: int) -> None:
    """Chunks stand in the text's order and leave out no word of it; offsets are those of the text."""
    texts = [LONG, "a" * 200, "Paris é 12!"]
    answer = ask(server, "/embed", inputs=texts, chunk=True, chunk_tokens=tokens, chunk_overlap=overlap)
    assert len(answer) == len(texts)
    for text, chunks in zip(texts, answer, strict=True):
        words = [text[chunk["start"] : chunk["end"]] for chunk in chunks]
        alone = [ask(server, "/embed", inputs=word)[0] for word in words]
        np.testing.assert_allclose([chunk["embedding"] for chunk in chunks], alone, atol=1e-5)
        assert all(len(spans(server, word)) + 2 <= (tokens or MAX_LENGTH) for word in words)
        ends = [0, *(chunk["end"] for chunk in chunks)]
        assert all(not text[end : chunk["start"]].strip() for end, chunk in zip(ends, chunks, strict=False))
        assert not text[ends[-1] :].strip()
        if overlap and text == LONG:
            assert all(left["end"] > right["start"] for left, right in itertools.pairwise(chunks))


def test_late_chunking_means_the_vectors_of_tokens(server: Server) -> None:
    """A chunk's vector is the mean of its tokens' vectors in the whole text, special tokens at either end included."""
    text = "the server is in the text " * 8
    rows = np.array(ask(server, "/embed_all", inputs=text)[0])
    options = {"chunk": True, "chunk_tokens": 18, "late_chunking": True, "normalize": False}
    (chunks,) = ask(server, "/embed", inputs=text, **options)
    positions = spans(server, text)
    assert [(chunk["start"], chunk["end"]) for chunk in chunks] == [
        (positions[at][0], positions[at + 15][1]) for at in range(0, 48, 16)
    ]
    expected = [rows[:17].mean(axis=0), rows[17:33].mean(axis=0), rows[33:].mean(axis=0)]
    np.testing.assert_allclose([chunk["embedding"] for chunk in chunks], expected, atol=1e-4)
    ((whole,),) = ask(server, "/models/embed_tokens/embed", inputs=text, chunk=True, late_chunking=True)
    np.testing.assert_allclose(whole["embedding"], rows.mean(axis=0) / np.linalg.norm(rows.mean(axis=0)), atol=1e-5)
    (long,) = ask(server, "/embed", inputs=LONG, chunk=True, late_chunking=True)
    assert (long[0]["start"], LONG[long[-1]["end"] - 1]) == (0, "!")


@pytest.mark.parametrize(
    ("path", "message", "status", "words"),
    [
        ("/embed", {"chunk": True, "chunk_tokens": 65}, 422, "`chunk_tokens` is 65; between 8 and the model's 64"),
        ("/embed", {"chunk": True, "chunk_tokens": 7}, 422, "`chunk_tokens` is 7"),
        ("/embed", {"chunk": True, "chunk_overlap": 33}, 422, "`chunk_overlap` is 33; between 0 and half a chunk, 32"),
        ("/embed", {"chunk_tokens": 16}, 422, "need `chunk` to be true"),
        ("/embed", {"chunk": True, "inputs": [[1, 2]]}, 422, "each input must be one text"),
        ("/embed", {"chunk": True, "chunk_tokens": 8, "inputs": "text " * 6100}, 422, "more than 1000 chunks"),
        ("/models/embed/embed", {"chunk": True, "late_chunking": True}, 424, "--task embed_tokens"),
    ],
    ids=["long", "short", "overlap", "not-asked", "ids", "many", "late"],
)
def test_chunks_that_are_refused(server: Server, path: str, message: dict[str, Any], status: int, words: str) -> None:
    """One sentence says what is wrong and what would be right."""
    reply = post_json(server.http, path, {"inputs": "a", **message})
    assert (reply.status, words in reply.json()["error"]) == (status, True), reply.body


@pytest.fixture
def server(tasks_server: Server) -> Server:
    return tasks_server
