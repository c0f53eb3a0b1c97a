"""Rows 16 to 33 of the failure modes: input that cannot be parsed, breaks the schema or a limit, or only looks odd."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from tests.support.clients import (
    MODEL_INFER,
    STATUS,
    TRANSPORTS,
    Grpc,
    Refused,
    get,
    grpc_raw,
    http_call,
    post_json,
)
from tests.support.expected import fake_answers, tokenizer, words
from tests.support.models import MAX_LENGTH, NAME

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.clients import Transport
    from tests.support.server import Server

ROUTES = {"tei": "/embed", "openai": "/v1/embeddings", "v2": f"/v2/models/{NAME}/infer"}
FIELD = {"tei": "inputs", "openai": "input"}
CHARACTERS_PER_TOKEN = 32

each_transport = pytest.mark.parametrize("transport", TRANSPORTS, ids=lambda kind: kind.name)
each_route = pytest.mark.parametrize("family", ROUTES)


def body_of(family: str, text: bytes) -> bytes:
    """A request of one text, whose JSON literal (quotes included) is put in as it is."""
    if family == "v2":
        return b'{"inputs":[{"name":"text","datatype":"BYTES","shape":[1,1],"data":[' + text + b"]}]}"
    return b'{"' + FIELD[family].encode() + b'":' + text + b"}"


def post(server: Server, family: str, body: bytes) -> int:
    """The status of a body on the route of a family; a 5xx reply or an echo of the body fails the test."""
    reply = post_json(server.http, ROUTES[family], body)
    assert reply.status < 500, reply.body
    if reply.status != 200:
        assert reply.json()["error"], "an error body is never empty"
    return reply.status


@pytest.mark.sampled(10)
@each_route
@pytest.mark.parametrize(
    "spoil",
    [
        lambda _: b"",
        lambda _: b"not json",
        lambda _: b"\x00",
        lambda body: body[:1],
        lambda body: body[:-1],
        lambda body: body + b"}",
        lambda body: body + b" trailing",
        lambda body: body + body,
        lambda body: body.replace(b'"', b"'"),
        lambda body: body[:-1] + b",}",
    ],
    ids=["empty", "prose", "nul", "brace", "cut", "second-brace", "trailing", "twice", "quotes", "comma"],
)
def test_row_16_bad_json(fake_server: Server, family: str, spoil: Callable[[bytes], bytes]) -> None:
    """What is not exactly one JSON document is 400."""
    assert post(fake_server, family, spoil(body_of(family, b'"x"'))) == STATUS["malformed"][family]


@pytest.mark.sampled(6)
@each_route
@pytest.mark.parametrize(
    "recode",
    [
        lambda body: body.replace(b"word", b"\xff\xfe"),
        lambda body: body.replace(b"word", b"\xed\xa0\x80"),
        lambda body: body.replace(b"word", b"\xc0\xaf"),
        lambda body: body.decode().encode("utf-16"),
        lambda body: body.decode().encode("utf-32"),
        lambda body: b"\xef\xbb\xbf" + body,
    ],
    ids=["invalid", "surrogate-bytes", "overlong", "utf-16", "utf-32", "bom"],
)
def test_row_17_not_utf8(fake_server: Server, family: str, recode: Callable[[bytes], bytes]) -> None:
    """A body in another encoding than plain UTF-8 is 400."""
    assert post(fake_server, family, recode(body_of(family, b'"word"'))) == STATUS["malformed"][family]


@pytest.mark.parametrize("raw", [True, False], ids=["raw", "contents"])
@pytest.mark.parametrize("value", [b"\xff\xfe", b"\xed\xa0\x80", b"\xc0\xaf"], ids=["invalid", "surrogate", "overlong"])
def test_row_17_not_utf8_grpc(fake_server: Server, value: bytes, raw: bool) -> None:  # noqa: FBT001
    """A BYTES element that is not UTF-8 is INVALID_ARGUMENT."""
    request = pb.ModelInferRequest(model_name=NAME)
    tensor = request.inputs.add(name="text", datatype="BYTES", shape=[1])
    if raw:
        request.raw_input_contents.append(len(value).to_bytes(4, "little") + value)
    else:
        tensor.contents.bytes_contents.append(value)
    with pytest.raises(Refused) as refused:
        grpc_raw(fake_server.grpc, MODEL_INFER, request.SerializeToString())
    assert refused.value.status == "INVALID_ARGUMENT"


def test_row_17_not_utf8_in_a_binary_tensor(fake_server: Server) -> None:
    """The same behind the JSON of a v2 request is 400."""
    blob = b"\x02\x00\x00\x00\xff\xfe"
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(blob)}}
    head = json.dumps({"inputs": [tensor]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    assert http_call(fake_server.http, "POST", ROUTES["v2"], head + blob, headers).status == 400


@pytest.mark.sampled(4)
@each_route
@pytest.mark.parametrize("literal", [rb'"\ud800"', rb'"\udc00 x"', rb'"\ud800\ud800"', rb'"\uD83D"'])
def test_row_18_lone_surrogate(fake_server: Server, family: str, literal: bytes) -> None:
    """An escaped lone surrogate is 400: no encoding of it exists."""
    assert post(fake_server, family, body_of(family, literal)) == STATUS["malformed"][family]


@each_route
def test_row_18_surrogate_pair(fake_server: Server, family: str) -> None:
    """An escaped surrogate pair is the character that it means."""
    assert post(fake_server, family, body_of(family, rb'"\ud83d\ude00"')) == 200


@pytest.mark.sampled(9)
@each_route
@pytest.mark.parametrize(
    "literal",
    [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"1" * 5000, b"[" + b"9" * 5000 + b"]", b"1.5", b"-0"],
    ids=["nan", "infinity", "minus-infinity", "1e999", "-1e999", "5000-digits", "listed", "fraction", "minus-zero"],
)
def test_row_19_numbers_that_are_none(fake_server: Server, family: str, literal: bytes) -> None:
    """Numbers where texts are expected, and numbers that no type holds, are refused by the client's fault."""
    assert post(fake_server, family, body_of(family, literal)) in {400, 422}


