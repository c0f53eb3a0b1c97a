from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertserve.serving.errors import BertserveError, InvalidRequest, MalformedRequest
from bertserve.serving.fields.rule import near_names
from bertserve.serving.http.apis.cohere_messages import RankingRequest
from bertserve.serving.http.apis.huggingface import ClassifyRequest, TextPair
from bertserve.serving.http.apis.oip_messages import InferMessage
from bertserve.serving.http.apis.openai_messages import EmbeddingsRequest
from bertserve.serving.http.apis.tei import text_inputs
from bertserve.serving.http.apis.tei_messages import EmbedRequest, RerankRequest
from bertserve.serving.http.decoding import JsonDecoder
from bertserve.serving.http.exchange import HttpRequest
from tests.support.fuzzing import each

MESSAGES = [EmbedRequest, EmbeddingsRequest, InferMessage]
MARKER = "sEcReT"
M = TypeVar("M", bound=msgspec.Struct)


def refusal(data: bytes, kind: type[msgspec.Struct] = EmbedRequest) -> BertserveError:
    """The error that some bytes are answered with."""
    with pytest.raises(BertserveError) as refused:
        JsonDecoder(kind).decode(data)
    return refused.value


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "JSON: Input is a zero-length, empty document at byte 0"),
        (b'{"inputs": "a"', "JSON: unexpected end of data at byte 14"),
        (b'{"inputs": "a"} and more', 'JSON: unexpected content after document at byte 16, found "a"'),
        (b"{'inputs': 'a'}", """JSON: unexpected character, expected a string key at byte 1, found "'\""""),
        (b'{"inputs": NaN}', 'JSON: unexpected character, expected a JSON value at byte 11, found "N"'),
        ('{"inputs": "é" "a"}'.encode(), "JSON: unexpected character, expected ',' or '}' at byte 16, found \"\\\"\""),
        (b'{"inputs": "a\nb"}', 'JSON: unexpected control character in string at byte 13, found "\\n"'),
        (b"\xef\xbb\xbf{}", 'JSON: UTF-8 byte order mark (BOM) is not supported at byte 0, found "\\ufeff"'),
        (b'{"inputs": "\xff"}', "UTF-8: unexpected 0xff at byte 12"),
        ('{"inputs": "a"}'.encode("utf-16"), "UTF-8: unexpected 0xff at byte 0"),
        (b"[" * 100_000, 'JSON: depth limit exceeded at byte 1025, found "["'),
    ],
    ids=lambda value: repr(value[:20]) if isinstance(value, bytes) else "",
)
def test_what_is_not_json_in_utf_8_says_where_and_why(data: bytes, message: str) -> None:
    """400, with what was expected and what was found."""
    error = refusal(data)
    assert type(error) is MalformedRequest
    assert error.message == f"the body is not valid {message}"


@pytest.mark.parametrize(
    ("data", "kind", "whose"),
    [
        (b'{"inputs": "\\ud83d"}', EmbedRequest, "the text at `$.inputs` has half of a surrogate pair (at byte 12)"),
        (b'{"inputs": ["ok", "cut \\ud83d"]}', EmbedRequest, "the text at `$.inputs[1]` has"),
        (b'{"inputs": ["\\ud83d\\ude00", "\\ude00", "\\ude00"]}', EmbedRequest, "the text at `$.inputs[1]` has"),
        (b'{"secret": {"text": ["\\ud83da"]}}', EmbedRequest, "the text at `$[...][...][0]` has"),
        (b'{"inputs": [%b"\\ud83d"]}' % (b'"a", ' * 40_000), EmbedRequest, "the text at `$.inputs[40000]` has"),
        (b'{"\\ud83d": 1}', EmbedRequest, "a text has"),
        (b'{"inputs": [], "parameters": {"a": [%b"\\ud83d"]}}' % (b"1," * 200_000), InferMessage, "a text has"),
    ],
    ids=range(7),
)
def test_a_text_that_was_cut_inside_of_a_character_is_named(data: bytes, kind: Any, whose: str) -> None:
    """By its place, as far as it can be found in moderate time; of unknown fields without their names."""
    error = refusal(data, kind)
    assert type(error) is MalformedRequest
    assert error.message.startswith(whose)


