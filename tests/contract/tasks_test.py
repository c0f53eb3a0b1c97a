"""Every task over HTTP, long texts included: a small random model of each, one server, and PyTorch's own answers."""

from __future__ import annotations

import itertools
import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers
from tritonclient.utils import InferenceServerException

from tests.support.clients import get, metric, post_json
from tests.support.pipelines import pipeline_answers
from tests.support.server import Server, measured
from tests.support.tasks import CANDIDATES, LABELS, MAX_LENGTH, TinyModel, write_bundle
from tests.support.triton_clients import TritonClient

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


TEXTS = ["the server", "It is a text, and not on the server.", "Paris é 12!", "a"]
CONTEXT = "It is a text. The server is in the text, and that is not on it for a server with text."
QUESTION = "what is in the text"
CLOSE = 1e-4


@pytest.fixture
def tiny(tiny_models: dict[str, TinyModel]) -> dict[str, TinyModel]:
    return tiny_models


@pytest.fixture
def server(tasks_server: Server) -> Server:
    return tasks_server


def ask(server: Server, path: str, **message: Any) -> Any:
    reply = post_json(server.http, path, message)
    assert reply.status == 200, reply.body
    assert reply.headers["server-timing"].startswith("tokenize;dur=")
    return reply.json()


def logits(model: TinyModel, *parts: str) -> torch.Tensor:
    with torch.inference_mode():
        return model.model(**model.tokenizer(*parts, return_tensors="pt")).logits[0]


def same(found: list[dict[str, Any]], expected: list[dict[str, Any]], *keys: str) -> None:
    """Checks that two lists of results agree, their scores within what float32 allows."""
    assert [[entry[key] for key in keys] for entry in found] == [[entry[key] for key in keys] for entry in expected]
    np.testing.assert_allclose([e["score"] for e in found], [e["score"] for e in expected], rtol=CLOSE, atol=1e-6)


def test_predict_is_what_transformers_says(server: Server, tiny: dict[str, TinyModel]) -> None:
    """`/predict` gives the labels and scores of the text-classification pipeline, best first."""
    pipeline = transformers.TextClassificationPipeline(
        model=tiny["classify"].model, tokenizer=tiny["classify"].tokenizer
    )
    for text in TEXTS:
        same(ask(server, "/predict", inputs=text), pipeline(text, top_k=None), "label")


def test_predict_takes_pairs_and_batches(server: Server, tiny: dict[str, TinyModel]) -> None:
    """A list of two texts is one pair; a list of lists is a batch, answered in its order."""
    pair = ["the server", "a text"]
    expected = torch.softmax(logits(tiny["classify"], *pair), -1)
    found = {entry["label"]: entry["score"] for entry in ask(server, "/predict", inputs=pair)}
    np.testing.assert_allclose([found[label] for label in LABELS["classify"]], expected, rtol=CLOSE)
    alone = ask(server, "/predict", inputs="the server")
    same(ask(server, "/predict", inputs=[["the server"]])[0], alone, "label")
    first, second = ask(server, "/predict", inputs=[["the server"], pair])
    same(first, alone, "label")
    assert {entry["label"]: pytest.approx(entry["score"], rel=CLOSE) for entry in second} == found


def test_predict_raw_scores(server: Server, tiny: dict[str, TinyModel]) -> None:
    """The logits themselves, where asked."""
    found = {e["label"]: e["score"] for e in ask(server, "/predict", inputs="the server", raw_scores=True)}
    expected = logits(tiny["classify"], "the server")
    np.testing.assert_allclose([found[label] for label in LABELS["classify"]], expected, rtol=CLOSE, atol=CLOSE)


def test_rerank_orders_texts_by_the_models_score(server: Server, tiny: dict[str, TinyModel]) -> None:
    """Each text has PyTorch's score beside the query, the best comes first, and `index` leads back."""
    exact = [float(logits(tiny["rerank"], QUESTION, text)[0]) for text in TEXTS]
    order = sorted(range(len(TEXTS)), key=lambda index: -exact[index])
    raw = ask(server, "/rerank", query=QUESTION, texts=TEXTS, raw_scores=True, return_text=True)
    assert [(entry["index"], entry["text"]) for entry in raw] == [(index, TEXTS[index]) for index in order]
    np.testing.assert_allclose([entry["score"] for entry in raw], [exact[i] for i in order], rtol=CLOSE, atol=CLOSE)
    plain = ask(server, "/rerank", query=QUESTION, texts=TEXTS)
    assert all(entry.keys() == {"index", "score"} for entry in plain)
    expected = [1 / (1 + np.exp(-exact[i])) for i in order]
    np.testing.assert_allclose([entry["score"] for entry in plain], expected, rtol=CLOSE)


