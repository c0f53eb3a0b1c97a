"""Rows 16 to 33 of the failure modes: input that cannot be parsed, breaks the schema or a limit, or only looks odd."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
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


def nested(depth: int, family: str) -> bytes:
    """A request whose free parameters hold lists in lists."""
    return body_of(family, b'"x"')[:-1] + b',"parameters":{"anything":' + b"[" * depth + b"]" * depth + b"}}"


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


BODIES: dict[str, tuple[dict[str, Make], Iterable[str], Callable[[str], set[object]]]] = {
    # Bodies, the families of routes that get them, and the statuses that these may answer.
    "16 to 18": (MALFORMED, ROUTES, lambda family: {STATUS["malformed"][family]}),
    "18": ({"surrogate pair": lambda family: body_of(family, rb'"\ud83d\ude00"')}, ROUTES, lambda _: {200}),
    "19 and 20": (NO_TEXTS, ROUTES, lambda _: {400, 422}),
    # Deep nesting is no danger where the schema takes any value.
    "20": ({f"{depth} free": partial(nested, depth) for depth in (100, 100_000)}, ["v2"], lambda _: {200, 400}),
    "22 and 30": (INVALID, FIELD, lambda family: {STATUS["invalid"][family]}),
}


@pytest.mark.sampled(60)
@pytest.mark.parametrize(
    ("rows", "case", "family"),
    [(rows, case, family) for rows, (bodies, families, _) in BODIES.items() for case in bodies for family in families],
)
def test_rows_16_to_22_and_30_bodies(fake_server: Server, rows: str, case: str, family: str) -> None:
    """What is no JSON, no text or no valid request is refused by every family of routes."""
    bodies, _, statuses = BODIES[rows]
    assert post(fake_server, family, bodies[case](family)) in statuses(family)


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


BLOB = b"\x02\x00\x00\x00\xff\xfe"
NOT_UTF8_TENSOR = {"name": "text", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(BLOB)}}
HEAD = json.dumps({"inputs": [NOT_UTF8_TENSOR]}).encode()


@pytest.mark.parametrize(
    ("body", "length"),
    [
        *[(json.dumps({"inputs": [TENSOR]}).encode(), length) for length in ("-1", "x", "1e2", "99999", "", "+5")],
        pytest.param(HEAD + BLOB, str(len(HEAD)), id="17 not UTF-8"),
    ],
)
def test_rows_17_and_22_behind_the_json_of_v2(fake_server: Server, body: bytes, length: str) -> None:
    """A length of the JSON part that is no number within the body is 400, and so is binary text that is not UTF-8."""
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


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("field", "name"),
    [
        *[("model_name", name) for name in [*NAMES, "a" * 5000]],
        *[("model_version", version) for version in ("2", "0", "01", "-1", "latest", "../1", "1 ")],
    ],
    ids=lambda value: repr(value[:20]),
)
def test_row_32_unknown_model_grpc(fake_server: Server, field: str, name: str) -> None:
    """A name or version that is not exactly a served one is NOT_FOUND; a name is not repeated."""
    refused = refusal_of(fake_server, lambda request: setattr(request, field, name))
    assert refused.status == "NOT_FOUND"
    assert field == "model_version" or name.strip() in {"", NAME} or name not in refused.text  # what is served is told


@pytest.mark.parametrize(
    "group", [b"\x0b" * 100_000, b"\x3a\x80" * 1000, b"\xff" * 64], ids=["groups", "field", "ones"]
)
def test_row_21_malformed_protobuf(fake_server: Server, group: bytes) -> None:
    """Bytes that are no message are INVALID_ARGUMENT and say nothing of the server's insides."""
    with pytest.raises(Refused) as refused:
        grpc_raw(fake_server.grpc, MODEL_INFER, group)
    assert refused.value.status == "INVALID_ARGUMENT"
    assert "Error" not in refused.value.text


MOST = 2048
"""As many inputs as a request takes."""
ANSWERED: dict[str, Callable[[int], list[str]]] = {
    # Row 25: a blank text is [CLS] [SEP].
    **{
        f"25 {name}": lambda _, text=text: [text]
        for name, text in {"blank": " ", "white": "\t\r\n", "wide": "\u3000"}.items()
    },
    "26 as many as are taken": lambda most: [f"text {number}" for number in range(most)],
    # Row 29: what is unusual but valid gets the answer of its tokens.
    **{
        f"29 {name}": lambda _, text=text: ["neighbour", text, "neighbour"]
        for name, text in {
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
        }.items()
    },
}


@pytest.mark.sampled(25)
@each_transport
@pytest.mark.parametrize("case", ANSWERED)
def test_rows_25_to_29_odd_texts_are_answered(
    fake_server: Server, models: Path, transport: type[Transport], case: str
) -> None:
    """Each text of a request gets its own vector."""
    with transport(fake_server) as client:
        texts = ANSWERED[case](MOST)
        answer = client.embed(texts)
    np.testing.assert_allclose(answer.vectors, fake_answers(models, texts), atol=1e-5)


