from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from tritonclient.grpc import service_pb2 as pb

from bertserve.loadtest.generator.answers import Answers
from bertserve.loadtest.generator.wire import Reply

CLASS = {"label": "glad", "score": 0.5}
SPAN = {"answer": "glad", "score": 0.5, "start": 3, "end": 7}
ENTITY = {"entity_group": "place", "score": 0.5, "word": "Paris", "start": 0, "end": 5}
FILLED = {"score": 0.5, "token": 7, "token_str": "glad", "sequence": "be glad"}
EMBEDDED = {"index": 0, "embedding": [0.5, -1]}
WEIGHTS = [{"index": 3, "value": 0.5}, {"index": 7, "value": 1.5}]
RANKED = [{"index": 1, "score": 0.5}, {"index": 0, "score": 0.1}]


def reply(body: object, head: bytes = b"") -> Reply:
    return Reply(None, "", head, body if isinstance(body, bytes) else json.dumps(body).encode())


def infer_reply(*tensors: tuple[str, str, list[int], bytes]) -> Reply:
    outputs = [
        pb.ModelInferResponse.InferOutputTensor(name=name, datatype=datatype, shape=shape)
        for name, datatype, shape, _ in tensors
    ]
    blobs = [blob for *_, blob in tensors]
    return reply(pb.ModelInferResponse(model_name="m", outputs=outputs, raw_output_contents=blobs).SerializeToString())


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


@pytest.mark.parametrize(
    ("protocol", "task", "inputs", "body"),
    [
        ("http", "embed", 1, [[0.5, -1]]),
        ("http", "embed_tokens", 1, [[[0.5, -1], [0.25, 1]]]),
        ("http", "embed_sparse", 2, [WEIGHTS, []]),
        ("tei", "embed_sparse", 1, [WEIGHTS]),
        ("http", "classify", 1, [[CLASS]]),
        ("http", "classify", 1, [[{"label": "LABEL_0", "score": -3.25}]]),
        ("tei", "classify", 1, [CLASS]),
        ("http", "rerank", 2, RANKED),
        ("http", "answer", 1, SPAN),
        ("http", "answer", 1, {"answer": "", "score": 0.5, "start": 0, "end": 0}),
        ("http", "tag", 1, [ENTITY]),
        ("http", "tag", 1, []),
        ("http", "fill_mask", 1, [FILLED]),
        ("http", "fill_mask", 1, [[FILLED], [FILLED]]),
        ("openai", "embed", 1, {"data": [EMBEDDED]}),
        ("cohere-v2", "rerank", 1, {"results": [{"index": 0, "relevance_score": 0.5}]}),
    ],
)
def test_an_answer_is_taken(protocol: str, task: str, inputs: int, body: Any) -> None:
    """What a server answers has no fault, the first time and when it comes again."""
    answers = Answers(protocol, task)
    assert [answers.fault(reply(body), inputs) for _ in range(2)] == ["", ""]


