"""Parts of uploads and batches that need no server: forms, bodies on their way, lines in pieces."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from serving.errors import BertserveError, InvalidRequest, MalformedRequest, SlowRequest, UnsupportedMediaType
from serving.http.apis.batch_lines import BatchLine
from serving.http.apis.openai import LINES
from serving.http.apis.openai_messages import EmbeddingsRequest
from serving.http.body_stream import WINDOW_BYTES, ReceivedBody
from serving.http.exchange import HttpRequest
from serving.http.multipart import FileForm
from serving.inference.requests import Outcome, Timings
from tests.support.virtual_time import asynchronous

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

CONTENT_TYPE = b"multipart/form-data; boundary=b"
FILE = b'Content-Disposition: form-data; name="file"; filename="in.jsonl"'
PURPOSE = b'Content-Disposition: form-data; name="purpose"'


def form_of(*parts: tuple[bytes, bytes]) -> bytes:
    return b"".join(b"--b\r\n%b\r\n\r\n%b\r\n" % part for part in parts) + b"--b--\r\n"


def read(body: bytes, content_type: bytes = CONTENT_TYPE, size: int = 1 << 20) -> tuple[FileForm, bytes]:
    """A form and the file in it, read in pieces of a size."""
    written: list[bytes] = []
    form = FileForm(content_type, "file", lambda data: written.append(bytes(data)))
    for at in range(0, len(body), size):
        form.feed(body[at : at + size])
    form.finish()
    return form, b"".join(written)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1 << 20])
def test_a_form_is_the_same_in_pieces_of_any_size(size: int) -> None:
    """Also where its file holds what looks like a boundary, whatever comes first, and with something behind its end."""
    content = b"\r\n--\r\n--a\r\n-\r\r\n--c\x00\xff" * 3
    for parts in ([(FILE, content), (PURPOSE, b"batch")], [(PURPOSE, b"batch"), (FILE, content)]):
        form, written = read(b"\r\n" + form_of(*parts) + b"what nobody reads", size=size)
        assert (form.file_name, form.fields, written) == ("in.jsonl", {"purpose": "batch"}, content)


@pytest.mark.parametrize(
    ("name", "read_as"),
    [
        (b'filename=""', ""),
        (b'filename="../../etc/passwd"', "../../etc/passwd"),
        ('filename="Müller\r.jsonl"'.replace("\r", "\x85").encode(), "Müller.jsonl"),
        (b"filename*=utf-8''a%20b", ""),
        (b'filename="' + b"n" * 300 + b'"', "n" * 255),
    ],
)
def test_names_of_files(name: bytes, read_as: str) -> None:
    """What cannot be printed is left out, and what is too long; they are names for people and no paths."""
    form, _ = read(form_of((b'content-disposition: form-data; name="file"; ' + name, b"x")))
    assert form.file_name == read_as


@pytest.mark.parametrize("size", [1, 1 << 20])
@pytest.mark.parametrize(
    ("content_type", "change"),
    [
        (b"Multipart/Form-Data; Boundary=b", lambda body: b"a preamble\r\n--a\r\n" + body),
        (b'multipart/form-data; charset=utf-8; boundary="b"', lambda body: body + b"an epilogue\r\n--b\r\n"),
        (b"multipart/form-data;boundary=b;charset=x", lambda body: body.removesuffix(b"\r\n")),
        (b'multipart/form-data; boundary="a b;c=d"', lambda body: body.replace(b"--b", b"--a b;c=d")),
        (b"multipart/form-data; boundary=b", lambda body: body.replace(b"--b\r\n", b"--b \t\r\n")),
        (
            b"multipart/form-data; boundary=b",
            lambda body: body.replace(FILE, FILE + b"\r\nContent-Type: text/plain; charset=x\r\nX-More: y"),
        ),
        (
            b"multipart/form-data; boundary=b",
            lambda body: body.replace(FILE, b"CONTENT-DISPOSITION:form-data;filename=in.jsonl;NAME=file"),
        ),
        (
            b"multipart/form-data; boundary=b",
            lambda body: body.replace(FILE, FILE + b"; filename*=utf-8''other\r\nContent-Transfer-Encoding: binary"),
        ),
    ],
    ids=["preamble", "epilogue", "no last line's end", "quoted", "padded", "more headers", "unquoted", "RFC 5987"],
)
def test_framings_of_a_form(content_type: bytes, change: Callable[[bytes], bytes], size: int) -> None:
    """All that RFC 2046, section 5.1, and RFC 7578 allow."""
    form, written = read(change(form_of((FILE, b"\r\n--x"), (PURPOSE, b"batch"))), content_type, size)
    assert (form.file_name, form.fields, written) == ("in.jsonl", {"purpose": "batch"}, b"\r\n--x")


@pytest.mark.parametrize(
    ("content_type", "error"),
    [
        (b"", UnsupportedMediaType),
        (b"multipart/form-data", UnsupportedMediaType),
        (b"multipart/form-data; boundary=", UnsupportedMediaType),
        (b"multipart/mixed; boundary=b", UnsupportedMediaType),
        (b"multipart/form-data; boundary=" + b"b" * 300, MalformedRequest),
    ],
)
def test_a_content_type_that_is_none_of_a_form(content_type: bytes, error: type[BertserveError]) -> None:
    """It is refused before a byte of the body is read."""
    with pytest.raises(error, match="boundary"):
        FileForm(content_type, "file", lambda _: None)


@pytest.mark.parametrize(
    ("body", "error", "said"),
    [
        (form_of((FILE, b"x"), (FILE, b"y")), InvalidRequest, "twice"),
        (form_of((PURPOSE, b"batch"), (PURPOSE, b"batch")), InvalidRequest, "twice"),
        (form_of((b'Content-Disposition: form-data; name="file"', b"texts.jsonl")), InvalidRequest, "file=@PATH"),
        (form_of((PURPOSE, b"b" * 5000)), InvalidRequest, "more than 4096 bytes"),
        (form_of(*[(b'Content-Disposition: form-data; name="f%d"' % n, b"") for n in range(17)]), InvalidRequest, "16"),
        (form_of((FILE + b"\r\nX-A: " + b"a" * 100_000, b"x")), MalformedRequest, "not valid multipart"),
        (form_of((FILE + b"\r\nX-A: 1" * 1000, b"x")), MalformedRequest, "not valid multipart"),
        (form_of((b"no header", b"x")), MalformedRequest, "not valid multipart"),
        (form_of((FILE, b"x")).replace(b"--b", b"--c"), MalformedRequest, "not valid multipart"),
        (form_of((FILE, b"x"))[:-4], MalformedRequest, "truncated"),
        (b"", MalformedRequest, "does not begin with the boundary"),
        (b"x" * 10_000 + b"\r\n" + form_of((FILE, b"x")), MalformedRequest, "does not begin with the boundary"),
        (form_of((FILE, b"x")).replace(b"\r\n", b"\n"), MalformedRequest, "CRLF"),
        (form_of((FILE + b"\r\nContent-Transfer-Encoding: BASE64", b"eA==")), InvalidRequest, "leave it out"),
    ],
)
def test_forms_that_are_refused(
    body: bytes, error: type[BertserveError], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The client is told why, and the log nothing: else strangers would write it."""
    with pytest.raises(error, match=said):
        read(body)
    assert caplog.records == []


