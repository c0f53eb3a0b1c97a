"""The rule for fields on every route: what is obeyed, left out, refused by name, or passed over and named."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from huggingface_hub import InferenceClient
from tritonclient.grpc import service_pb2 as pb

from tests.support.clients import MODEL_INFER, TIMEOUT_S, get, http_call, metadata, post_json
from tests.support.server import FAKE, Server
from tests.support.triton_clients import TritonClient

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.clients import HttpReply

IGNORED = "x-ignored-fields"
EMBED = {"model": "embed", "input": "a text"}
RANK = {"model": "rerank", "query": "a", "documents": ["a text", "the server"]}
TEXTS = {"query": "a", "texts": ["a text", "the server"]}
TENSOR = {"name": "text", "datatype": "BYTES", "shape": [1, 1], "data": ["a text"]}
V2 = "/v2/models/embed/infer"
TAG = {"inputs": "the server is in Paris"}

BODIES: dict[str, Any] = {
    "/v1/embeddings": EMBED,
    "/embeddings": EMBED,
    "/embed": {"inputs": "a text"},
    "/embed_all": {"inputs": "a text"},
    "/predict": {"inputs": "a text"},
    "/similarity": {"inputs": {"source_sentence": "a", "sentences": ["b"]}},
    "/tokenize": {"inputs": "a text"},
    "/models/embed/decode": {"ids": [1, 2]},
    "/models/embed/tokenize": {"inputs": "a text"},
    "/rerank": TEXTS,
    "/models/rerank/rerank": RANK,
    "/v1/rerank": RANK,
    "/v2/rerank": RANK,
    "/v1/embed": {"model": "embed", "texts": ["a text"]},
    "/v2/embed": {"model": "embed", "texts": ["a text"]},
    "/classify": {"inputs": "a text"},
    "/answer": {"inputs": {"question": "what", "context": "the server is in Paris"}},
    "/tag": TAG,
    "/fill-mask": {"inputs": "the [MASK]"},
    "/models/embed": {"inputs": "a text"},
    "/models/tag": TAG,
    V2: {"inputs": [TENSOR]},
    "/v2/repository/index": {},
}
BODIES.pop("/tokenize")  # several models have it here
"""A small body for each route that takes JSON."""


def same(reply: HttpReply) -> bytes:
    """What two replies to the same request share."""
    return re.sub(
        rb'"id":"[^"]*"|,"data":\[{"index":\d+,"relevance.*(?=})', b"", reply.body
    )  # Voyage's clients send null, and read `data`


def properties(server: Server, path: str) -> list[tuple[set[str], set[str]]]:
    """The fields of each message that a route takes, and those that it must have, as the document has them."""
    document = get(server.http, "/openapi.json").json()
    listed = re.sub(r"^/models/(embed|tag|rerank)", "/models/{model}", path).replace(
        "/models/embed/", "/models/{model}/"
    )
    operation = document["paths"][listed.replace("/v2/models/embed/infer", "/v2/models/{model}/infer")]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    found = []
    for one in schema.get("anyOf", [schema]):
        kind = document["components"]["schemas"][one["$ref"].rpartition("/")[2]] if "$ref" in one else one
        found.append((set(kind.get("properties", ())), set(kind.get("required", ()))))
    return found


@pytest.mark.parametrize("path", BODIES)
def test_null_leaves_out_every_optional_field(tasks_server: Server, path: str) -> None:
    """Each field that the document has, and all of them at once; the answer is the same."""
    body = BODIES[path]
    plain = post_json(tasks_server.http, path, body)
    assert plain.status == 200, plain.body
    assert IGNORED not in plain.headers
    (optional,) = [
        known - required for known, required in properties(tasks_server, path) if known >= body.keys() >= required
    ] or [set()]
    for nulls in ({name} for name in optional - body.keys()):
        reply = post_json(tasks_server.http, path, {**body, **dict.fromkeys(nulls)})
        assert (reply.status, same(reply)) == (200, same(plain)), nulls
        assert IGNORED not in reply.headers
    assert post_json(tasks_server.http, path, {**body, **dict.fromkeys(optional - body.keys())}).status == 200


@pytest.mark.parametrize("path", BODIES)
def test_a_field_that_nobody_documents_is_passed_over_and_named(tasks_server: Server, path: str) -> None:
    """The answer is the same."""
    plain = post_json(tasks_server.http, path, BODIES[path])
    reply = post_json(tasks_server.http, path, {**BODIES[path], "x_stranger": {"deep": [1]}, "no name": 1})
    assert (reply.status, same(reply)) == (200, same(plain)), reply.body
    assert reply.headers[IGNORED] == "x_stranger, +1"


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (V2, {"inputs": [TENSOR], "model_name": "embed"}, "model_name"),  # KServe's InferenceRESTClient
        (V2, {"inputs": [{**TENSOR, "x": 1}], "outputs": [{"name": "embedding", "y": 1}]}, "x, y"),
        (
            V2,
            {"inputs": [{**TENSOR, "parameters": {"content_type": "str"}}], "parameters": {"z": 1}},
            "z, content_type",
        ),
        (V2, {"inputs": [TENSOR], "outputs": [{"name": "embedding", "parameters": {"x": 1}}]}, "x"),
        ("/embed", {"inputs": ["a"], "options": {"wait_for_model": True}}, "options"),  # Elasticsearch's, Weaviate's
        ("/models/embed", {"inputs": ["a"], "options": {"wait_for_model": True}}, None),
        ("/models/tag", {**TAG, "parameters": {"stranger": 1}}, "stranger"),
        ("/v1/rerank", {**RANK, "dimension": 3}, "dimension"),
        ("/rerank", {**TEXTS, "top_k": 1, "text": "a"}, "top_k, text"),
        ("/v1/embeddings", {**EMBED, "kwargs": "{}"}, "kwargs"),  # Xinference has it for rerankers alone
        ("/tag", {**TAG, "parameters": {"padding": True}}, "padding"),  # no parameter of this pipeline
        ("/classify", {"inputs": "a text", "top_k": 1}, "top_k"),
    ],
)
def test_bodies_of_others_are_answered(tasks_server: Server, path: str, body: Any, named: str | None) -> None:
    """With what they have that nobody reads."""
    reply = post_json(tasks_server.http, path, body)
    assert reply.status == 200, reply.body
    assert reply.headers.get(IGNORED) == named


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/embeddings", {**EMBED, "late_chunking": False, "truncate": False, "return_multivector": False}, 2),
        ("/v1/embeddings", {**EMBED, "truncate": True, "task": "text-matching", "embedding_type": "float"}, 0),
        ("/v1/embeddings", {**EMBED, "input": [{"text": "a text"}]}, 0),
        ("/v1/embeddings", {**EMBED, "input": {"text": "a text"}}, 0),
        ("/v1/embeddings", {**EMBED, "truncation": True, "output_dtype": "float", "output_dimension": None}, 3),
        ("/v1/embeddings", {**EMBED, "add_special_tokens": True, "priority": 0, "truncate_prompt_tokens": -1}, 3),
        ("/v1/embeddings", {**EMBED, "modality": "text", "request_id": "anything", "input_type": "document"}, 2),
        ("/v1/embeddings", {**EMBED, "input": [{"text": "a text", "id": "1"}]}, 1),
        ("/v1/embeddings", {**EMBED, "dimension": 8, "text_type": "query", "output_type": "dense"}, 3),
        ("/v2/embed", {"model": "embed", "texts": ["a text"], "priority": 0}, 1),
        ("/v2/rerank", {**RANK, "priority": 0, "truncation": True, "raw_scores": False, "user": "somebody"}, 4),
        ("/v1/rerank", {**RANK, "use_activation": True, "max_tokens_per_query": 0, "return_len": True}, 3),
        ("/classify", {"inputs": "a text", "parameters": {"truncation": "longest_first", "multi_class": False}}, 2),
        ("/models/embed", {"inputs": "a text", "parameters": {"tokenize_kwargs": {"truncation": True}}}, 1),
        ("/tag", {**TAG, "parameters": {"is_split_into_words": False, "batch_size": 8}}, 2),
        (V2, {"inputs": [TENSOR], "parameters": {"sequence_id": 5, "sequence_start": True, "priority": None}}, 2),
        (V2, {"inputs": [{**TENSOR, "parameters": {"shared_memory_region": None}}], "outputs": None}, 0),
        (V2, {"inputs": [TENSOR], "outputs": [{"name": "embedding", "parameters": {"classification": None}}]}, 0),
    ],
)
def test_fields_of_other_vendors_are_taken(tasks_server: Server, path: str, body: Any, named: int) -> None:
    """The answer is that without them, and each that is not read is named."""
    plain = post_json(tasks_server.http, path, BODIES[path])
    reply = post_json(tasks_server.http, path, body)
    assert reply.status == 200, reply.body
    assert len(reply.headers.get(IGNORED, "").split()) == named
    if path != "/v1/embeddings" or isinstance(body["input"], str):
        assert same(reply) == same(plain)


@pytest.mark.parametrize(
    ("path", "body", "status", "name"),
    [
        ("/v1/embeddings", {**EMBED, "late_chunking": True}, 400, "late_chunking"),
        ("/v1/embeddings", {**EMBED, "late_chunking": 0}, 400, "late_chunking"),
        ("/v1/embeddings", {**EMBED, "output_dimension": 8}, 400, "output_dimension"),
        ("/v1/embeddings", {**EMBED, "output_dtype": "int8"}, 400, "output_dtype"),
        ("/v1/embeddings", {**EMBED, "return_multivector": True}, 400, "return_multivector"),
        ("/v1/rerank", {**RANK, "return_embeddings": True}, 422, "return_embeddings"),
        ("/v1/rerank", {**RANK, "truncation": False}, 422, 'leave it out or send true or "longest_first"'),
        ("/v1/rerank", {**RANK, "use_activation": False}, 422, "`use_activation` is not supported"),
        ("/v1/rerank", {**RANK, "instruction": "find answers"}, 422, "instruction"),
        ("/classify", {"inputs": "a text", "parameters": {"multi_class": True}}, 422, "multi_class"),
        ("/v2/repository/models/embed/load", {"parameters": {"config": "{}"}}, 400, "config"),
        (V2, {"inputs": [TENSOR], "parameters": {"timeot": 5}}, 400, "timeout"),
        (V2, {"inputs": [TENSOR], "output": []}, 400, "outputs"),
        ("/embed", {"input": "a"}, 422, 'did you mean "inputs"'),
        ("/v1/rerank", {**RANK, "topn": 1}, 422, 'did you mean "top_n"'),
        (
            "/answer",
            {"question": "a?", "context": "b"},
            422,
            'did you mean "inputs.question"? The body is {"inputs": {"question": ..., "context": ...}}',
        ),
    ],
)
def test_what_is_asked_for_and_not_done_is_refused_by_name(
    tasks_server: Server, path: str, body: Any, status: int, name: str
) -> None:
    """And so is what is likely to mean another field."""
    reply = post_json(tasks_server.http, path, body)
    assert reply.status == status
    assert name in str(reply.json())
    assert IGNORED not in reply.headers


def test_jinas_truncate_is_obeyed(tasks_server: Server) -> None:
    """A text that is too long is cut, or refused."""
    long = {**EMBED, "input": "a " * 400}
    cut = post_json(tasks_server.http, "/v1/embeddings", {**long, "truncate": True})
    assert (cut.status, int(cut.headers["x-truncated-tokens"]) > 0) == (200, True)
    assert post_json(tasks_server.http, "/v1/embeddings", {**long, "truncate": False}).status == 400


def test_voyages_top_k_is_obeyed(tasks_server: Server) -> None:
    """`top_n` goes before it; where it is sent, also as null, the results are in `data` as well."""

    def ranked(**fields: object) -> Any:
        return post_json(tasks_server.http, "/v1/rerank", {**RANK, **fields}).json()

    assert len(ranked(top_k=1)["results"]) == 1
    assert len(ranked(top_k=1, top_n=2)["results"]) == 2
    assert "`top_k`" in str(ranked(top_k=-1))
    for sent in ({"top_k": 1}, {"top_k": None}, {"top_k": None, "truncation": True}):
        reply = ranked(**sent)
        assert reply["data"] == reply["results"]
    assert "data" not in ranked(top_n=1, query='the "top_k" of "it"')


def test_vertex_names_what_any_instance_brings(tiny_server: Server) -> None:
    """And its own fields."""
    reply = post_json(
        tiny_server.http, "/vertex", {"instances": [{"inputs": "a", "x": 1}, {"inputs": "b", "y": 1}], "z": 1}
    )
    assert reply.status == 200
    assert sorted(reply.headers[IGNORED].split(", ")) == ["x", "y", "z"]


def test_over_grpc_parameters_are_passed_over_and_named(tasks_server: Server) -> None:
    """In trailing metadata, and on a stream in the response's parameters; a slip of the pen is refused."""
    request = pb.ModelInferRequest(model_name="embed")
    request.inputs.add(name="text", datatype="BYTES", shape=[1, 1]).contents.bytes_contents.append(b"a")
    request.inputs[0].parameters["x"].int64_param = 1
    request.parameters["y"].string_param = "z"
    request.parameters["sequence_id"].int64_param = 4
    request.parameters["priority"].Clear()
    with grpc.insecure_channel(tasks_server.grpc) as channel:
        unary = channel.unary_unary(
            MODEL_INFER, pb.ModelInferRequest.SerializeToString, pb.ModelInferResponse.FromString
        )
        stream = channel.stream_stream(
            MODEL_INFER.replace("ModelInfer", "ModelStreamInfer"),
            pb.ModelInferRequest.SerializeToString,
            pb.ModelStreamInferResponse.FromString,
        )
        _, call = unary.with_call(request, timeout=TIMEOUT_S)
        assert sorted(metadata(call)["bertserve-ignored-fields"].split(", ")) == ["sequence_id", "x", "y"]
        (response,) = stream(iter([request]), timeout=TIMEOUT_S)
        named = response.infer_response.parameters["bertserve_ignored_fields"].string_param
        assert sorted(named.split(", ")) == ["sequence_id", "x", "y"]
        request.parameters["timeot"].int64_param = 5
        with pytest.raises(grpc.RpcError) as refused:
            unary(request, timeout=TIMEOUT_S)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "did you mean" in refused.value.details()