def test_values_nested_without_end_are_malformed() -> None:
    """Where anything may stand, too: the decoder's own limit is an error of the client's."""
    error = refusal(b'{"inputs": [], "parameters": {"a": ' + b"[" * 100_000, InferMessage)
    assert type(error) is MalformedRequest


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[]", "expected `object`, got `array`"),
        (b"{}", "object missing required field `inputs`"),
        (b'{"inputs": {}}', "expected `str | array`, got `object` (at `$.inputs`)"),
        (b'{"inputs": [[1], ["a"]]}', "expected `int`, got `str` (at `$.inputs[1][0]`)"),
        (b'{"inputs": "a", "normalize": 1}', "expected `bool | null`, got `int` (at `$.normalize`)"),
        (b'{"inputs": "a", "dimensions": 1.5}', "expected `int | null`, got `float` (at `$.dimensions`)"),
        (
            b'{"inputs": "a", "truncation_direction": "up"}',
            "invalid value (at `$.truncation_direction`); allowed: Left, Right, left, right",
        ),
    ],
    ids=lambda value: value[:30] if isinstance(value, bytes) else "",
)
def test_json_of_another_shape_is_told_what_was_expected_and_where(data: bytes, message: str) -> None:
    """422, with the place and the types."""
    error = refusal(data)
    assert type(error) is InvalidRequest
    assert error.message == message


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            b'{"inputs": "a", "parameters": {"topk": 1}}',
            'unknown field "topk" (at `$.parameters`); did you mean "top_k"?',
        ),
        (
            b'{"inputs": "a", "parameters": {"function_to_apply": "relu"}}',
            "invalid value (at `$.parameters.function_to_apply`); allowed: none, sigmoid, softmax",
        ),
    ],
    ids=["a slip", "a value"],
)
def test_a_field_is_refused_at_its_own_place(data: bytes, message: str) -> None:
    """Inside of an object its own fields are the known ones; of a value that is not allowed those that are."""
    assert refusal(data, ClassifyRequest).message == message


def read(kind: type[M], body: object) -> tuple[M, str]:
    """A message by the rule for fields, and what the reply would name."""
    request = HttpRequest("POST", "/", {}, b"", "id", 0.0)
    message = JsonDecoder(kind).decode(json.dumps(body).encode(), request)
    return message, str(request.ignored or "")


def test_a_field_that_nobody_documents_is_passed_over_and_named() -> None:
    """At every level; eight names that are harmless in a header, each once, and the number of the others."""
    message, named = read(ClassifyRequest, {"inputs": [{"text": "a", "x-1": {}}], "parameters": {"y.2": [1], "x-1": 0}})
    assert (message.inputs, named) == ([TextPair("a")], "x-1, y.2")
    odd = dict.fromkeys(["", "é", "a b", "a\r\nb", "x" * 65], 1)
    _, named = read(EmbedRequest, {"inputs": "a", **odd, **{f"z{number}": 1 for number in range(100)}})
    assert named == "z0, z1, z2, z3, z4, z5, z6, z7, +97"
    assert read(EmbedRequest, {"inputs": "a", "x" * 64: 1})[1] == "x" * 64


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (EmbedRequest, {"inputs": "a", "normalise": True}),
        (EmbedRequest, {"inputs": "a", "normalise": True, "normalize": None}),
        (EmbeddingsRequest, {"input": "a", "encodingFormat": "base64"}),
        (RankingRequest, {"query": "a", "documents": [], "topN": 1}),
        (ClassifyRequest, {"inputs": "a", "paramaters": {}}),
        (RerankRequest, {"query": "a", "text": []}),
    ],
)
def test_a_field_that_resembles_an_absent_one_is_refused(kind: type[msgspec.Struct], body: object) -> None:
    """It is likely to mean that."""
    with pytest.raises(InvalidRequest, match="did you mean"):
        read(kind, body)