@pytest.mark.sampled(4)
@each_route
@pytest.mark.parametrize("depth", [100, 100_000])
@pytest.mark.parametrize("brackets", [b"[]", b'{"x":}'], ids=["lists", "objects"])
def test_row_20_nesting(fake_server: Server, family: str, depth: int, brackets: bytes) -> None:
    """Deep nesting is refused, however deep."""
    opening, closing = brackets[:-1], brackets[-1:]
    literal = opening * depth + b'"x"' + closing * depth
    assert post(fake_server, family, body_of(family, literal)) in {400, 422}


@pytest.mark.parametrize("depth", [100, 100_000])
def test_row_20_nesting_in_free_parameters(fake_server: Server, depth: int) -> None:
    """Deep nesting is no danger where the schema takes any value."""
    deep = b"[" * depth + b"]" * depth
    body = body_of("v2", b'"x"')[:-1] + b',"parameters":{"anything":' + deep + b"}}"
    assert post(fake_server, "v2", body) in {200, 400}


@pytest.mark.parametrize(
    "group", [b"\x0b" * 100_000, b"\x3a\x80" * 1000, b"\xff" * 64], ids=["groups", "field", "ones"]
)
def test_row_21_malformed_protobuf(fake_server: Server, group: bytes) -> None:
    """Bytes that are no message are INVALID_ARGUMENT and say nothing of the server's insides."""
    with pytest.raises(Refused) as refused:
        grpc_raw(fake_server.grpc, MODEL_INFER, group)
    assert refused.value.status == "INVALID_ARGUMENT"
    assert "Error" not in refused.value.text