def test_answer_is_what_transformers_says(server: Server, tiny: dict[str, TinyModel]) -> None:
    """The answers of the question-answering pipeline: their characters, order and scores, also in a long context."""
    for context in (CONTEXT, "a of and " * 40 + CONTEXT, f"{CONTEXT} {QUESTION}; " * 6):
        for parameters in (
            {},
            {"top_k": 5, "handle_impossible_answer": True},
            {"top_k": 3, "max_answer_len": 2, "doc_stride": 5},
            {"top_k": 4, "align_to_words": False},
        ):
            inputs = {"question": QUESTION, "context": context}
            found = ask(server, "/answer", inputs=inputs, parameters=parameters)
            expected = pipeline_answers(tiny["answer"], QUESTION, context, **parameters)
            assert [(one["start"], one["end"]) for one in (found if isinstance(found, list) else [found])] == [
                (one["start"], one["end"]) for one in expected
            ]
            same(found if isinstance(found, list) else [found], expected, "answer", "start", "end")


def test_all_that_there_are(server: Server, tiny: dict[str, TinyModel]) -> None:
    """A `top_k` above the number of labels, answers or candidates returns all of them, as the pipelines do."""
    many = {"top_k": 1000}
    classes = transformers.TextClassificationPipeline(
        model=tiny["classify"].model, tokenizer=tiny["classify"].tokenizer
    )
    (found,) = ask(server, "/classify", inputs=QUESTION, parameters=many)
    same(found, classes(QUESTION, **many), "label")
    answers = ask(server, "/answer", inputs={"question": QUESTION, "context": CONTEXT}, parameters=many)
    expected = pipeline_answers(tiny["answer"], QUESTION, CONTEXT, **many)
    assert len(expected) > 100
    scores = {(one["start"], one["end"]): pytest.approx(one["score"], rel=CLOSE, abs=1e-6) for one in expected}
    assert {(one["start"], one["end"]): one["score"] for one in answers} == scores
    masks = transformers.FillMaskPipeline(model=tiny["fill_mask"].model, tokenizer=tiny["fill_mask"].tokenizer)
    filled = ask(server, "/fill-mask", inputs="the [MASK] is on", parameters=many)
    same(filled, masks("the [MASK] is on", top_k=CANDIDATES), "token", "sequence")


def test_answer_shapes(server: Server) -> None:
    """One question is answered by an object, or by a list where several answers are wanted; a list by a list."""
    question = {"question": QUESTION, "context": CONTEXT}
    one = ask(server, "/answer", inputs=question)
    several = ask(server, "/answer", inputs=question, parameters={"top_k": 3})
    assert one.keys() == {"answer", "score", "start", "end"}
    assert len(several) == 3
    assert several[0] == one
    assert ask(server, "/answer", inputs=[question, question]) == [one, one]


def test_a_long_context_is_read_to_its_end(server: Server) -> None:
    """What a short context answers is still found behind more than the model reads at once; nothing is cut."""
    filler = "a of and " * MAX_LENGTH
    for context in (CONTEXT + filler, filler + CONTEXT):
        message = {"inputs": {"question": QUESTION, "context": context}, "parameters": {"top_k": 100}}
        reply = post_json(server.http, "/answer", message)
        assert reply.status == 200
        assert int(reply.headers["x-compute-tokens"]) > 3 * MAX_LENGTH
        assert reply.headers["x-truncated-tokens"] == "0"
        spans = reply.json()
        assert all(context[span["start"] : span["end"]] == span["answer"] for span in spans)
    assert max(span["end"] for span in spans) > len(filler)


def test_no_answer(server: Server) -> None:
    """A blank context has no answer, and with the parameter the server says how sure it is of that."""
    message = {"question": QUESTION, "context": " "}
    assert ask(server, "/answer", inputs=message) == {"answer": "", "score": 0.0, "start": 0, "end": 0}
    sure = ask(server, "/answer", inputs=message, parameters={"handle_impossible_answer": True})
    assert sure == {"answer": "", "score": 1.0, "start": 0, "end": 0}


@pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tag_is_what_transformers_says(server: Server, tiny: dict[str, TinyModel], strategy: str) -> None:
    """`/tag` finds the entities of the token-classification pipeline, in the text's own characters."""
    pipeline = transformers.TokenClassificationPipeline(model=tiny["tag"].model, tokenizer=tiny["tag"].tokenizer)
    for text in (*TEXTS, CONTEXT):
        found = ask(server, "/tag", inputs=text, parameters={"aggregation_strategy": strategy})
        keys = ("entity", "index", "word") if strategy == "none" else ("entity_group",)
        same(found, pipeline(text, aggregation_strategy=strategy), *keys, "start", "end")
        assert strategy == "none" or all(text[entity["start"] : entity["end"]] == entity["word"] for entity in found)


def test_fill_mask_is_what_transformers_says(server: Server, tiny: dict[str, TinyModel]) -> None:
    """`/fill-mask` gives the tokens, texts and probabilities of the fill-mask pipeline, for one mask and several."""
    pipeline = transformers.FillMaskPipeline(model=tiny["fill_mask"].model, tokenizer=tiny["fill_mask"].tokenizer)
    keys = ("token", "token_str", "sequence")
    same(ask(server, "/fill-mask", inputs="the [MASK] is on"), pipeline("the [MASK] is on"), *keys)
    several = "[MASK] is [MASK], it"
    found = ask(server, "/fill-mask", inputs=several, parameters={"top_k": 2})
    for row, expected in zip(found, pipeline(several, top_k=2), strict=True):
        same(row, expected, *keys)


BATCHES: list[tuple[str, list[Any]]] = [
    ("/classify", TEXTS),
    ("/tag", [*TEXTS, CONTEXT]),
    ("/fill-mask", ["[MASK]", "the [MASK] is on", "[MASK] and [MASK] on [MASK]"]),
    ("/answer", [{"question": QUESTION, "context": context} for context in ("it is on", CONTEXT, CONTEXT * 4)]),
]


@pytest.mark.parametrize(("path", "inputs"), BATCHES)
def test_a_batch_is_answered_as_each_input_alone(server: Server, path: str, inputs: list[Any]) -> None:
    """Neighbours of other lengths change nothing, and results stand in the order of the inputs."""
    together = json.dumps(ask(server, path, inputs=inputs), sort_keys=True)
    alone = [ask(server, path, inputs=value) for value in inputs]
    if path == "/classify":
        alone = [result[0] for result in alone]
    assert json.loads(together) == _approximately(alone)


@pytest.mark.slow
def test_every_task_answers_the_same_from_the_cache(server: Server, tasks_repository: Path) -> None:
    """What was computed in a batch, with padding, serves each input alone, and other options of the same text."""
    asked: list[tuple[str, dict[str, Any]]] = []
    for path, inputs in (*BATCHES, ("/embed", TEXTS), ("/embed_all", TEXTS)):
        asked += [(path, {"inputs": value}) for value in (inputs, *inputs)]
    asked += [
        ("/predict", {"inputs": CONTEXT * 4, "long": "window"}),
        ("/tag", {"inputs": CONTEXT * 4, "parameters": {"long": "window"}}),
        ("/predict", {"inputs": TEXTS[0], "raw_scores": True}),
        ("/tag", {"inputs": CONTEXT, "parameters": {"aggregation_strategy": "none"}}),
        ("/rerank", {"query": QUESTION, "texts": TEXTS}),
        ("/rerank", {"query": QUESTION, "texts": TEXTS, "raw_scores": True}),
        ("/embed", {"inputs": TEXTS[1], "normalize": False, "dimensions": 8}),
        ("/embed", {"inputs": CONTEXT, "chunk": True, "chunk_tokens": 12, "chunk_overlap": 4}),
        ("/models/embed_tokens/embed", {"inputs": CONTEXT, "chunk": True, "late_chunking": True, "chunk_tokens": 12}),
    ]
    with Server(tasks_repository, *measured(tasks_repository), "--response-cache-mb", "8") as cached:
        for path, message in asked:
            first, second = (post_json(cached.http, path, message) for _ in range(2))
            assert first.body == second.body
            assert second.headers["x-cache"] == "hit"
            assert second.json() == _approximately(ask(server, path, **message))


