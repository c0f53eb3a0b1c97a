"""The protocols' own clients, unmodified."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import openai
import pytest
import tritonclient.grpc
import tritonclient.http
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.clients import Tei, post_json
from tests.support.expected import fake_answers, token_ids, words
from tests.support.models import HIDDEN_SIZE, NAME
from tests.support.server import FAKE, Server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import ModuleType

    from numpy.typing import NDArray

    from tests.support.clients import HttpReply

TEXTS = ["What is a T4?", "Eine Grafikkarte für Rechenzentren.", " "]


@pytest.fixture(scope="module")
def expected(models: Path) -> NDArray[np.floating]:
    """The fake engine's answers to the texts."""
    return fake_answers(models, TEXTS)


@pytest.fixture
def openai_client(fake_server: Server) -> Iterator[openai.OpenAI]:
    """The `openai` package's client."""
    with openai.OpenAI(base_url=f"http://{fake_server.http}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("encoding_format", [None, "float", "base64"])
def test_openai(openai_client: openai.OpenAI, expected: NDArray[np.floating], encoding_format: str | None) -> None:
    """`openai` reads the vectors in each of its encodings, its own default included."""
    options = {} if encoding_format is None else {"encoding_format": encoding_format}
    reply = openai_client.embeddings.create(model=NAME, input=TEXTS, **options)
    assert [entry.index for entry in reply.data] == [0, 1, 2]
    rows = [entry.embedding for entry in reply.data]
    if encoding_format != "base64":  # asked for by name, the client hands it on as it came
        np.testing.assert_allclose(rows, expected, atol=1e-5)
    assert reply.model == NAME
    assert reply.usage.prompt_tokens == reply.usage.total_tokens > 0


def test_openai_dimensions(openai_client: openai.OpenAI) -> None:
    """`dimensions` shortens the vectors, which keep length 1."""
    reply = openai_client.embeddings.create(model=NAME, input="text", dimensions=16)
    vector = np.array(reply.data[0].embedding)
    assert vector.shape == (16,)
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"dimensions": "12"}, "dimensions"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 100_000}, "dimensions"),
        ({"input": 7}, "input"),
        ({"input": [["a"]]}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"encoding_format": "base64x"}, "encoding_format"),
        ({"extra_body": {"dimension": 8, "dimensons": 8}}, "dimensons"),
        ({"extra_body": {"late_chunking": True}}, "late_chunking"),
    ],
    ids=str,
)
def test_openai_names_the_field_that_is_wrong(openai_client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    """What breaks the schema or a limit is the client's BadRequestError, as at OpenAI's, with the field in `param`."""
    with pytest.raises(openai.BadRequestError) as refused:
        openai_client.embeddings.create(**{"model": NAME, "input": "text", **fields})
    assert (refused.value.type, refused.value.param) == ("invalid_request_error", param)


def test_openai_foreign_model_name(openai_client: openai.OpenAI) -> None:
    """With one model served, another server's model name is taken and the true one answered."""
    assert openai_client.embeddings.create(model="text-embedding-3-small", input="text").model == NAME


def test_openai_takes_the_models_own_token_ids(openai_client: openai.OpenAI, models: Path) -> None:
    """Ids with their special tokens are the text's own; several texts are several lists."""
    ids = [token_ids(models, text) for text in TEXTS]
    for sent in (ids, ids[0]):
        reply = openai_client.embeddings.create(model=NAME, input=sent)
        answered = np.array([row.embedding for row in reply.data])
        np.testing.assert_allclose(answered, fake_answers(models, TEXTS)[: len(answered)], atol=1e-6)


@pytest.mark.parametrize(
    "ids",
    # What tiktoken's cl100k_base makes of the first text, and a part of the model's own ids.
    [[3923, 374, 264, 350, 19, 30], [101, 2054, 2003], [2054, 2003, 102], [[101, 2054, 102], [2054]]],
)
def test_openai_refuses_token_ids_of_another_tokenizer(openai_client: openai.OpenAI, ids: list[int]) -> None:
    """They would be embedded as other words; the message says what to do instead."""
    with pytest.raises(openai.BadRequestError, match="Send strings") as refused:
        openai_client.embeddings.create(model=NAME, input=ids)
    assert refused.value.code == "foreign_token_ids"
    assert "check_embedding_ctx_length=False" in refused.value.message


def test_openai_token_ids_without_special_tokens(models: Path) -> None:
    """Where the server is told that they are the model's, they get the special tokens; a text's ids are as they are."""
    ids = token_ids(models, TEXTS[0])
    with Server(models, *FAKE, "--accept-bare-ids", "true") as server:
        body = json.dumps({"model": NAME, "input": [ids, ids[1:-1]]}).encode()
        rows = json.loads(post_json(server.http, "/v1/embeddings", body).body)["data"]
        assert post_json(server.http, "/v1/embeddings", b'{"input": [[]]}').status == 400
    for row in rows:
        np.testing.assert_allclose(row["embedding"], fake_answers(models, TEXTS[:1])[0], atol=1e-6)


def test_openai_token_ids_of_its_own_tokenizer(models: Path, tmp_path: Path) -> None:
    """Where the server has their table they are texts again, whatever is split between ids; others are refused."""
    pieces = [bytes([value]) for value in range(256)] + [b"What", b" is", b" a", "日".encode()[:2]]
    file = tmp_path / "ranks"
    lines = [base64.b64encode(piece) + b" %d\n" % rank for rank, piece in enumerate(pieces)]
    file.write_bytes(b"".join(lines))
    ids = [256, 257, 258, *b" T4?"]
    split = [*b"a ", 259, "日".encode()[2], *"é".encode()]
    with Server(models, *FAKE, "--accept-token-ids", f"cl100k_base={file}") as server:

        def ask(value: object) -> HttpReply:
            return post_json(server.http, "/v1/embeddings", json.dumps({"input": value}).encode())

        for sent, texts in ((ids, TEXTS[:1]), ([ids, "a 日é", split], [TEXTS[0], "a 日é", "a 日é"])):
            rows = [row["embedding"] for row in ask(sent).json()["data"]]
            np.testing.assert_allclose(rows, fake_answers(models, texts), atol=1e-6)
        for sent, status, code, said in (
            ([[], list(b"a")], 400, "empty_input", "`input` cannot be empty (input 0)"),
            (["a", [1, 260]], 400, "foreign_token_ids", "input 1 holds a token id that cl100k_base does not have"),
            ([-1], 400, "foreign_token_ids", "input 0"),
            ([[1] * 8193], 400, "invalid_request", "8193 token ids; at most 8192"),
        ):
            reply = ask(sent)
            assert (reply.status, reply.json()["error"]["code"]) == (status, code)
            assert said in reply.json()["error"]["message"]


def test_jina_types_of_vectors(fake_server: Server, expected: NDArray[np.floating]) -> None:
    """`embedding_type` names the form, also where OpenAI's client asks for base64 by itself."""

    def ask(**options: object) -> list[object]:
        body = json.dumps({"model": "jina-embeddings-v3", "input": TEXTS, **options}).encode()
        reply = post_json(fake_server.http, "/v1/embeddings", body)
        assert reply.status == 200, reply.body
        return [row["embedding"] for row in reply.json()["data"]]

    np.testing.assert_array_equal(ask(embedding_type="int8"), np.rint(np.array(ask(), np.float32) * 127))
    bits = np.array(ask(embedding_type="ubinary", encoding_format="base64"), np.uint8)
    np.testing.assert_array_equal(np.unpackbits(bits, axis=1), expected > 0)
    np.testing.assert_array_equal(np.array(ask(embedding_type="binary")) + 128, bits)
    assert ask(embedding_type="base64") == ask(encoding_format="base64")
    refused = post_json(fake_server.http, "/v1/embeddings", b'{"input": "a", "embedding_type": "int4"}')
    assert refused.status == 400
    assert "ubinary" in refused.json()["error"]["message"]


def test_openai_errors(openai_client: openai.OpenAI) -> None:
    """A refusal is the client's own exception, with our message and code in it."""
    for nothing in ([], "", ["a", ""]):
        with pytest.raises(openai.BadRequestError) as refused:
            openai_client.embeddings.create(model=NAME, input=nothing)
        assert refused.value.code == "empty_input"
        assert refused.value.type == "invalid_request_error"


@pytest.fixture(params=["http", "grpc"])
def triton(request: pytest.FixtureRequest, fake_server: Server) -> Iterator[tuple[ModuleType, object]]:
    """The client `tritonclient` over each wire, with its module."""
    module = {"http": tritonclient.http, "grpc": tritonclient.grpc}[request.param]
    client = module.InferenceServerClient(getattr(fake_server, request.param))
    yield module, client
    client.close()


def triton_input(module: ModuleType, texts: list[str], **options: object) -> object:
    """The texts as tritonclient's input."""
    tensor = module.InferInput("text", [len(texts), 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[text.encode()] for text in texts], dtype=np.object_), **options)
    return tensor


