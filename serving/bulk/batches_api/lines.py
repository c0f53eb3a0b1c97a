"""Lines of input, output and error files, in the format of OpenAI's Batch API.

Functions and methods read and write files, and are called in threads.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from serving.bulk.batches_api.records import Problem
from serving.bulk.batches_api.store import room_on_disk
from serving.bulk.files import write_all
from serving.errors import InvalidRequest
from serving.fields.rule import Ignored, Level
from serving.models.staging_dir import sync

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path
    from typing import BinaryIO

    from serving.bulk.batches_api.records import BatchesApiJob

_METHOD = "POST"
_FIELDS = ("custom_id", "method", "url", "body")
_LONGEST_ID = 512
_MAX_PROBLEMS = 100
_PIECE_LINES = 64

_LEVEL = Level(_FIELDS, required=_FIELDS)
_line_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_text_decoder = msgspec.json.Decoder(str)


@dataclass(frozen=True, slots=True)
class Line:
    """A request of an input file.

    Attributes:
        id: Our id, the same whenever the line is read.
        end: Where the next line begins.
        body: JSON, not decoded.
        ignored: Names of ignored fields.
    """

    id: str
    custom_id: str
    body: bytes
    end: int
    ignored: Ignored | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of an endpoint to a line.

    Attributes:
        pieces: Makes its body, when it is written, and again if writing failed.
        ignored: Names of ignored fields of its body.
    """

    status: int
    pieces: Callable[[], Iterable[bytes]]
    ignored: Ignored | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """A line with its answer, or with a code and a sentence why it has none."""

    line: Line
    answer: Answer | None = None
    code: str = ""
    message: str = ""

    @property
    def good(self) -> bool:
        return self.answer is not None and self.answer.status == 200  # noqa: PLR2004  OK

    def encoded(self) -> Iterator[bytes]:
        head = {"id": self.line.id, "custom_id": self.line.custom_id}
        if self.answer is None:
            error = {"code": self.code, "message": self.message}
            yield msgspec.json.encode({**head, "response": None, "error": error}) + b"\n"
            return
        response: dict[str, object] = {"status_code": self.answer.status, "request_id": self.line.id}
        if self.good and (ignored := self._ignored()):
            response["ignored_fields"] = ignored
        yield msgspec.json.encode(head)[:-1] + b',"response":' + msgspec.json.encode(response)[:-1] + b',"body":'
        yield from self.answer.pieces()
        yield b'},"error":null}\n'

    def _ignored(self) -> list[str]:
        """The ignored fields of the line and of its body; OpenAI has no place for them."""
        both = Ignored()
        for ignored in (self.line.ignored, self.answer.ignored if self.answer else None):
            if ignored is not None:
                both.update(ignored)
        return both.listed


class Lines:
    """Reads the lines of a valid input file from a position on."""

    def __init__(self, path: Path, job: BatchesApiJob) -> None:
        self._opened: BinaryIO = path.open("rb")
        self._opened.seek(job.position)
        self._key, self._number, self._end = job.key, job.settled, job.position

    def close(self) -> None:
        self._opened.close()

    def read(self, most_bytes: int) -> list[Line]:
        """The next lines: some, or one if it alone has more bytes; empty at the end."""
        lines: list[Line] = []
        size = 0
        while len(lines) < _PIECE_LINES and size < most_bytes and (text := self._opened.readline()):
            self._end += len(text)
            size += len(text)
            if text.strip():
                self._number += 1
                fields = _line_decoder.decode(text)
                custom_id = _text_decoder.decode(fields["custom_id"])
                name = f"batch_req_{self._key}_{self._number}"
                ignored = _LEVEL.passed_over(fields)
                lines.append(Line(name, custom_id, bytes(fields["body"]), self._end, ignored))
        return lines


def check_lines(path: Path, endpoint: str, most_lines: int, most_bytes: int) -> tuple[int, list[Problem]]:
    """The number of requests of an input file, and its first hundred problems.

    It may have `most_lines` lines of `most_bytes` each, all for the endpoint.
    """
    problems: list[Problem] = []
    seen: set[bytes] = set()
    count = number = 0
    with path.open("rb") as opened:
        while len(problems) < _MAX_PROBLEMS and (text := opened.readline(most_bytes + 1)):
            number += 1
            if len(text) > most_bytes:
                message = f"The line has more than {most_bytes} bytes (--body-limit-bytes)."
                return count, [*problems, Problem("line_too_long", message, line=number)]
            if not text.strip():
                continue
            count += 1
            if count > most_lines:
                message = f"The file has more than {most_lines} lines (--batch-max-lines)."
                return count, [*problems, Problem("too_many_lines", message)]
            if problem := _problem(text, endpoint, seen, number):
                problems.append(problem)
    if not count and not problems:
        problems.append(Problem("empty_file", "The input file is empty."))
    return count, problems


