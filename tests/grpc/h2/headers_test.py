from __future__ import annotations

import contextlib
import string

import pytest
from hpack import Decoder, Encoder, HPACKDecodingError, huffman_table
from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
from hypothesis import given
from hypothesis import strategies as st

from bertserve.serving.grpc.h2 import Limits, encode_fields, encode_status
from bertserve.serving.grpc.h2.frames import ConnectionFault, ErrorCode
from bertserve.serving.grpc.h2.headers import HeaderDecoder, decode_huffman
from tests.support.http2 import REQUEST

names = st.text(string.ascii_lowercase, min_size=1, max_size=10).map("x-{}".format)
texts = st.text(string.printable.replace("\n", "").replace("\r", ""), max_size=200).map(lambda text: text.strip(" \t"))
lists = st.lists(st.tuples(names, texts), max_size=6)


@given(st.lists(st.tuples(lists, st.sampled_from(["plain", "never", "resize"])), max_size=12), st.booleans())
def test_blocks_that_come_again(sent: list[tuple[list[tuple[str, str]], str]], huffman: bool) -> None:  # noqa: FBT001
    """What is cached never differs from what a decoder would say, whatever the table went through."""
    encoder, decoder = Encoder(), HeaderDecoder(Limits())
    for number, (fields, kind) in enumerate(sent * 3):
        if kind == "resize":
            encoder.header_table_size = (0, 100, 4096)[number % 3]
        sensitive = [(name, value, kind == "never") for name, value in [*REQUEST, *fields]]
        headers = decoder.request(encoder.encode(sensitive, huffman=huffman))
        assert headers is not None
        assert headers.fields == [(name.encode(), value.encode()) for name, value in [*REQUEST, *fields]]
        assert headers.count == len(headers.fields)
        assert headers.size == sum(32 + len(name) + len(value) for name, value in headers.fields)


def test_a_block_that_comes_again_is_not_decoded_again() -> None:
    """The very same object is handed out, with what the caller noted on it, until it is forgotten."""
    encoder, decoder = Encoder(), HeaderDecoder(Limits())
    decoder.request(encoder.encode(REQUEST))
    block = encoder.encode(REQUEST)
    headers = decoder.request(block)
    assert headers is not None
    headers.memo = "noted"
    work = decoder.work
    assert decoder.request(block) is headers
    assert decoder.work == work
    decoder.forget()
    again = decoder.request(block)
    assert again is not None
    assert again.memo is None


def test_a_change_of_the_table_is_no_place_for_old_blocks() -> None:
    """The same bytes mean another field once the table has another entry."""
    encoder, decoder = Encoder(), HeaderDecoder(Limits())
    for value in ("first", "second"):
        decoder.request(encoder.encode([*REQUEST, ("x-value", value)]))
        headers = decoder.request(Encoder().encode(REQUEST[:3]) + b"\xbe")  # the newest entry of the table
        assert headers is not None


@given(st.binary(max_size=60))
def test_blocks_of_any_bytes(data: bytes) -> None:
    """They are fields, malformed, or a fault of the peer's; and the library says the same."""
    try:
        fields = [(bytes(name), bytes(value)) for name, value in Decoder().decode(data, raw=True)]
    except Exception:  # noqa: BLE001  the library raises more than its own errors
        return
    try:
        headers, _ = HeaderDecoder(Limits())._decode(data)
    except ConnectionFault:
        return  # stricter: an integer beyond 32 bits, a table resized over and over
    assert headers.fields == fields


@pytest.mark.parametrize(
    ("limits", "kept"),
    [(Limits(header_fields=8), 8), (Limits(header_bytes=290), 7), (Limits(), 30)],
    ids=["fields", "bytes", "within"],
)
def test_fields_beyond_a_limit_are_not_kept(limits: Limits, kept: int) -> None:
    """They are counted, and decoded for what they do to the table: the next block is read right."""
    encoder, decoder = Encoder(), HeaderDecoder(limits)
    decoder.request(encoder.encode(REQUEST))
    extra = [(f"x-{number}", "") for number in range(26)]
    headers = decoder.request(encoder.encode([*REQUEST, *extra]))
    assert headers is not None
    assert headers.count == 30
    assert len(headers.fields) == kept
    after = decoder.request(encoder.encode([*REQUEST, extra[-1]]))
    assert after is not None
    assert after.fields[-1] == (b"x-25", b"")


@pytest.mark.parametrize(
    "data",
    [b"\xbe" * 10_000, b"\x82" * 1400, b"\x40\x01x\x01y" * 1400, b"\x00\x01x\x01y" * 1400, b"\x20" * 100],
    ids=["large entry", "small entries", "new entries", "literals", "resizes"],
)
def test_a_block_that_costs_much_is_not_decoded_to_its_end(data: bytes) -> None:
    """One entry many times, many small fields, or one resize after another."""
    decoder = HeaderDecoder(Limits())
    decoder.request(Encoder().encode([("x", "y" * 4000)]))
    # Were it read to its end, the decoder would find that nothing follows it.
    with pytest.raises(ConnectionFault, match=r"far above the limit|cannot be decoded") as ended:
        decoder.request(data + b"\xff")
    assert ended.value.code is (ErrorCode.COMPRESSION_ERROR if data[0] == 0x20 else ErrorCode.ENHANCE_YOUR_CALM)


