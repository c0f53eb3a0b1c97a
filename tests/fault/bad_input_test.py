"""Rows 16 to 33 of the failure modes: input that cannot be parsed, breaks the schema or a limit, or only looks odd."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
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


def json_of(family: str, inputs: object, **more: object) -> bytes:
    return json.dumps({FIELD[family]: inputs, **more}).encode()


Make = Callable[[str], bytes]
BRACKETS = {"lists": (b"[", b"]"), "objects": (b'{"x":', b"}")}
MALFORMED: dict[str, Make] = {
    # Row 16: what is not exactly one JSON document.
    "empty": lambda _: b"",
    "prose": lambda _: b"not json",
    "nul": lambda _: b"\x00",
    "brace": lambda family: body_of(family, b'"x"')[:1],
    "cut": lambda family: body_of(family, b'"x"')[:-1],
    "second brace": lambda family: body_of(family, b'"x"') + b"}",
    "trailing": lambda family: body_of(family, b'"x"') + b" trailing",
    "twice": lambda family: body_of(family, b'"x"') * 2,
    "quotes": lambda family: body_of(family, b'"x"').replace(b'"', b"'"),
    "comma": lambda family: body_of(family, b'"x"')[:-1] + b",}",
    # Row 17: another encoding than plain UTF-8.
    "invalid": lambda family: body_of(family, b'"\xff\xfe"'),
    "surrogate bytes": lambda family: body_of(family, b'"\xed\xa0\x80"'),
    "overlong": lambda family: body_of(family, b'"\xc0\xaf"'),
    "utf-16": lambda family: body_of(family, b'"word"').decode().encode("utf-16"),
    "utf-32": lambda family: body_of(family, b'"word"').decode().encode("utf-32"),
    "bom": lambda family: b"\xef\xbb\xbf" + body_of(family, b'"word"'),
    # Row 18: an escaped lone surrogate, of which no encoding exists.
    "lone surrogate": lambda family: body_of(family, rb'"\ud800"'),
    "low surrogate": lambda family: body_of(family, rb'"\udc00 x"'),
    "two high surrogates": lambda family: body_of(family, rb'"\ud800\ud800"'),
    "surrogate in capitals": lambda family: body_of(family, rb'"\uD83D"'),
}
NO_TEXTS: dict[str, Make] = {
    # Row 19: numbers where texts are expected, and numbers that no type holds.
    **{
        name: partial(body_of, text=literal)
        for name, literal in {
            **{text: text.encode() for text in ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1.5", "-0")},
            "5000 digits": b"1" * 5000,
            "listed": b"[" + b"9" * 5000 + b"]",
        }.items()
    },
    # Row 20: nesting, however deep.
    **{
        f"{depth} {name}": partial(body_of, text=opening * depth + b'"x"' + closing * depth)
        for depth in (100, 100_000)
        for name, (opening, closing) in BRACKETS.items()
    },
}
INVALID: dict[str, Make] = {
    # Row 22: a field's name that is misspelt, a wrong type or a value out of range.
    "misspelt": lambda family: json_of(family, "x", dimension=5, dimensons=5),
    **{f"dimensions {size!r}": partial(json_of, inputs="x", dimensions=size) for size in ("5", 5.5, 0, 385, -1)},
    # Inputs that are neither texts nor token ids.
    **{
        str(value): partial(json_of, inputs=value)
        for value in (None, 5, True, {}, {"texts": "x"}, [None], ["x", None], ["x", 5], [["x"]], [[1.5]])
    },
    # A body without its one field.
    **{f"body {body}": lambda _, body=body: body.encode() for body in ("{}", "[]", '"x"', "5", "null")},
    # Row 30: token ids that the model does not have, and too many, alone and beside others.
    **{
        f"ids {str(ids)[:30]}{' beside others' * listed}": partial(
            json_of, inputs=[[101, *ids, 102], [101, 102]] if listed else [101, *ids, 102]
        )
        for ids in ([-1], [30_522], [2**31], [2**63], [10**30], [101] * (MAX_LENGTH - 1))
        for listed in (False, True)
    },
}


@pytest.mark.sampled(20)
@each_route
@pytest.mark.parametrize("case", MALFORMED)
def test_rows_16_to_18_malformed_bodies(fake_server: Server, family: str, case: str) -> None:
    assert post(fake_server, family, MALFORMED[case](family)) == STATUS["malformed"][family]


@pytest.mark.sampled(13)
@each_route
@pytest.mark.parametrize("case", NO_TEXTS)
def test_rows_19_and_20_what_is_no_text(fake_server: Server, family: str, case: str) -> None:
    assert post(fake_server, family, NO_TEXTS[case](family)) in {400, 422}


@pytest.mark.sampled(22)
@pytest.mark.parametrize("family", FIELD)
@pytest.mark.parametrize("case", INVALID)
def test_rows_22_and_30_invalid_requests(fake_server: Server, family: str, case: str) -> None:
    assert post(fake_server, family, INVALID[case](family)) == STATUS["invalid"][family]


def test_row_17_not_utf8_in_a_binary_tensor(fake_server: Server) -> None:
    """The same behind the JSON of a v2 request is 400."""
    blob = b"\x02\x00\x00\x00\xff\xfe"
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(blob)}}
    head = json.dumps({"inputs": [tensor]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    assert http_call(fake_server.http, "POST", ROUTES["v2"], head + blob, headers).status == 400


@each_route
def test_row_18_surrogate_pair(fake_server: Server, family: str) -> None:
    """An escaped surrogate pair is the character that it means."""
    assert post(fake_server, family, body_of(family, rb'"\ud83d\ude00"')) == 200


@pytest.mark.parametrize("depth", [100, 100_000])
def test_row_20_nesting_in_free_parameters(fake_server: Server, depth: int) -> None:
    """Deep nesting is no danger where the schema takes any value."""
    deep = b"[" * depth + b"]" * depth
    body = body_of("v2", b'"x"')[:-1] + b',"parameters":{"anything":' + deep + b"}}"
    assert post(fake_server, "v2", body) in {200, 400}


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


def raw(*blobs: bytes) -> Callable[[pb.ModelInferRequest], object]:
    def spoil(request: pb.ModelInferRequest) -> None:
        del request.raw_input_contents[:]
        request.raw_input_contents.extend(blobs)

    return spoil


def contents(value: bytes) -> Callable[[pb.ModelInferRequest], object]:
    """Gives the text in the tensor and not behind it."""

    def spoil(request: pb.ModelInferRequest) -> None:
        del request.raw_input_contents[:]
        request.inputs[0].contents.bytes_contents.append(value)

    return spoil


NOT_UTF8 = {"invalid": b"\xff\xfe", "surrogate": b"\xed\xa0\x80", "overlong": b"\xc0\xaf"}
SPOILED: dict[str, Callable[[pb.ModelInferRequest], object]] = {
    # Row 17: a BYTES element that is not UTF-8.
    **{f"{name}, raw": raw(bytes([len(text), 0, 0, 0]) + text) for name, text in NOT_UTF8.items()},
    **{f"{name}, contents": contents(text) for name, text in NOT_UTF8.items()},
    # Row 22: a BYTES tensor whose lengths do not add up.
    "empty": raw(b""),
    "half a length": raw(b"\x01"),
    "short": raw(b"\x05\x00\x00\x00abc"),
    "huge": raw(b"\xff\xff\xff\xffabcd"),
    "one too many": raw(b"\x00\x00\x00\x00" * 2),
    "left over": raw(b"\x01\x00\x00\x00ab"),
    # A message that does not fit the model.
    "no input": lambda request: request.ClearField("inputs"),
    "two inputs": lambda request: request.inputs.add(name="text", datatype="BYTES", shape=[1]),
    "name": lambda request: setattr(request.inputs[0], "name", "other"),
    "datatype": lambda request: setattr(request.inputs[0], "datatype", "INT64"),
    "shape": lambda request: request.inputs[0].shape.append(2),
    "negative": lambda request: request.inputs[0].shape.insert(0, -1),
    "overflow": lambda request: request.inputs[0].shape.insert(0, 2**62),
    "no data": lambda request: request.ClearField("raw_input_contents"),
    "two blobs": lambda request: request.raw_input_contents.append(b""),
    "both": lambda request: request.inputs[0].contents.bytes_contents.append(b"x"),
    "output": lambda request: request.outputs.add(name="other"),
    "truncate": lambda request: request.parameters["truncate"].MergeFrom(pb.InferParameter(int64_param=1)),
    "timeout": lambda request: request.parameters["timeout"].MergeFrom(pb.InferParameter(string_param="soon")),
    "late": lambda request: request.parameters["timeout"].MergeFrom(pb.InferParameter(int64_param=-5)),
}


def refusal_of(server: Server, spoil: Callable[[pb.ModelInferRequest], object]) -> Refused:
    """Why a message is refused that was good before."""
    with Grpc(server) as client:
        request = client.request(["x"])
    spoil(request)
    with pytest.raises(Refused) as refused:
        grpc_raw(server.grpc, MODEL_INFER, request.SerializeToString())
    return refused.value


@pytest.mark.sampled(16)
@pytest.mark.parametrize("case", SPOILED)
def test_rows_17_and_22_invalid_messages(fake_server: Server, case: str) -> None:
    assert refusal_of(fake_server, SPOILED[case]).status == "INVALID_ARGUMENT"


NAMES = ["nobody", "MINILM", "minilm ", "..", "../minilm", "minilm/..", "/etc/passwd", "minilm\x00", "", "\uff4dinilm"]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", [*NAMES, "a" * 5000], ids=lambda name: repr(name[:20]))
def test_row_32_unknown_model_grpc(fake_server: Server, name: str) -> None:
    """A name that is not exactly a served model's is NOT_FOUND and not repeated."""
    refused = refusal_of(fake_server, lambda request: setattr(request, "model_name", name))
    assert refused.status == "NOT_FOUND"
    assert name.strip() in {"", NAME} or name not in refused.text  # what is served is told