def _problem(text: bytes, endpoint: str, seen: set[bytes], number: int) -> Problem | None:
    """The problem of a line, if any; adds its `custom_id` to those seen."""
    try:
        fields = _line_decoder.decode(text)
        text.decode()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Problem("invalid_json_line", "The line is not a UTF-8 JSON object.", None, number)
    try:
        _LEVEL.passed_over(fields)
    except InvalidRequest as error:
        return Problem("unknown_parameter", f"{error.message[0].upper()}{error.message[1:]}", None, number)
    if missing := [name for name in _FIELDS if name not in fields]:
        message = f"The field `{missing[0]}` is missing."
        return Problem("missing_required_parameter", message, missing[0], number)
    try:
        custom_id, method, url = (_text_decoder.decode(fields[name]) for name in _FIELDS[:3])
    except msgspec.MsgspecError:
        return Problem("invalid_type", "`custom_id`, `method` and `url` must be strings.", None, number)
    digest = hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    is_object = bytes(fields["body"]).lstrip().startswith(b"{")
    rules = (
        (
            0 < len(custom_id) <= _LONGEST_ID,
            "invalid_custom_id",
            f"`custom_id` must have 1 to {_LONGEST_ID} characters.",
            0,
        ),
        (digest not in seen, "duplicate_custom_id", "An earlier line has the same `custom_id`.", 0),
        (method == _METHOD, "invalid_method", f"`method` must be {_METHOD}.", 1),
        (url == endpoint, "invalid_url", f"`url` must be the batch's endpoint, {endpoint}.", 2),
        (is_object, "invalid_type", "`body` must be a JSON object.", 3),
    )
    broken = next((rule for rule in rules if not rule[0]), None)
    if broken is None:
        seen.add(digest)
        return None
    _, code, message, field = broken
    return Problem(code, message, _FIELDS[field], number)


class Results:
    """The output and error files of a running job, truncated to settled lines when they are opened."""

    def __init__(self, output: Path, error: Path, job: BatchesApiJob) -> None:
        with room_on_disk():
            self._output = _Appended(output, job.output_bytes)
            self._error = _Appended(error, job.error_bytes)
            sync(output.parent)

    def close(self) -> None:
        self._output.close()
        self._error.close()

    @property
    def complete(self) -> bool:
        """Whether the files had all settled lines; if not, everything must be computed again."""
        return self._output.complete and self._error.complete

    def clear(self) -> None:
        self._output.clear()
        self._error.clear()

    def append(self, results: Sequence[Result]) -> tuple[int, int]:
        """Writes lines durably, and returns the sizes of both files; if that fails nothing stays.

        Raises:
            StorageFull: The disk is full.
        """
        with room_on_disk():
            try:
                for result in results:
                    (self._output if result.good else self._error).write(result.encoded())
                self._output.flush()
                self._error.flush()
            except BaseException:
                self._output.cut_back()
                self._error.cut_back()
                raise
        return self._output.settle(), self._error.settle()


class _Appended:
    """A file that grows by pieces that are either durable or gone.

    Attributes:
        complete: Whether it had its expected size when it was opened; if not it is empty.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.complete = os.fstat(self._handle).st_size >= size
        self._settled = self._size = size if self.complete else 0
        self.cut_back()

    def close(self) -> None:
        os.close(self._handle)

    def write(self, pieces: Iterable[bytes]) -> None:
        for piece in pieces:
            write_all(self._handle, piece)
            self._size += len(piece)

    def flush(self) -> None:
        if self._size != self._settled:
            os.fsync(self._handle)

    def settle(self) -> int:
        self._settled = self._size
        return self._size

    def clear(self) -> None:
        self._settled = 0
        self.cut_back()

    def cut_back(self) -> None:
        os.ftruncate(self._handle, self._settled)
        os.lseek(self._handle, self._settled, os.SEEK_SET)
        self._size = self._settled