@pytest.mark.sampled(5)
@pytest.mark.parametrize("family", FIELD)
@pytest.mark.parametrize(
    "change",
    [
        {"dimension": 5, "dimensons": 5},
        {"dimensions": "5"},
        {"dimensions": 5.5},
        {"dimensions": 0},
        {"dimensions": 385},
        {"dimensions": -1},
    ],
    ids=str,
)
def test_row_22_schema(fake_server: Server, family: str, change: dict[str, object]) -> None:
    """A field's name that is misspelt, a wrong type or a value out of range breaks the schema."""
    body = json.dumps({FIELD[family]: "x", **change}).encode()
    assert post(fake_server, family, body) == STATUS["invalid"][family]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("family", FIELD)
@pytest.mark.parametrize(
    "value", [None, 5, True, {}, {"texts": "x"}, [None], ["x", None], ["x", 5], [["x"]], [[1.5]]], ids=str
)
def test_row_22_inputs_of_a_wrong_type(fake_server: Server, family: str, value: object) -> None:
    """Inputs that are neither texts nor token ids break the schema."""
    assert post(fake_server, family, json.dumps({FIELD[family]: value}).encode()) == STATUS["invalid"][family]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", FIELD)
@pytest.mark.parametrize("body", [b"{}", b"[]", b'"x"', b"5", b"null"])
def test_row_22_missing_inputs(fake_server: Server, family: str, body: bytes) -> None:
    """A body without its one field breaks the schema."""
    assert post(fake_server, family, body) == STATUS["invalid"][family]


TENSOR = {"name": "text", "datatype": "BYTES", "shape": [1, 1], "data": ["x"]}


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    "message",
    [
        {},
        {"inputs": []},
        {"inputs": [TENSOR, TENSOR]},
        {"inputs": [{**TENSOR, "name": "other"}]},
        {"inputs": [{**TENSOR, "datatype": "FP32"}]},
        {"inputs": [{**TENSOR, "shape": []}]},
        {"inputs": [{**TENSOR, "shape": [2, 1]}]},
        {"inputs": [{**TENSOR, "shape": [1, 2]}]},
        {"inputs": [{**TENSOR, "shape": [-1, 1]}]},
        {"inputs": [{**TENSOR, "shape": [2**31]}]},
        {"inputs": [{**TENSOR, "shape": [2**63]}]},
        {"inputs": [{**TENSOR, "shape": [2**32, 2**32]}]},
        {"inputs": [{**TENSOR, "data": [1]}]},
        {"inputs": [{**TENSOR, "data": None}]},
        {"inputs": [{**TENSOR, "parameters": {"binary_data_size": 4}}]},
        {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 4}}]},
        {"inputs": [TENSOR], "outputs": [{"name": "other"}]},
        {"inputs": [TENSOR], "outputs": [{"name": "embedding"}, {"name": "embedding"}]},
        {"inputs": [TENSOR], "outputs": [{"name": "embedding", "parameters": {"binary_data": "yes"}}]},
        {"inputs": [TENSOR], "parameters": {"timeout": "soon"}},
        {"inputs": [TENSOR], "parameters": {"timeout": -1}},
        {"inputs": [TENSOR], "parameters": {"truncate": "no"}},
        {"inputs": [TENSOR], "parameters": {"binary_data_output": 1}},
        {"inputs": [TENSOR], "parameters": []},
        {"inputs": [TENSOR], "id": 5},
        {"inputs": [TENSOR], "output": []},
    ],
    ids=lambda message: json.dumps(message)[:60],
)
def test_row_22_v2_schema(fake_server: Server, message: dict[str, object]) -> None:
    """A v2 request that does not fit the model is 400, whatever is wrong with it."""
    assert post(fake_server, "v2", json.dumps(message).encode()) == 400


@pytest.mark.parametrize("length", ["-1", "x", "1e2", "99999", "", "+5"])
def test_row_22_v2_length_header(fake_server: Server, length: str) -> None:
    """A length of the JSON part that is no number within the body is 400."""
    body = json.dumps({"inputs": [TENSOR]}).encode()
    headers = {"Inference-Header-Content-Length": length}
    assert http_call(fake_server.http, "POST", ROUTES["v2"], body, headers).status == 400