def test_triton_infer(triton: tuple[ModuleType, object], expected: NDArray[np.floating]) -> None:
    """The defaults of `tritonclient`, which are binary both ways, get the vectors."""
    module, client = triton
    result = client.infer(NAME, [triton_input(module, TEXTS)], request_id="its-own-id")
    np.testing.assert_allclose(result.as_numpy("embedding"), expected, atol=1e-5)
    reply = result.get_response()
    assert (reply["id"] if isinstance(reply, dict) else reply.id) == "its-own-id"


def test_triton_requested_output(triton: tuple[ModuleType, object], expected: NDArray[np.floating]) -> None:
    """An output asked for by name, of a version asked for, comes back."""
    module, client = triton
    wanted = [module.InferRequestedOutput("embedding")]
    result = client.infer(NAME, [triton_input(module, TEXTS)], model_version="1", outputs=wanted)
    np.testing.assert_allclose(result.as_numpy("embedding"), expected, atol=1e-5)


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_triton_http_encodings(
    fake_server: Server,
    expected: NDArray[np.floating],
    binary_in: bool,  # noqa: FBT001
    binary_out: bool,  # noqa: FBT001
) -> None:
    """JSON and binary mix as the client likes."""
    module = tritonclient.http
    with module.InferenceServerClient(fake_server.http) as client:
        wanted = [module.InferRequestedOutput("embedding", binary_data=binary_out)]
        result = client.infer(NAME, [triton_input(module, TEXTS, binary_data=binary_in)], outputs=wanted)
    np.testing.assert_allclose(result.as_numpy("embedding"), expected, atol=1e-5)