@pytest.mark.parametrize(
    ("kind", "body", "named"),
    [
        (
            EmbedRequest,
            {"inputs": "a", "normalise": True, "normalize": True},
            "normalise",
        ),  # what it resembles is there
        (EmbedRequest, {"inputs": "a", "normalise": None}, "normalise"),  # it asks for nothing
        (EmbedRequest, {"inputs": "a", "dimension": 8}, "dimension"),  # a word of another's
        (RerankRequest, {"query": "a", "texts": [], "top_k": 1}, "top_k"),
        (RerankRequest, {"query": "a", "texts": [], "text": "b"}, "text"),
    ],
)
def test_a_word_of_its_own_is_not_taken_for_another(kind: type[msgspec.Struct], body: object, named: str) -> None:
    """Nothing is refused that is not a slip of the pen."""
    assert read(kind, body)[1] == named


def test_a_request_of_many_strange_names_is_read_at_once() -> None:
    """Only the first of them are compared with those that are known."""
    body = {"inputs": "a"} | {f"truncation_directiom{number}": 1 for number in range(100, 50_000)}
    with pytest.raises(InvalidRequest, match="did you mean"):
        read(EmbedRequest, body)
    body = {"inputs": "a", "truncation_direction": "left"} | {f"truncation_directiom{n}": 1 for n in range(50_000)}
    near_names.cache_clear()
    assert read(EmbedRequest, body)[1].endswith("+49992")
    assert near_names.cache_info().misses <= 16, "all of them would take minutes"


@pytest.mark.parametrize(
    "body",
    [b'{"inputs": "a", "x": 1e999}', b'{"inputs": "a", "x": 1' + b"0" * 5000 + b"}"],
    ids=["float", "integer"],
)
def test_a_number_that_nothing_holds_is_refused_where_nobody_reads_it(body: bytes) -> None:
    """What is passed over is JSON all the same."""
    request = HttpRequest("POST", "/", {}, b"", "id", 0.0)
    with pytest.raises(InvalidRequest, match="a number in the body is out of range"):
        JsonDecoder(EmbedRequest).decode(body, request)


@pytest.mark.parametrize(
    ("data", "inputs"), [(b'{"inputs": "a", "inputs": "b"}', "b"), (memoryview(b'{"inputs": "a"}'), "a")]
)
def test_what_is_read(data: bytes, inputs: str) -> None:
    """Of equal keys the last, as in most decoders and every part of the server; a view of a buffer without a copy."""
    assert JsonDecoder(EmbedRequest).decode(data).inputs == inputs


marked = st.sampled_from([MARKER, f"`{MARKER}`", f"Expected `{MARKER}`", f" - at `{MARKER}`", f"x{MARKER}\n"])
keys = marked | st.sampled_from(
    [
        *sorted({field.encode_name for kind in MESSAGES for field in msgspec.structs.fields(kind)}),
        *("name", "datatype", "shape", "data", "binary_data", "binary_data_size"),
    ]
)
scalars = marked | st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)


def assert_no_echo(kind: type[msgspec.Struct], data: bytes, *, is_json: bool = False) -> None:
    """Decodes, and looks for the marker in the answer if that is a refusal, which JSON gets for its shape alone."""
    for request in (None, HttpRequest("POST", "/", {}, b"", "id", 0.0)):
        try:
            message = JsonDecoder(kind).decode(data, request)
            if isinstance(message, EmbedRequest):
                text_inputs(message.inputs)
        except BertserveError as error:
            assert MARKER not in error.message  # noqa: PT017  most messages are refused, some are not
            assert isinstance(error, InvalidRequest)  # noqa: PT017  likewise
            assert error.message  # noqa: PT017  likewise
            assert not (is_json and isinstance(error, MalformedRequest))  # noqa: PT017  likewise