@pytest.mark.parametrize(
    "blob",
    [b"", b"\x01", b"\x05\x00\x00\x00abc", b"\xff\xff\xff\xffabcd", b"\x00\x00\x00\x00" * 2, b"\x01\x00\x00\x00ab"],
    ids=["empty", "half-length", "short", "huge", "one-too-many", "left-over"],
)
def test_row_22_grpc_bytes_tensor(fake_server: Server, blob: bytes) -> None:
    """A BYTES tensor whose lengths do not add up is INVALID_ARGUMENT."""
    request = pb.ModelInferRequest(model_name=NAME)
    request.inputs.add(name="text", datatype="BYTES", shape=[1, 1])
    request.raw_input_contents.append(blob)
    with pytest.raises(Refused) as refused:
        grpc_raw(fake_server.grpc, MODEL_INFER, request.SerializeToString())
    assert refused.value.status == "INVALID_ARGUMENT"


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "spoil",
    [
        lambda request: request.ClearField("inputs"),
        lambda request: request.inputs.add(name="text", datatype="BYTES", shape=[1]),
        lambda request: setattr(request.inputs[0], "name", "other"),
        lambda request: setattr(request.inputs[0], "datatype", "INT64"),
        lambda request: request.inputs[0].shape.append(2),
        lambda request: request.inputs[0].shape.insert(0, -1),
        lambda request: request.inputs[0].shape.insert(0, 2**62),
        lambda request: request.ClearField("raw_input_contents"),
        lambda request: request.raw_input_contents.append(b""),
        lambda request: request.inputs[0].contents.bytes_contents.append(b"x"),
        lambda request: request.outputs.add(name="other"),
        lambda request: request.parameters["truncate"].MergeFrom(pb.InferParameter(int64_param=1)),
        lambda request: request.parameters["timeout"].MergeFrom(pb.InferParameter(string_param="soon")),
        lambda request: request.parameters["timeout"].MergeFrom(pb.InferParameter(int64_param=-5)),
    ],
    ids=[
        *("no-input", "two-inputs", "name", "datatype", "shape", "negative", "overflow", "no-data", "two-blobs"),
        *("both", "output", "truncate", "timeout", "negative-timeout"),
    ],
)
def test_row_22_grpc_schema(fake_server: Server, spoil: Callable[[pb.ModelInferRequest], object]) -> None:
    """A message that does not fit the model is INVALID_ARGUMENT, whatever is wrong with it."""
    with Grpc(fake_server) as client:
        request = client.request(["x"])
    spoil(request)
    with pytest.raises(Refused) as refused:
        grpc_raw(fake_server.grpc, MODEL_INFER, request.SerializeToString())
    assert refused.value.status == "INVALID_ARGUMENT"


def test_row_22_errors_do_not_repeat_what_was_received(fake_server: Server) -> None:
    """An error names the field and the limit, never the text."""
    for body in (
        b'{"inputs": {"secret-word": 1}}',
        b'{"secret-word": 1}',
        b'{"inputs": "x", "truncate": "secret-word"}',
    ):
        assert b"secret-word" not in post_json(fake_server.http, "/embed", body).body


def test_row_23_duplicate_keys(fake_server: Server, models: Path) -> None:
    """Of duplicate keys the last wins."""
    reply = post_json(fake_server.http, "/embed", b'{"inputs": "first", "inputs": "last"}')
    np.testing.assert_allclose(reply.json(), fake_answers(models, ["last"]), atol=1e-5)


@each_transport
def test_row_24_no_inputs(fake_server: Server, transport: type[Transport]) -> None:
    """An empty list of inputs is refused."""
    with transport(fake_server) as client, pytest.raises(Refused) as refused:
        client.embed([])
    assert refused.value.status == STATUS["empty"][client.family]