@pytest.mark.sampled(3)
@each_transport
def test_row_25_empty_text(fake_server: Server, models: Path, transport: type[Transport]) -> None:
    """TEI and OpenAI refuse an empty text, Triton answers it as a blank one."""
    with transport(fake_server) as client:
        if client.family in {"tei", "openai"}:
            with pytest.raises(Refused, match="cannot be empty") as refused:
                client.embed([""])
            assert refused.value.status == STATUS["empty"][client.family]
        else:
            np.testing.assert_allclose(client.embed([""]).vectors, fake_answers(models, [""]), atol=1e-5)


@pytest.mark.sampled(7)
@each_transport
@pytest.mark.parametrize(("surplus", "status"), [(None, "empty"), (1, "invalid")], ids=["none", "one too many"])
def test_rows_24_and_26_numbers_of_inputs(
    fake_server: Server, transport: type[Transport], surplus: int | None, status: str
) -> None:
    """No inputs are refused, and one more than are taken, with the limit."""
    with transport(fake_server) as client, pytest.raises(Refused) as refused:
        client.embed([] if surplus is None else ["x"] * (MOST + surplus))
    assert refused.value.status == STATUS[status][client.family]
    assert surplus is None or str(MOST) in refused.value.text


@pytest.mark.sampled(3)
@each_transport
def test_row_27_most_characters(fake_server: Server, models: Path, transport: type[Transport]) -> None:
    """A text of 32 characters for each token of the model is still read; a letter with 100,000 marks is the letter."""
    with transport(fake_server) as client:
        assert client.embed(["x" * CHARACTERS_PER_TOKEN * MAX_LENGTH]).vectors.shape[0] == 1
        marked = client.embed(["e" + "\u0301" * 100_000]).vectors
    np.testing.assert_allclose(marked, fake_answers(models, ["e\u0301"]), atol=1e-5)


def truncated_tokens(headers: dict[str, str]) -> int:
    """The number of tokens that a reply says were cut off."""
    return int(headers.get("x-truncated-tokens") or headers["bertserve-truncated-tokens"])


LONG: dict[str, tuple[Callable[[Path], str], Callable[[int], bool], int]] = {
    # A text, whether as many tokens are cut off as are told, and the number that its refusal names.
    **{
        f"28 {tokens} tokens": (partial(words, tokens=tokens), (tokens - MAX_LENGTH).__eq__, tokens)
        for tokens in (MAX_LENGTH + 1, 400)
    },
    "27 megabytes": (lambda _: "server " * 400_000, (100_000).__lt__, CHARACTERS_PER_TOKEN * MAX_LENGTH),
}


@pytest.mark.sampled(8)
@each_transport
@pytest.mark.parametrize("case", LONG)
def test_rows_27_and_28_truncation_is_exact_and_reported(
    fake_server: Server, models: Path, transport: type[Transport], case: str
) -> None:
    """A text that is too long is cut, told and fails no neighbour; where nothing may be cut it is refused."""
    make, is_told, named = LONG[case]
    text = make(models)
    with transport(fake_server) as client:
        answer = client.embed([text, "short"])
        assert is_told(truncated_tokens(answer.headers))
        kept = text if case.startswith("28") else text[: 8 * MAX_LENGTH]
        np.testing.assert_allclose(answer.vectors, fake_answers(models, [kept, "short"]), atol=1e-5)
        if client.family == "openai":  # which cannot ask for that
            return
        with pytest.raises(Refused) as refused:
            client.embed(["short", text], truncate=False)
    assert refused.value.status == STATUS["invalid"][client.family]
    assert str(named) in refused.value.text


@pytest.mark.sampled(2)
@each_transport
def test_row_28_a_text_that_just_fits_is_not_cut(fake_server: Server, models: Path, transport: type[Transport]) -> None:
    text = words(models, MAX_LENGTH)
    with transport(fake_server) as client:
        for answer in (
            client.embed([text]),
            client.embed([text], truncate=None if client.family == "openai" else False),
        ):
            assert truncated_tokens(answer.headers) == 0
            np.testing.assert_allclose(answer.vectors, fake_answers(models, [text]), atol=1e-5)


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


def test_row_33_request_ids(fake_server: Server) -> None:
    """A harmless one comes back as it was given, a message's forges no line, and without one each gets its own."""

    def identity_of(**headers: str) -> str:
        return post_json(fake_server.http, "/embed", b'{"inputs": "x"}', headers).headers["x-request-id"]

    harmless = "trace-0123456789abcdef/01.AB:c_d+e=f@g"
    assert identity_of(**{"X-Request-Id": harmless}) == harmless
    assert len({identity_of() for _ in range(5)}) == 5
    with Grpc(fake_server) as client:
        request = client.request(["x"])
        request.id = "first\nFAKE LOG LINE " + "y" * 10_000
        assert client.infer(request).outputs
    assert "FAKE LOG LINE" not in fake_server.log