def _approximately(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _approximately(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_approximately(part) for part in value]
    return pytest.approx(value, rel=CLOSE, abs=1e-6) if isinstance(value, float) else value


ASKED = {"question": "x", "context": "y"}
MANY_SPANS = {"question": "x", "context": "y " * 9000}
WRONG = {
    "no class at all": ("/classify", {"inputs": "x", "parameters": {"top_k": 0}}, 422),
    "unknown function": ("/classify", {"inputs": "x", "parameters": {"function_to_apply": "relu"}}, 422),
    "unsupported parameter": ("/tag", {"inputs": "x", "parameters": {"truncation": False}}, 422),
    "no inputs": ("/tag", {"inputs": []}, 400),
    "too many inputs": ("/tag", {"inputs": ["x"] * 2049}, 422),
    "too long": ("/tag", {"inputs": "is " * MAX_LENGTH, "parameters": {"truncate": False}}, 422),
    "no mask": ("/fill-mask", {"inputs": "x"}, 422),
    "windows too short": ("/answer", {"inputs": ASKED, "parameters": {"max_seq_len": 8}}, 422),
    "no model of inference": ("/classify", {"inputs": "x", "parameters": {"candidate_labels": ["a"]}}, 400),
    "labels of nothing": ("/classify", {"inputs": "x", "parameters": {"candidate_labels": []}}, 400),
    "no target": ("/fill-mask", {"inputs": "[MASK]", "parameters": {"targets": []}}, 422),
    "too many targets": ("/fill-mask", {"inputs": "[MASK]", "parameters": {"targets": ["a"] * 9}}, 422),
    "no context": ("/answer", {"inputs": {"question": "x"}}, 422),
    "too many answers": ("/answer", {"inputs": MANY_SPANS, "parameters": {"top_k": 2000}}, 422),
    "no answer at all": ("/answer", {"inputs": ASKED, "parameters": {"top_k": 0}}, 422),
    "an answer of nothing": ("/answer", {"inputs": ASKED, "parameters": {"max_answer_len": 0}}, 422),
    "a negative overlap": ("/answer", {"inputs": ASKED, "parameters": {"doc_stride": -1}}, 422),
    "a stride of tokens": ("/tag", {"inputs": "x", "parameters": {"stride": 4, "aggregation_strategy": "none"}}, 422),
    "a stride and windows": ("/tag", {"inputs": "x", "parameters": {"stride": 4, "long": "window"}}, 422),
    "three texts": ("/predict", {"inputs": ["a", "b", "c"]}, 422),
    "texts and lists": ("/predict", {"inputs": ["a", ["b"]]}, 422),
    "an empty pair": ("/predict", {"inputs": [[]]}, 422),
    "nothing to classify": ("/predict", {"inputs": []}, 400),
    "no texts": ("/rerank", {"query": "x", "texts": []}, 400),
    # Transformers 4's pipeline: "`context` cannot be empty", "`question` cannot be empty".
    "empty context": ("/answer", {"inputs": {"question": "x", "context": ""}}, 400),
    "empty question": ("/answer", {"inputs": [{"question": "", "context": "x"}]}, 400),
    "no query": ("/rerank", {"texts": ["x"]}, 422),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_requests(server: Server, case: str) -> None:
    """What breaks the schema or a limit is refused in the error body of its protocol, and the next is answered."""
    path, message, status = WRONG[case]
    reply = post_json(server.http, path, message)
    assert reply.status == status, reply.body
    error = reply.json()["error"]
    if path in {"/predict", "/rerank"}:
        assert reply.json()["error_type"] == ("Empty" if status == 400 else "Validation")
    else:
        assert error["reason"] in {"invalid_request", "empty_input", "wrong_task"}
    ask(server, "/predict", inputs="the server")


def test_a_model_of_another_task(fake_server: Server, server: Server) -> None:
    """Where no model does what is asked the reply says so, and how to export one that makes vectors of tokens."""
    asked_here = ((server, "/models/embed/embed_all"), (server, "/models/embed/embed_sparse"))
    for asked, path in ((fake_server, "/embed_all"), (fake_server, "/embed_sparse"), *asked_here):
        reply = post_json(asked.http, path, {"inputs": "x"})
        assert (reply.status, reply.json()["error_type"]) == (424, "Backend")
        assert ("bertserve export MODEL --task embed_tokens" in reply.json()["error"]) is path.endswith("all")
        assert ("or bge-m3 without --task" in reply.json()["error"]) is path.endswith("all")


def test_vectors_of_tokens_are_what_transformers_says(server: Server, tiny: dict[str, TinyModel]) -> None:
    """The last hidden state of every token, the special ones included, of texts of any length, also all at once."""
    model = tiny["embed_tokens"]
    texts = [" ", "the server", "a text that is not in it", "of the and to a text " * 4, "it is the server " * 30]
    found = ask(server, "/embed_all", inputs=texts * 6)
    assert len(found) == len(texts) * 6
    for text, vectors in zip(texts * 6, found, strict=True):
        encoded = model.tokenizer(text, truncation=True, return_tensors="pt")
        with torch.inference_mode():
            expected = model.model(**encoded).last_hidden_state[0]
        np.testing.assert_allclose(vectors, expected, atol=1e-4)


def test_vectors_of_tokens_by_ids(server: Server, tiny: dict[str, TinyModel]) -> None:
    """Token ids go to the model as they come, and a text alone is a list of one."""
    ids = tiny["embed_tokens"].tokenizer("the server").input_ids
    (by_text,) = ask(server, "/embed_all", inputs="the server")
    (by_ids,) = ask(server, "/embed_all", inputs=[ids])
    assert len(by_ids) == len(ids)
    np.testing.assert_allclose(by_ids, by_text, atol=1e-6)
    reply = post_json(server.http, "/embed_all", {"inputs": "it is the server " * 30, "truncate": False})
    assert (reply.status, reply.json()["error_type"]) == (422, "Validation")


def test_embeddings_beside_other_tasks(server: Server, tiny: dict[str, TinyModel]) -> None:
    """The routes for vectors find the only model that makes them; its name still works."""
    with torch.inference_mode():
        encoded = tiny["embed"].tokenizer("the server", return_tensors="pt")
        vector = torch.nn.functional.normalize(tiny["embed"].model(**encoded).last_hidden_state[:, 0])[0]
    by_openai = ask(server, "/v1/embeddings", input="the server", model="any name")
    for numbers in (ask(server, "/embed", inputs="the server")[0], by_openai["data"][0]["embedding"]):
        np.testing.assert_allclose(numbers, vector, atol=1e-5)


def test_metrics_count_tasks_as_requests(server: Server) -> None:
    """A question is one text, however many windows its context has."""
    before = get(server.http, "/status").json()["totals"]["texts"]
    ask(server, "/answer", inputs={"question": QUESTION, "context": CONTEXT * 10})
    assert get(server.http, "/status").json()["totals"]["texts"] == before + 1
    assert metric(server, "bertserve_admitted_tokens") == 0


def test_an_unproven_model_is_served_only_when_told_so(tiny: dict[str, TinyModel], tmp_path: Path) -> None:
    """Without the setting the server does not start and says what to do; with it, it says that it is degraded."""
    write_bundle(tmp_path, tiny["tag"], proven=False)
    with pytest.raises(AssertionError, match=r"model\.fp32\.onnx is not proven.*allow-unproven"):
        Server(tmp_path).__enter__()
    with Server(tmp_path, "--allow-unproven", "true") as server:
        assert get(server.http, "/readyz").json() == {"state": "degraded"}
        assert get(server.http, "/readyz").status == 200
        assert metric(server, "bertserve_state", state="degraded") == 1
        assert metric(server, "bertserve_model_unproven", model="tag", version="1") == 1
        ask(server, "/tag", inputs="the server")


LONG = "It is a text. The server is in the text, and that is not on it for a server with text. Paris é 12! " * 8
QUERY = "what is in the text"


def ask_whole(server: Server, path: str, **message: Any) -> Any:
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
    alone = [{e["label"]: e["score"] for e in ask_whole(server, "/predict", inputs=window)} for window in windows]
    table = np.array([[scores[label] for label in LABELS["classify"]] for scores in alone])
    assert len(table) > 5
    for choice, expected in ((None, table.max(axis=0)), ("max", table.max(axis=0)), ("mean", table.mean(axis=0))):
        message = {"inputs": text, "long": "window", "window_tokens": 32, "window_overlap": 6, "window_scores": choice}
        found = {e["label"]: e["score"] for e in ask_whole(server, "/predict", **message)}
        np.testing.assert_allclose([found[label] for label in LABELS["classify"]], expected, rtol=1e-4)
        if choice is not None:
            parameters = {name: value for name, value in message.items() if name != "inputs"}
            assert {
                e["label"]: e["score"] for e in ask_whole(server, "/classify", inputs=text, parameters=parameters)[0]
            } == {label: pytest.approx(score, rel=1e-4) for label, score in found.items()}
            tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": [text]}
            reply = ask_whole(server, "/v2/models/classify/infer", inputs=[tensor], parameters=parameters)
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
        assert ask_whole(server, path, **message, long="window") == ask_whole(server, path, **message)
    assert ask_whole(server, "/tag", inputs=text, parameters={"long": "window"}) == ask_whole(
        server, "/tag", inputs=text
    )


def test_a_reranker_finds_what_stands_at_the_end(server: Server) -> None:
    """A document's score is the best of its windows, each read beside the query."""
    text = "the server is in the text " * 40
    windows = cut(text, spans(server, text), step=20, size=24)
    query = "what is it"
    alone = ask_whole(server, "/rerank", query=query, texts=windows[:32], raw_scores=True)
    wide = {"window_tokens": 24 + 3 + len(spans(server, query)), "window_overlap": 4, "raw_scores": True}
    for how, expected in (("max", max), ("mean", lambda scores: sum(scores) / len(scores))):
        message = {"query": query, "texts": [text, "a"], "long": "window", "window_scores": how, **wide}
        found = {rank["index"]: rank["score"] for rank in ask_whole(server, "/rerank", **message)}
        assert found[0] == pytest.approx(expected([rank["score"] for rank in alone]), rel=1e-4)
        assert found[1] == pytest.approx(
            ask_whole(server, "/rerank", query=query, texts=["a"], raw_scores=True)[0]["score"]
        )


@pytest.mark.parametrize("strategy", ["first", "simple", "max"])
def test_entities_of_a_long_text(server: Server, strategy: str) -> None:
    """They stand at their offsets in the text, in its order, and none is found twice where windows overlap."""
    for overlap in (0, 7, 32):
        parameters = {"aggregation_strategy": strategy, "long": "window", "window_overlap": overlap}
        found = ask_whole(server, "/tag", inputs=[LONG, "Paris é 12!"], parameters=parameters)
        assert found[1] == ask_whole(
            server, "/tag", inputs="Paris é 12!", parameters={"aggregation_strategy": strategy}
        )
        entities = found[0]
        assert all(LONG[entity["start"] : entity["end"]] == entity["word"] for entity in entities)
        assert max(entity["end"] for entity in entities) > len(LONG) * 0.9
        ends = [0, *(entity["end"] for entity in entities)]
        assert all(entity["start"] >= end for entity, end in zip(entities, ends, strict=False))


@pytest.mark.parametrize("stride", [0, 16, 42])
def test_entities_by_a_stride(server: Server, tiny: dict[str, TinyModel], stride: int) -> None:
    """They are the pipeline's, also where windows share more than half; a longer stride is refused by its name."""
    pipeline = transformers.TokenClassificationPipeline(model=tiny["tag"].model, tokenizer=tiny["tag"].tokenizer)
    options = {"aggregation_strategy": "simple", "stride": stride}
    same(
        ask(server, "/tag", inputs=LONG, parameters=options), pipeline(LONG, **options), "entity_group", "start", "end"
    )
    refused = post_json(server.http, "/tag", {"inputs": LONG, "parameters": {"stride": 43}})
    assert "`stride` is 43; it must be 0 to 42, two thirds of a window" in str(refused.json())


def test_tokens_of_windows_are_tagged_where_most_of_the_text_is_around_them(server: Server) -> None:
    """Each token of the text has exactly one tag, and its score is that of one of the windows that hold it."""
    text = "the server is in the text " * 20
    positions = spans(server, text)
    keep_all = {"aggregation_strategy": "none", "ignore_labels": []}
    windowed = {"long": "window", "window_tokens": 32, "window_overlap": 10}
    tokens = ask_whole(server, "/tag", inputs=text, parameters=keep_all | windowed)
    assert [(token["start"], token["end"]) for token in tokens] == positions
    windows = cut(text, positions, step=20, size=30)
    alone = [ask_whole(server, "/tag", inputs=window, parameters=keep_all) for window in windows]
    # Windows go on by 20 tokens and share 10: the first 25 tokens are the first window's, then each has 20.
    expected = [*alone[0][:25], *(token for window in alone[1:-1] for token in window[5:25]), *alone[-1][5:]]
    assert [token["entity"] for token in tokens] == [token["entity"] for token in expected]
    np.testing.assert_allclose([t["score"] for t in tokens], [t["score"] for t in expected], rtol=1e-4)


TOO_LARGE = {"inputs": "a" * 1_000_001}
PARTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "long window": ("/predict", {"window_tokens": MAX_LENGTH + 1}, "`window_tokens` is 65; .*64"),
    "short window": ("/predict", {"window_tokens": 3}, "`window_tokens` is 3; it must be 16"),
    "overlap of windows": ("/predict", {"window_overlap": 33}, "`window_overlap` is 33; it must be 0 to 32"),
    "windows not asked for": ("/predict", {"long": None, "window_overlap": 3}, "need `long` to be `window`"),
    "unknown way": ("/rerank", {"inputs": None, "query": "a", "texts": ["a"], "long": "windows"}, ""),
    "size": ("/predict", TOO_LARGE, "1000001 bytes; at most 1000000"),
    "long chunk": ("/embed", {"chunk_tokens": 65}, "`chunk_tokens` is 65; it must be 8 to 64"),
    "short chunk": ("/embed", {"chunk_tokens": 7}, "`chunk_tokens` is 7"),
    "overlap of chunks": ("/embed", {"chunk_overlap": 33}, "`chunk_overlap` is 33; it must be 0 to 32"),
    "chunks not asked for": ("/embed", {"chunk": None, "chunk_tokens": 16}, "need `chunk` to be true"),
    "ids": ("/embed", {"inputs": [[1, 2]]}, "each input must be one text"),
    "many chunks": ("/embed", {"chunk_tokens": 8, "inputs": "text " * 6100}, "more than 1000 chunks"),
    "late chunks": ("/models/embed/embed", {"late_chunking": True}, "--task embed_tokens"),
}


@pytest.mark.parametrize("case", PARTS)
def test_windows_and_chunks_that_are_refused(server: Server, case: str) -> None:
    """One sentence says what is wrong and what would be right."""
    path, change, words = PARTS[case]
    message = {"inputs": "a", **({"chunk": True} if path.endswith("embed") else {"long": "window"}), **change}
    reply = post_json(server.http, path, {name: value for name, value in message.items() if value is not None})
    assert reply.status == (424 if case == "late chunks" else 422)
    assert re.search(words, reply.json()["error"]), reply.body


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
    answer = ask_whole(server, "/embed", inputs=texts, chunk=True, chunk_tokens=tokens, chunk_overlap=overlap)
    assert len(answer) == len(texts)
    for text, chunks in zip(texts, answer, strict=True):
        words = [text[chunk["start"] : chunk["end"]] for chunk in chunks]
        alone = [ask_whole(server, "/embed", inputs=word)[0] for word in words]
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
    rows = np.array(ask_whole(server, "/embed_all", inputs=text)[0])
    options = {"chunk": True, "chunk_tokens": 18, "late_chunking": True, "normalize": False}
    (chunks,) = ask_whole(server, "/embed", inputs=text, **options)
    positions = spans(server, text)
    assert [(chunk["start"], chunk["end"]) for chunk in chunks] == [
        (positions[at][0], positions[at + 15][1]) for at in range(0, 48, 16)
    ]
    expected = [rows[:17].mean(axis=0), rows[17:33].mean(axis=0), rows[33:].mean(axis=0)]
    np.testing.assert_allclose([chunk["embedding"] for chunk in chunks], expected, atol=1e-4)
    ((whole,),) = ask_whole(server, "/models/embed_tokens/embed", inputs=text, chunk=True, late_chunking=True)
    np.testing.assert_allclose(whole["embedding"], rows.mean(axis=0) / np.linalg.norm(rows.mean(axis=0)), atol=1e-5)
    (long,) = ask_whole(server, "/embed", inputs=LONG, chunk=True, late_chunking=True)
    assert (long[0]["start"], LONG[long[-1]["end"] - 1]) == (0, "!")