@pytest.mark.sampled(6)
@each_transport
@pytest.mark.parametrize("text", ["", " ", "\t\r\n", "\u3000"], ids=["empty", "blank", "white", "ideographic"])
def test_row_25_empty_text(fake_server: Server, models: Path, transport: type[Transport], text: str) -> None:
    """A blank text is [CLS] [SEP]; so is an empty one, which TEI and OpenAI refuse and Triton answers."""
    with transport(fake_server) as client:
        if not text and client.family in {"tei", "openai"}:
            with pytest.raises(Refused, match="cannot be empty") as refused:
                client.embed([text])
            assert refused.value.status == STATUS["empty"][client.family]
            return
        answer = client.embed([text])
    np.testing.assert_allclose(answer.vectors, fake_answers(models, [text]), atol=1e-5)


MOST = {"tei": 32, "openai": 2048, "v2": 128, "grpc": 128}


@pytest.mark.sampled(3)
@each_transport
def test_row_26_most_inputs(fake_server: Server, models: Path, transport: type[Transport]) -> None:
    """As many inputs as the route takes are answered, each with its own vector."""
    with transport(fake_server) as client:
        texts = [f"text {number}" for number in range(MOST[client.family])]
        answer = client.embed(texts)
    np.testing.assert_allclose(answer.vectors, fake_answers(models, texts), atol=1e-5)


@each_transport
def test_row_26_too_many_inputs(fake_server: Server, transport: type[Transport]) -> None:
    """One input more is refused and the limit is named."""
    with transport(fake_server) as client, pytest.raises(Refused) as refused:
        client.embed(["x"] * (MOST[client.family] + 1))
    assert refused.value.status == STATUS["invalid"][client.family]
    assert str(MOST[client.family]) in refused.value.text


@pytest.mark.sampled(3)
@each_transport
def test_row_27_most_characters(fake_server: Server, transport: type[Transport]) -> None:
    """A text of 32 characters for each token of the model is still read."""
    with transport(fake_server) as client:
        assert client.embed(["x" * CHARACTERS_PER_TOKEN * MAX_LENGTH]).vectors.shape[0] == 1


@pytest.mark.sampled(2)
@each_transport
def test_row_27_too_many_characters(fake_server: Server, models: Path, transport: type[Transport]) -> None:
    """A text of megabytes is cut, told, and fails no neighbour; where nothing may be cut it is refused unread."""
    text = "x" * (CHARACTERS_PER_TOKEN * MAX_LENGTH + 1)
    with transport(fake_server) as client:
        answer = client.embed(["short", "server " * 400_000])
        np.testing.assert_allclose(answer.vectors[:1], fake_answers(models, ["short"]), atol=1e-5)
        assert truncated_tokens(answer.headers) > 100_000
        if client.family == "openai":  # which cannot ask for that
            return
        with pytest.raises(Refused) as refused:
            client.embed(["short", text], truncate=False)
    assert refused.value.status == STATUS["invalid"][client.family]
    assert str(CHARACTERS_PER_TOKEN * MAX_LENGTH) in refused.value.text


def truncated_tokens(headers: dict[str, str]) -> int:
    """The number of tokens that a reply says were cut off."""
    return int(headers.get("x-truncated-tokens") or headers["bertserve-truncated-tokens"])


@pytest.mark.sampled(6)
@each_transport
@pytest.mark.parametrize(("tokens", "cut"), [(MAX_LENGTH, 0), (MAX_LENGTH + 1, 1), (400, 400 - MAX_LENGTH)])
def test_row_28_truncation_is_exact_and_reported(
    fake_server: Server, models: Path, transport: type[Transport], tokens: int, cut: int
) -> None:
    """A text that is too long is cut to the model's length, and the reply says by how much."""
    text = words(models, tokens)
    with transport(fake_server) as client:
        answer = client.embed([text, "short"])
    assert truncated_tokens(answer.headers) == cut
    np.testing.assert_allclose(answer.vectors, fake_answers(models, [text, "short"]), atol=1e-5)