@pytest.mark.sampled(3)
@pytest.mark.parametrize("version", ["2", "0", "01", "-1", "latest", "../1", "1 "])
def test_row_32_unknown_version_grpc(fake_server: Server, version: str) -> None:
    refused = refusal_of(fake_server, lambda request: setattr(request, "model_version", version))
    assert refused.status == "NOT_FOUND"


@pytest.mark.parametrize(
    "group", [b"\x0b" * 100_000, b"\x3a\x80" * 1000, b"\xff" * 64], ids=["groups", "field", "ones"]
)
def test_row_21_malformed_protobuf(fake_server: Server, group: bytes) -> None:
    """Bytes that are no message are INVALID_ARGUMENT and say nothing of the server's insides."""
    with pytest.raises(Refused) as refused:
        grpc_raw(fake_server.grpc, MODEL_INFER, group)
    assert refused.value.status == "INVALID_ARGUMENT"
    assert "Error" not in refused.value.text


@each_transport
def test_row_24_no_inputs(fake_server: Server, transport: type[Transport]) -> None:
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


@pytest.mark.sampled(8)
@each_transport
@pytest.mark.parametrize(("tokens", "cut"), [(MAX_LENGTH, 0), (MAX_LENGTH + 1, 1), (400, 400 - MAX_LENGTH)])
def test_row_28_truncation_is_exact_and_reported(
    fake_server: Server, models: Path, transport: type[Transport], tokens: int, cut: int
) -> None:
    """A text that is too long is cut to the model's length, or refused where that is asked for; its length is told."""
    text = words(models, tokens)
    with transport(fake_server) as client:
        answer = client.embed([text, "short"])
        assert truncated_tokens(answer.headers) == cut
        np.testing.assert_allclose(answer.vectors, fake_answers(models, [text, "short"]), atol=1e-5)
        if client.family == "openai":  # which cannot ask for that
            return
        if not cut:
            assert truncated_tokens(client.embed([text], truncate=False).headers) == 0
            return
        with pytest.raises(Refused) as refused:
            client.embed([text], truncate=False)
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


@pytest.mark.parametrize("family", FIELD)
def test_row_30_good_token_ids(fake_server: Server, models: Path, family: str) -> None:
    """Token ids of the model are answered like the text they came from, alone and beside texts."""
    ids = tokenizer(models).encode("given as ids").ids
    body = json.dumps({FIELD[family]: [ids, "a text"]}).encode()
    reply = post_json(fake_server.http, ROUTES[family], body).json()
    vectors = reply if family == "tei" else [entry["embedding"] for entry in reply["data"]]
    np.testing.assert_allclose(vectors, fake_answers(models, ["given as ids", "a text"]), atol=1e-5)


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
