"""OpenAI's own client, unmodified, and what Jina's adds; Triton's are in `triton_clients_test.py`."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import numpy as np
import openai
import pytest

from tests.support.clients import ask, post_json
from tests.support.expected import fake_answers, token_ids
from tests.support.models import NAME
from tests.support.openai_client import client_of
from tests.support.server import FAKE, Server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray


TEXTS = ["What is a T4?", "Eine Grafikkarte für Rechenzentren.", " "]


@pytest.fixture(scope="module")
def expected(models: Path) -> NDArray[np.floating]:
    return fake_answers(models, TEXTS)


@pytest.fixture
def openai_client(fake_server: Server) -> Iterator[openai.OpenAI]:
    """The `openai` package's client."""
    with client_of(fake_server) as client:
        yield client


@pytest.mark.parametrize("encoding_format", [None, "float", "base64"])
def test_openai(
    openai_client: openai.OpenAI, models: Path, expected: NDArray[np.floating], encoding_format: str | None
) -> None:
    """`openai` reads the vectors in each of its encodings, its own default included."""
    options = {} if encoding_format is None else {"encoding_format": encoding_format}
    reply = openai_client.embeddings.create(model=NAME, input=TEXTS, **options)
    assert [entry.index for entry in reply.data] == [0, 1, 2]
    rows = [entry.embedding for entry in reply.data]
    if encoding_format != "base64":  # asked for by name, the client hands it on as it came
        np.testing.assert_allclose(rows, expected, atol=1e-5)
    assert reply.model == NAME
    tokens = sum(len(token_ids(models, text)) for text in TEXTS)
    assert reply.usage.prompt_tokens == reply.usage.total_tokens == tokens


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


def test_openai_token_ids_of_its_own_tokenizer(models: Path, tmp_path: Path) -> None:
    """Where the server has their table they are texts again, whatever is split between ids; others are refused."""
    pieces = [bytes([value]) for value in range(256)] + [b"What", b" is", b" a", "日".encode()[:2]]
    file = tmp_path / "ranks"
    lines = [base64.b64encode(piece) + b" %d\n" % rank for rank, piece in enumerate(pieces)]
    file.write_bytes(b"".join(lines))
    ids = [256, 257, 258, *b" T4?"]
    split = [*b"a ", 259, "日".encode()[2], *"é".encode()]
    with Server(models, *FAKE, "--accept-token-ids", f"cl100k_base={file}") as server:
        for sent, texts in ((ids, TEXTS[:1]), ([ids, "a 日é", split], [TEXTS[0], "a 日é", "a 日é"])):
            rows = [row["embedding"] for row in ask(server, "/v1/embeddings", input=sent)["data"]]
            np.testing.assert_allclose(rows, fake_answers(models, texts), atol=1e-6)
        for sent, status, code, said in (
            ([[], list(b"a")], 400, "empty_input", "`input` cannot be empty (input 0)"),
            (["a", [1, 260]], 400, "foreign_token_ids", "input 1 has a token ID outside cl100k_base"),
            ([-1], 400, "foreign_token_ids", "input 0"),
            ([[1] * 8193], 400, "invalid_request", "8193 token IDs; the maximum is 8192"),
        ):
            reply = post_json(server.http, "/v1/embeddings", {"input": sent})
            assert (reply.status, reply.json()["error"]["code"]) == (status, code)
            assert said in reply.json()["error"]["message"]


def test_jina_types_of_vectors(fake_server: Server, expected: NDArray[np.floating]) -> None:
    """`embedding_type` names the form, also where OpenAI's client asks for base64 by itself."""

    def vectors(**options: object) -> list[object]:
        rows = ask(fake_server, "/v1/embeddings", model="jina-embeddings-v3", input=TEXTS, **options)["data"]
        return [row["embedding"] for row in rows]

    np.testing.assert_array_equal(vectors(embedding_type="int8"), np.rint(np.array(vectors(), np.float32) * 127))
    bits = np.array(vectors(embedding_type="ubinary", encoding_format="base64"), np.uint8)
    np.testing.assert_array_equal(np.unpackbits(bits, axis=1), expected > 0)
    np.testing.assert_array_equal(np.array(vectors(embedding_type="binary")) + 128, bits)
    assert vectors(embedding_type="base64") == vectors(encoding_format="base64")
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