NOT_OPENAI = [kind for kind in TRANSPORTS if kind.family != "openai"]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("transport", NOT_OPENAI, ids=lambda kind: kind.name)
@pytest.mark.parametrize(("tokens", "fits"), [(MAX_LENGTH, True), (MAX_LENGTH + 1, False), (400, False)])
def test_row_28_truncation_can_be_refused(
    fake_server: Server,
    models: Path,
    transport: type[Transport],
    tokens: int,
    fits: bool,  # noqa: FBT001
) -> None:
    """With truncation off, a text that is too long is refused and its length named."""
    with transport(fake_server) as client:
        if fits:
            assert truncated_tokens(client.embed([words(models, tokens)], truncate=False).headers) == 0
            return
        with pytest.raises(Refused) as refused:
            client.embed([words(models, tokens)], truncate=False)
    assert refused.value.status == STATUS["invalid"][client.family]
    assert str(tokens) in refused.value.text


ODD = {
    "nul": "a\x00b\x00",
    "controls": "".join(map(chr, range(1, 32))) + "\x7f\x80\x9f",
    "combining": "e" + "\u0301" * 8_000,
    "emoji": "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽" * 20,
    "right-to-left": "שלום עולם \u202e مرحبا بالعالم \u202c",
    "non-characters": "\ufffe\uffff\ufdd0\U0010ffff",
    "replacement": "\ufffd" * 50,
    "byte-order": "\ufeffx\ufeff",
    "private": "\ue000\uf8ff\U000f0000",
    "separators": "a\u2028b\u2029c\u0085d\u200be",
    "special-tokens": "[CLS] [SEP] [PAD] [MASK] [UNK] ##ing",
    "one-long-word": "x" * 8_000,
    "quotes": "\"'`\\ </script> %s {0} $(x) \x1b[31m",
}


@pytest.mark.sampled(20)
@each_transport
@pytest.mark.parametrize("kind", ODD)
def test_row_29_odd_text(fake_server: Server, models: Path, transport: type[Transport], kind: str) -> None:
    """Text that is unusual but valid gets the answer of its tokens."""
    texts = ["neighbour", ODD[kind], "neighbour"]
    with transport(fake_server) as client:
        answer = client.embed(texts)
    np.testing.assert_allclose(answer.vectors, fake_answers(models, texts), atol=1e-5)


@pytest.mark.sampled(2)
@each_transport
def test_row_29_100_000_combining_marks(fake_server: Server, models: Path, transport: type[Transport]) -> None:
    """A letter with 100,000 marks is the letter, as it is with one."""
    with transport(fake_server) as client:
        answer = client.embed(["e" + "\u0301" * 100_000])
    np.testing.assert_allclose(answer.vectors, fake_answers(models, ["e\u0301"]), atol=1e-5)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("family", FIELD)
@pytest.mark.parametrize(
    "ids", [[-1], [30_522], [2**31], [2**63], [10**30], [101] * (MAX_LENGTH - 1)], ids=lambda v: str(v)[:30]
)
def test_row_30_bad_token_ids(fake_server: Server, family: str, ids: list[int]) -> None:
    """Token ids that the model does not have, and too many, never reach the engine."""
    framed = [101, *ids, 102]
    for value in (framed, [framed, [101, 102]]):
        assert post(fake_server, family, json.dumps({FIELD[family]: value}).encode()) == STATUS["invalid"][family]


@pytest.mark.parametrize("family", FIELD)
def test_row_30_good_token_ids(fake_server: Server, models: Path, family: str) -> None:
    """Token ids of the model are answered like the text they came from, alone and beside texts."""
    ids = tokenizer(models).encode("given as ids").ids
    body = json.dumps({FIELD[family]: [ids, "a text"]}).encode()
    reply = post_json(fake_server.http, ROUTES[family], body).json()
    vectors = reply if family == "tei" else [entry["embedding"] for entry in reply["data"]]
    np.testing.assert_allclose(vectors, fake_answers(models, ["given as ids", "a text"]), atol=1e-5)


NAMES = [
    "nobody",
    "MINILM",
    "minilm ",
    "..",
    "../minilm",
    "minilm/..",
    "/etc/passwd",
    "minilm\x00",
    "",
    "\uff4dinilm",
    "a" * 5000,
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name[:20]))
def test_row_32_unknown_model_grpc(fake_server: Server, name: str) -> None:
    """A name that is not exactly a served model's is NOT_FOUND and not repeated."""
    with Grpc(fake_server) as client:
        request = client.request(["x"])
    request.model_name = name
    with pytest.raises(Refused) as refused:
        grpc_raw(fake_server.grpc, MODEL_INFER, request.SerializeToString())
    assert refused.value.status == "NOT_FOUND"
    assert name == "" or name not in refused.value.text