def test_triton_health(triton: tuple[ModuleType, object]) -> None:
    """Its probes are true for what is served and false, not an error, for what is not."""
    _, client = triton
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(NAME)
    assert client.is_model_ready(NAME, "1")
    assert not client.is_model_ready(NAME, "2")
    assert not client.is_model_ready("nobody")


def test_triton_metadata(triton: tuple[ModuleType, object]) -> None:
    """The server and the model describe themselves as the protocol demands."""
    module, client = triton
    options = {} if module is tritonclient.http else {"as_json": True}
    server = client.get_server_metadata(**options)
    assert server["name"] == "bertserve"
    assert "binary_tensor_data" in server["extensions"]
    for version in ("", "1"):
        model = client.get_model_metadata(NAME, version, **options)
        assert model["versions"] == ["1"]
        (text,), (embedding,) = model["inputs"], model["outputs"]
        assert (text["name"], text["datatype"], list(map(int, text["shape"]))) == ("text", "BYTES", [-1, 1])
        assert (embedding["name"], embedding["datatype"]) == ("embedding", "FP32")
        assert list(map(int, embedding["shape"])) == [-1, HIDDEN_SIZE]


def test_triton_errors(triton: tuple[ModuleType, object]) -> None:
    """A refusal is the client's own exception, with our message and status."""
    module, client = triton
    with pytest.raises(tritonclient.utils.InferenceServerException) as refused:
        client.infer("nobody", [triton_input(module, ["x"])])
    assert "no model of that name" in refused.value.message()
    assert refused.value.status() in {"404", "StatusCode.NOT_FOUND"}


def test_triton_client_timeout(triton: tuple[ModuleType, object]) -> None:
    """The request's `timeout` in microseconds is our deadline."""
    module, client = triton
    with pytest.raises(tritonclient.utils.InferenceServerException) as refused:
        client.infer(NAME, [triton_input(module, ["x"] * 8)], timeout=1)
    assert refused.value.status() in {"504", "StatusCode.DEADLINE_EXCEEDED"}


def test_triton_async(fake_server: Server, expected: NDArray[np.floating]) -> None:
    """Several of its asynchronous requests at once are each answered with their own vectors."""
    module = tritonclient.http
    with module.InferenceServerClient(fake_server.http, concurrency=4) as client:
        pending = [client.async_infer(NAME, [triton_input(module, [text])]) for text in TEXTS * 4]
        rows = [request.get_result().as_numpy("embedding")[0] for request in pending]
    np.testing.assert_allclose(rows, np.tile(expected, (4, 1)), atol=1e-5)


@pytest.mark.parametrize("service", ["", "inference.GRPCInferenceService"])
def test_grpc_health_client(fake_server: Server, service: str) -> None:
    """The standard health client finds the server, and the service by name, SERVING."""
    with grpc.insecure_channel(fake_server.grpc) as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_grpc_health_of_an_unknown_service(fake_server: Server) -> None:
    """A service that does not exist is NOT_FOUND."""
    with grpc.insecure_channel(fake_server.grpc) as channel, pytest.raises(grpc.RpcError) as refused:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="nobody"))
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


def test_truncation_over_triton(triton: tuple[ModuleType, object], models: Path) -> None:
    """The request parameter `truncate` turns cutting off."""
    module, client = triton
    with pytest.raises(tritonclient.utils.InferenceServerException, match="400 tokens"):
        client.infer(NAME, [triton_input(module, [words(models, 400)])], parameters={"truncate": False})


def test_all_clients_agree(fake_server: Server, openai_client: openai.OpenAI) -> None:
    """One text has the same vector whichever client asks."""
    with Tei(fake_server) as client:
        ours = client.embed(["the same"]).vectors[0]
    theirs = openai_client.embeddings.create(model=NAME, input="the same").data[0].embedding
    np.testing.assert_allclose(theirs, ours, atol=1e-6)
