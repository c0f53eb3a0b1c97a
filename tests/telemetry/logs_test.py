"""Lines of the log: what they look like, what never gets into them, and that nobody waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bertserve.serving.errors import BertserveError, NotReady, all_quoted, escape, quote
from bertserve.serving.http.app import App
from bertserve.serving.http.exchange import HttpRequest
from bertserve.serving.http.routes import Router
from bertserve.serving.logs import LogWriter, RateLimit, fields, line, members
from tests.support.http_app import ready_api
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

PRIVATE = "the text of a user"


def record(message: str, *args: object, error: BaseException | None = None, **known: object) -> logging.LogRecord:
    trace = (type(error), error, error.__traceback__) if error else None
    made = logging.LogRecord("bertserve.x", logging.WARNING, __file__, 1, message, args, trace)
    made.fields = known
    return made


def raised(error: Exception, behind: Exception | None = None) -> Exception:
    try:
        raise error from behind
    except type(error) as found:
        return found


def test_a_line_of_json() -> None:
    """One object with time, level, logger, message and the fields, which keep their types."""
    made = record("batch %d failed", 7, request_id="a-1", tokens=12)
    found = json.loads(line(made, "json"))
    assert found.pop("time").endswith("Z")
    assert found == {
        "level": "warning",
        "logger": "bertserve.x",
        "message": "batch 7 failed",
        "request_id": "a-1",
        "tokens": 12,
    }
    assert line(made, "json").count(b"\n") == 1


def test_a_line_of_text() -> None:
    """Time, level, logger, message, and the fields behind it; a field without a value is left out."""
    text = line(record("state: %s", "ready", request_id="a-1", tokens=None), "text").decode()
    assert text.endswith("WARNING bertserve.x: state: ready request_id=a-1\n")


# Line ends as Unicode has them (UAX 14), what terminals act upon, what turns the direction of writing (UAX 9), and what
# no UTF-8 can hold.
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_UNSEEN = "\0\x07\b\x1b\x7f\x9b\u061c\u200b\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2069\ufeff\U000e0001\ud800"


@pytest.mark.parametrize("letter", _LINE_ENDS + _UNSEEN, ids=ascii)
@pytest.mark.parametrize("form", ["text", "json"])
def test_no_value_forges_a_line_or_speaks_to_a_terminal(form: Any, letter: str) -> None:
    """Wherever it stands: in the message, in a field's value, in a member of one, or in the message of an error."""
    forged = f"one{letter}INFO two"
    made = record("%s", forged, error=raised(OSError(2, forged)), why=forged, known={forged: [forged]})
    written = line(made, form)
    assert letter.encode("utf-8", "surrogatepass").strip(b"\n") not in written or letter == "\n"
    assert [each for each in written.decode().splitlines() if each.startswith("INFO two")] == []
    if form == "json":
        assert written.count(b"\n") == 1
        assert json.loads(written)["why"] == forged


def test_what_can_be_printed_is_shown_as_it_is() -> None:
    """Letters of any script, signs and spaces; everything else comes back from its escape."""
    text = 'résumé 東京 مرحبا 🙂 \\ "quoted" a=b'
    assert escape(text) == text
    assert json.loads(f'"{escape(_LINE_ENDS + _UNSEEN)}"') == _LINE_ENDS + _UNSEEN


def test_received_names_are_quoted_in_at_most_64_characters() -> None:
    """With escapes for what cannot be seen; of many names the first are shown."""
    assert quote('a "b"\n\ud83d\u202e\\é') == r'''"a \"b\"\n\ud83d\u202e\\é"'''
    assert quote("x" * 64) == f'"{"x" * 64}"'
    assert quote("x" * 3_500_000) == f'"{"x" * 64}..."'
    assert len(quote("\x00" * 64)) == len('""...') + 64
    assert (quote(-7), quote(10**4000)) == ("-7", f"1{'0' * 63}...")
    assert (all_quoted(["a", "b"]), all_quoted([])) == ('"a", "b"', "none")
    assert all_quoted(list("abcdefghijk")).endswith('"h", and 3 others')


@pytest.mark.parametrize("form", ["text", "json"])
def test_an_exceptions_message_is_not_shown(form: Any) -> None:
    """It may repeat what was received; its kind and its place in the code are shown, and those behind it."""
    error = raised(ValueError(PRIVATE), raised(KeyError(PRIVATE)))
    text = line(record("failed", error=error), form).decode()
    assert PRIVATE not in text
    assert "builtins.KeyError" in text
    assert "builtins.ValueError" in text
    assert "logs_test.py" in text


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), NotReady("the server is warming")])
def test_an_error_of_the_system_or_of_ours_is_shown(error: Exception) -> None:
    text = line(record("failed", error=raised(error)), "text").decode()
    assert text.rstrip().endswith(str(error))