@pytest.mark.parametrize(
    ("protocol", "task", "inputs", "body", "fault"),
    [
        ("http", "embed", 1, b"", "not an answer of the task embed"),
        ("http", "embed", 1, b"[[0.5,NaN]]", "a number that is not finite"),
        ("http", "embed", 1, [[0.5, None]], "not an answer of the task embed"),
        ("http", "embed", 1, [["0.5"]], "not an answer of the task embed"),
        ("http", "embed", 1, [[]], "not an answer of the task embed"),
        ("http", "embed", 1, [0.5], "not an answer of the task embed"),
        ("http", "embed", 1, {"embedding": [0.5]}, "not an answer of the task embed"),
        ("http", "embed", 1, [[0.5], [0.5]], "2 answers for 1 inputs"),
        ("http", "embed_tokens", 1, [[0.5, 1]], "not an answer of the task embed_tokens"),
        ("http", "embed_sparse", 1, WEIGHTS, "not an answer of the task embed_sparse"),
        ("http", "embed_sparse", 1, [WEIGHTS[::-1]], "indices that do not ascend"),
        ("http", "embed_sparse", 1, [[{"index": 3, "value": "0.5"}]], "not an answer of the task embed_sparse"),
        ("http", "classify", 1, [[]], "not an answer of the task classify"),
        ("http", "classify", 1, [[{"label": 1, "score": 0.5}]], "not an answer of the task classify"),
        ("http", "rerank", 3, RANKED, "2 answers for 3 inputs"),
        ("http", "rerank", 2, [RANKED[0], RANKED[0]], "an index that is missing or given twice"),
        ("http", "answer", 1, [SPAN], "not an answer of the task answer"),
        ("http", "answer", 1, {**SPAN, "end": 2}, "an end before its start"),
        ("http", "answer", 1, {**SPAN, "end": 8}, "an answer that is not as long as its place"),
        ("http", "tag", 1, [{**ENTITY, "score": True}], "not an answer of the task tag"),
        ("http", "tag", 1, {"entities": []}, "not an answer of the task tag"),
        ("http", "fill_mask", 1, [], "not an answer of the task fill_mask"),
        ("openai", "embed", 1, {"data": [{**EMBEDDED, "index": 1}]}, "an index that is missing or given twice"),
        ("cohere-v1", "rerank", 1, {"results": [{"index": 0, "score": 0.5}]}, "not an answer of the task rerank"),
        ("v2", "embed", 1, {"outputs": []}, "not an answer of the task embed"),
        ("grpc", "embed", 1, b"\x32\x80", "not an answer of the task embed"),
    ],
)
def test_what_is_no_answer_is_named(protocol: str, task: str, inputs: int, body: Any, fault: str) -> None:
    """Status 200 alone is no answer."""
    assert Answers(protocol, task).fault(reply(body), inputs) == f"wrong answer: {fault}"


def test_answers_of_one_model_are_of_one_width() -> None:
    """A vector that is suddenly longer is wrong, and stays wrong."""
    answers = Answers("http", "embed")
    assert answers.fault(reply([[0.5, 1]]), 1) == ""
    for _ in range(2):
        assert answers.fault(reply([[0.5, 1, 2]]), 1) == "wrong answer: vectors of 2 and 3 dimensions from one model"


def test_tensors_are_read() -> None:
    """Over gRPC numbers and texts are counted against their shapes."""
    scored = Answers("grpc", "classify")
    label = ("label", "BYTES", [1], b"\x04\0\0\0glad")
    assert scored.fault(infer_reply(("scores", "FP32", [1, 2], floats(0.5, 0.5)), label), 1) == ""
    short = infer_reply(("scores", "FP32", [1, 2], floats(0.5)), label)
    assert scored.fault(short, 1) == "wrong answer: not an answer of the task classify"
    cut = infer_reply(("scores", "FP32", [1, 2], floats(0.5, 0.5)), ("label", "BYTES", [1], b"\x05\0\0\0glad"))
    assert scored.fault(cut, 1) == "wrong answer: not an answer of the task classify"
    infinite = infer_reply(("score", "FP32", [1], floats(float("inf"))))
    assert Answers("grpc", "rerank").fault(infinite, 1) == "wrong answer: a number that is not finite"
    tokens = infer_reply(
        ("embeddings", "FP32", [1, 2, 2], floats(1, 2, 0, 0)), ("tokens", "INT64", [1], struct.pack("<q", 3))
    )
    assert Answers("grpc", "embed_tokens").fault(tokens, 1) == "wrong answer: another number of tokens than of vectors"


@pytest.mark.parametrize(
    ("splits", "fault"),
    [
        ((0, 2, 2, 3), ""),
        ((0, 3), "1 answers for 3 inputs"),
        ((0, 2, 2, 4), "row_splits that do not match the vectors"),
        ((0, 1, 1, 3), "indices that do not ascend"),
    ],
)
def test_sparse_vectors_are_split(splits: tuple[int, ...], fault: str) -> None:
    """Those of all inputs lie in one tensor."""
    tensors = [
        ("sparse_indices", "INT32", [3], struct.pack("<3i", 3, 7, 5)),
        ("sparse_values", "FP32", [3], floats(0.5, 1.5, 1)),
        ("row_splits", "INT32", [len(splits)], struct.pack(f"<{len(splits)}i", *splits)),
    ]
    found = Answers("grpc", "embed_sparse").fault(infer_reply(*tensors), 3)
    assert found == (f"wrong answer: {fault}" if fault else "")