@pytest.mark.parametrize("examples", [400, pytest.param(20_000, marks=pytest.mark.endurance)])
def test_no_refusal_repeats_what_was_received(examples: int) -> None:
    """Neither a key nor a value: logs and error pages must not carry other people's texts."""

    def check(value: Any) -> None:
        body = json.dumps(value).encode()
        for kind in MESSAGES:
            assert_no_echo(kind, body, is_json=b"Infinity" not in body)

    each(st.dictionaries(keys, values, max_size=6) | values, examples, check)


@pytest.mark.parametrize("kind", MESSAGES)
@given(junk=st.binary(max_size=40), at=st.integers(0, 60))
@settings(max_examples=200)
def test_no_refusal_of_damaged_json_repeats_it(kind: type[msgspec.Struct], junk: bytes, at: int) -> None:
    """Bytes that stand in the middle of a good message are an error of the client's, and are not shown."""
    message = json.dumps({"inputs": [MARKER] * 3, MARKER: {"deep": [MARKER]}}).encode()
    assert_no_echo(kind, message[:at] + junk + message[at:])


_LARGE = 4 << 20


def _decoded(body: bytes) -> EmbedRequest:
    async def decoded() -> EmbedRequest:
        return await JsonDecoder(EmbedRequest).decode_in_turn(body, asyncio.Lock())

    return asyncio.run(decoded())


def _filled(begin: bytes, element: bytes, end: bytes) -> bytes:
    """A body of the largest size, of as many elements as it holds."""
    count = (_LARGE - len(begin) - len(end)) // len(element)
    return begin + (element * count).rstrip(b",") + end


@pytest.mark.parametrize(
    "element", [b"[],", b"[1],", b'"",', b'"aa",', b"{},", b"null,", b'"\\"",', b'"\\\\",', b"[] ,", b"1,"]
)
def test_a_body_of_too_many_elements_is_refused_before_it_is_decoded(element: bytes) -> None:
    """Decoded, it would hold the event loop for 0.2 s and 150 MB; the reason says what would be right."""
    with pytest.raises(InvalidRequest, match=r"more than 100000 texts and lists, .* send fewer"):
        _decoded(_filled(b'{"inputs": [', element, b"]}"))


def test_one_large_body_is_looked_through_at_a_time_a_piece_in_each_turn() -> None:
    """Others have the event loop in between, and what comes behind it waits, however soon it would be refused."""
    honest, refused = (_filled(b'{"inputs": [', element, b"]}") for element in (b"12345,", b"[],"))
    ended: list[str] = []

    async def look() -> int:
        large_body_lock, turns = asyncio.Lock(), 0

        async def decode(name: str, body: bytes) -> None:
            with contextlib.suppress(InvalidRequest):
                await JsonDecoder(EmbedRequest).decode_in_turn(body, large_body_lock)
            ended.append(name)

        tasks = [asyncio.create_task(decode("honest", honest)), asyncio.create_task(decode("refused", refused))]
        while not ended:
            turns += 1
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        return turns

    assert asyncio.run(look()) >= len(honest) // 65_536
    assert ended == ["honest", "refused"]


@pytest.mark.parametrize(
    ("element", "count"),
    [
        (b"12345,", None),  # token ids
        (b'"a, b, c, and so on, in a text, with \\"quotes\\", and \\\\",', None),
        (b'",,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,",', None),
        (b'"the most inputs that a setting allows",', 65_536),
    ],
)
def test_a_large_body_of_honest_elements_is_decoded(element: bytes, count: int | None) -> None:
    """Commas within texts, and numbers, are not counted as texts."""
    body = _filled(b'{"inputs": [', element, b"]}")
    if count is not None:
        body = b'{"inputs": [' + (element * count).rstrip(b",") + b"]}"
    message = _decoded(body)
    assert len(message.inputs) == (body.count(element) + 1 if count is None else count)