@asynchronous
async def test_a_body_takes_no_more_than_its_window() -> None:
    """What is being written counts as what waits; there is room again when more is asked for."""
    rooms: list[bool] = []
    body = ReceivedBody(lambda: rooms.append(body.full))
    body.feed(b"a" * WINDOW_BYTES)
    assert body.full
    assert await body.read() == b"a" * WINDOW_BYTES
    assert (body.full, rooms) == (True, [])
    waiting = asyncio.ensure_future(body.read())
    await asyncio.sleep(0)
    assert (body.full, rooms) == (False, [False])
    body.feed(b"b")
    assert await waiting == b"b"
    body.feed(b"c")
    body.end()
    assert [await body.read(), await body.read()] == [b"c", b""]
    body.fail(SlowRequest("the rest did not come"))
    with pytest.raises(SlowRequest):
        await body.read()


def test_no_line_mixes_two_versions() -> None:
    """One that takes over between a line's pieces answers all of them."""
    versions = iter(["1", "1", "2", "2", "2", "2"])

    async def retry(_: Callable[[], Awaitable[Any]], texts: int) -> Any:
        version = next(versions)
        vectors = np.full((texts, 2), float(version), np.float32)
        return Outcome(vectors, "embed", version, Timings(1, 2, 3, 4), 5, 0)

    unused: Any = None
    pieces: Sequence[Sequence[str]] = [["a"] * 32, ["b"] * 32, ["c"]]
    http = HttpRequest("POST", "/v1/embeddings", {}, b"", "r-1", 0.0)
    line = BatchLine(unused, LINES, http, EmbeddingsRequest(input=""), "embed", pieces)
    answer = asyncio.run(line.answer(retry))
    body = b"".join(answer.pieces())
    assert body.count(b"[2.0,2.0]") == 65
    assert b"[1.0" not in body