def test_strings_beyond_the_limit_are_not_decoded() -> None:
    """Huffman's code costs the more the longer it is: only what the table keeps is read, and the list is refused."""
    limits = Limits(header_bytes=1000)
    encoder, decoder, within = Encoder(), HeaderDecoder(limits), HeaderDecoder(limits)
    within.request(encoder.encode([*REQUEST, ("x-within", "y" * 500)]))
    secret = [(name, value, True) for name, value in [*REQUEST, *[(f"x-{number}", "y" * 1000) for number in range(3)]]]
    headers = decoder.request(Encoder().encode(secret))
    assert headers is not None
    assert headers.size > limits.header_bytes
    assert len(headers.fields) == len(REQUEST)
    assert decoder.work < within.work


@given(st.lists(st.tuples(names, st.binary(max_size=30).map(lambda value: value * 200)), max_size=6), st.booleans())
def test_a_list_beyond_the_limit_leaves_the_table_as_it_is(fields: list[tuple[str, bytes]], huffman: bool) -> None:  # noqa: FBT001
    """Whatever was skipped, the next block is read right."""
    encoder, decoder = Encoder(), HeaderDecoder(Limits(header_bytes=2000))
    with contextlib.suppress(ConnectionFault):
        decoder.request(encoder.encode([*REQUEST, *fields, ("x-mark", "kept")], huffman=huffman))
        after = decoder.request(encoder.encode([*REQUEST, ("x-mark", "kept")], huffman=huffman))
        assert after is not None
        assert after.fields == [(name.encode(), value.encode()) for name, value in [*REQUEST, ("x-mark", "kept")]]


@given(st.binary(max_size=100))
def test_huffman_codes_of_any_bytes(data: bytes) -> None:
    """They read as the library reads them, or are refused as it refuses them."""
    try:
        decoded = huffman_table.decode_huffman(data)
    except HPACKDecodingError:
        with pytest.raises(HPACKDecodingError):
            decode_huffman(data)
    else:
        assert decode_huffman(data) == decoded


@given(st.binary(max_size=100))
def test_huffman_codes_of_any_text(text: bytes) -> None:
    coded = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH).encode(text)
    assert decode_huffman(coded) == text


@pytest.mark.parametrize(
    "fields",
    [
        REQUEST[1:],
        [*REQUEST, (":path", "/again")],
        [*REQUEST, (":status", "200")],
        [("x-early", ""), *REQUEST],
        [REQUEST[0], REQUEST[1], (":path", "")],
        [*REQUEST, ("X-Capital", "")],
        [*REQUEST, ("x-line", "a\r\nb")],
        [*REQUEST, ("connection", "close")],
        [*REQUEST, ("x-lead", " a")],
        [*REQUEST, ("x-trail", "a\t")],
        [*REQUEST, ("x-blank", " ")],
        [*REQUEST, ("x-two\nx-lines", "")],
        [*REQUEST, ("te", "gzip")],
        [*REQUEST, ("te", "gzip"), ("te", "trailers")],
        [*REQUEST, ("content-length", "many")],
        [*REQUEST, ("content-length", "9" * 5000)],
        [*REQUEST, ("content-length", "5"), ("content-length", "6")],
    ],
)
def test_malformed_requests(fields: list[tuple[str, str]]) -> None:
    """What RFC 9113, 8.2 and 8.3 forbid."""
    decoder = HeaderDecoder(Limits())
    assert decoder.request(Encoder().encode(fields)) is None


@pytest.mark.parametrize(
    "fields", [[(":path", "/")], [("x-lead", " a")], [("te", "gzip")], [("connection", "close")], [("x", "")] * 101]
)
def test_malformed_trailers(fields: list[tuple[str, str]]) -> None:
    """The same rules, and no pseudo-field."""
    assert HeaderDecoder(Limits()).trailers(Encoder().encode([("x-late", "yes")]))
    assert not HeaderDecoder(Limits()).trailers(Encoder().encode(fields))


@given(lists, st.integers(100, 599))
def test_blocks_of_literals(fields: list[tuple[str, str]], status: int) -> None:
    """What is written reads the same elsewhere and adds nothing to the table."""
    decoder = Decoder()
    decoded = decoder.decode(encode_status(status) + encode_fields(fields))
    assert list(decoded) == [(":status", str(status)), *fields]
    assert not decoder.header_table.dynamic_entries


@pytest.mark.parametrize("size", [0, 126, 127, 128, 254, 255, 16_000])
def test_literals_of_any_length(size: int) -> None:
    """Lengths around those at which their integers grow."""
    assert list(Decoder().decode(encode_fields([("x", "y" * size)]))) == [("x", "y" * size)]