def test_a_few_of_a_kind_pass_and_then_one_a_second() -> None:
    """The next one that passes says how many were hidden; other kinds pass."""
    now = [0.0]
    limit = RateLimit(lambda: now[0])
    passed = [limit.admit("a") for _ in range(50)]
    assert passed == [0] * 20 + [None] * 30
    assert limit.admit("b") == 0
    now[0] = 1.0
    assert limit.admit("a") == 30
    assert limit.admit("a") is None


def test_made_up_kinds_take_no_memory() -> None:
    limit = RateLimit()
    for kind in range(5000):
        limit.admit(kind)
    assert len(limit._kinds) <= 1000


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        with contextlib.suppress(OSError):
            os.close(end)


def test_lines_are_written_in_order_and_a_storm_is_bounded(pipe: tuple[int, int]) -> None:
    """Of many lines of one kind the first are written, each once."""
    writer = LogWriter("text", descriptor=pipe[1])
    for number in range(1000):
        writer.emit(record("line %d", number))
    writer.flush()
    lines = [found.rpartition(" ")[2] for found in os.read(pipe[0], 1 << 16).decode().splitlines()]
    assert lines[:20] == [str(number) for number in range(20)]
    assert len(lines) < 30
    assert writer.lost == 0


@pytest.mark.parametrize("full", [False, True], ids=["no reader", "no room"])
def test_lines_that_cannot_be_written_are_counted(pipe: tuple[int, int], *, full: bool) -> None:
    """A pipe whose reader has gone costs its lines, and so does a full disk, as `/dev/full` answers every write."""
    os.close(pipe[0])
    with Path("/dev/full").open("wb") as disk:
        writer = LogWriter("text", descriptor=disk.fileno() if full else pipe[1])
        for number in range(5):
            writer.emit(record("line %d", number))
        writer.flush()
    assert writer.lost == 5


def test_nobody_waits_for_who_does_not_read(pipe: tuple[int, int]) -> None:
    """The writing thread stands still, whoever logs does not; beyond the bound lines are lost and counted."""
    writer = LogWriter("text", descriptor=pipe[1], most_lines=50)
    big = record("x" * (1 << 20), limited=True)
    big.limited = True
    writer.emit(big)
    wait_for(lambda: writer._queue.qsize() == 0, "the thread to take it")
    for _ in range(80):
        writer.emit(big)
    assert writer.lost == 30
    started = time.monotonic()
    writer.flush(0.05)
    assert time.monotonic() - started < 30, "a stop waits no longer than its limit"
    reader = threading.Thread(target=_drain, args=(pipe[0], 51 * (1 << 20)))
    reader.start()
    reader.join()


def _drain(descriptor: int, size: int) -> None:
    while size > 0:
        size -= len(os.read(descriptor, 1 << 20))


def test_a_message_that_does_not_fit_its_arguments_ends_nothing(pipe: tuple[int, int]) -> None:
    writer = LogWriter("text", descriptor=pipe[1])
    writer.emit(record("%d", "no number"))
    writer.emit(record("good"))
    writer.flush()
    assert writer.lost == 1
    assert os.read(pipe[0], 1 << 16).endswith(b"good\n")


async def _fails(*_: object) -> Any:
    raise ValueError(PRIVATE)


def test_a_bug_is_logged_with_its_request(caplog: pytest.LogCaptureFixture) -> None:
    """The traceback has the request's id, which the client gets too, and nothing of what it sent."""
    told: list[tuple[BertserveError, str, str, str]] = []
    request = HttpRequest("POST", "/embed", {}, PRIVATE.encode(), "id-1", 0.0)
    router = Router("Test")
    router.post("/embed")(_fails)
    app = App(ready_api(record_error=lambda *words: told.append(words)), [router], documented=False)
    reply = asyncio.run(app.answer(request))
    app.sent(request, reply, len(reply.body))
    assert reply.status == 500
    assert PRIVATE.encode() not in reply.body
    assert [(error.reason, *where) for error, *where in told] == [("internal", "id-1", "http", "")]
    (logged,) = caplog.records
    text = line(logged, "json").decode()
    assert json.loads(text)["request_id"] == "id-1"
    assert "builtins.ValueError" in text
    assert PRIVATE not in text


def test_fields_are_what_a_line_shows() -> None:
    assert fields(a=1) == {"fields": {"a": 1}}


def test_members_are_what_only_programs_read() -> None:
    """A message says them in words; in JSON they stand beside it."""
    record = logging.makeLogRecord({"msg": "model a serves", **members(model="a", count=2)})
    assert json.loads(line(record, "json")).items() >= {"message": "model a serves", "model": "a", "count": 2}.items()
    assert line(record, "text").decode().endswith(": model a serves\n")