def test_clients_that_write_parameters_of_their_own(tasks_server: Server) -> None:
    """Triton's, and Hugging Face's with every parameter that it has."""
    own = {"sequence_id": 7, "sequence_start": True, "parameters": {"mine": "x"}}
    result = TritonClient("http", tasks_server).infer("embed", {"text": ["a text"]}, **own)
    assert result.get_response()["model_name"] == "embed"
    hub = InferenceClient(base_url=f"http://{tasks_server.http}/models/tag")
    text = TAG["inputs"]
    given = {"ignore_labels": ["O"], "aggregation_strategy": "simple", "stride": 4}
    assert hub.token_classification(text, **given) == hub.token_classification(text, aggregation_strategy="simple")


@pytest.fixture(scope="module")
def tiny_server(models: Path) -> Iterator[Server]:
    with Server(models, *FAKE, "--cors-origins", "https://app.example") as running:
        yield running


def test_a_page_may_read_the_header(tiny_server: Server) -> None:
    """CORS exposes it."""
    headers = {"Origin": "https://app.example", "Content-Type": "application/json"}
    reply = http_call(tiny_server.http, "POST", "/embed", b'{"inputs": "a", "x": 1}', headers)
    assert reply.headers[IGNORED] == "x"
    assert IGNORED in reply.headers["access-control-expose-headers"]