@pytest.mark.sampled(3)
@pytest.mark.parametrize("version", ["2", "0", "01", "-1", "latest", "../1", "1 "])
def test_row_32_unknown_version_grpc(fake_server: Server, version: str) -> None:
    """A version that is not exactly the served one is NOT_FOUND."""
    with Grpc(fake_server) as client:
        request = client.request(["x"])
    request.model_version = version
    with pytest.raises(Refused) as refused:
        grpc_raw(fake_server.grpc, MODEL_INFER, request.SerializeToString())
    assert refused.value.status == "NOT_FOUND"


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "path",
    [
        *("nobody/infer", "MINILM/infer", "%2e%2e/infer", "..%2fminilm/infer", "..%2f..%2fetc%2fpasswd/infer"),
        *("minilm%00/infer", "minilm/versions/2/infer", "minilm/versions/01/infer", "minilm/versions/..%2f1/infer"),
        *("/infer", "minilm/versions//infer", "../models/minilm/infer", "%ff%fe/infer"),
    ],
)
def test_row_32_unknown_model_http(fake_server: Server, path: str) -> None:
    """The same over HTTP is 404."""
    assert post_json(fake_server.http, f"/v2/models/{path}", body_of("v2", b'"x"')).status == 404


@pytest.mark.parametrize("path", ["nobody", "minilm/versions/2", "..%2fminilm"])
def test_row_32_unknown_model_metadata(fake_server: Server, path: str) -> None:
    """Metadata of an unknown model is 404; its readiness is simply false."""
    assert get(fake_server.http, f"/v2/models/{path}").status == 404
    assert get(fake_server.http, f"/v2/models/{path}/ready").status in {400, 404}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("path", ["/embed", f"/v2/models/{NAME}/infer", "/livez", "/no/such/path"])
@pytest.mark.parametrize(
    "identity",
    ["x" * 129, "x" * 10_000, "with space", "semi;colon", 'quote"s', "\xe9", "<script>", "a\tb", "%0d%0aSet-Cookie:x"],
    ids=lambda value: value[:12],
)
def test_row_33_hostile_request_id(fake_server: Server, path: str, identity: str) -> None:
    """An id that does not belong into a log is replaced by one of our own."""
    body = None if path == "/livez" else body_of("v2" if "v2" in path else "tei", b'"x"')
    headers = {"X-Request-Id": identity, "Content-Type": "application/json"}
    reply = http_call(fake_server.http, "GET" if body is None else "POST", path, body, headers)
    assert reply.status == (404 if "such" in path else 200)
    assert reply.headers["x-request-id"] not in {identity, ""}
    assert identity not in fake_server.log


def test_row_33_newline_in_a_request_id(fake_server: Server) -> None:
    """An id cannot smuggle a header or a line: the parser refuses a bare line feed or starts a new header there."""
    with Grpc(fake_server) as client:
        request = client.request(["x"])
        request.id = "first\nFAKE LOG LINE " + "y" * 10_000
        assert client.infer(request).outputs
    assert "FAKE LOG LINE" not in fake_server.log


def test_row_33_harmless_request_id(fake_server: Server) -> None:
    """A harmless id comes back as it was given."""
    identity = "trace-0123456789abcdef/01.AB:c_d+e=f@g"
    reply = post_json(fake_server.http, "/embed", b'{"inputs": "x"}', {"X-Request-Id": identity})
    assert reply.headers["x-request-id"] == identity


def test_request_ids_of_our_own_differ(fake_server: Server) -> None:
    """Without an id from the client, each request gets one of its own."""
    seen = {post_json(fake_server.http, "/embed", b'{"inputs": "x"}').headers["x-request-id"] for _ in range(5)}
    assert len(seen) == 5
