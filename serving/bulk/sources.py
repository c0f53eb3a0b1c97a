"""Input files in parts: rows [k * size, (k + 1) * size) of a file, the same at every read."""

from __future__ import annotations

import csv
import itertools
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from bertserve.serving.bulk.errors import BatchError
from bertserve.serving.errors import InvalidRequest, all_quoted, quote

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

SUFFIXES = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".txt": "txt",
}

_READ_ROWS = 4096
"""Rows of a Parquet file that are held at once."""

_NOT_UNICODE = "not valid Unicode"

Id = int | str | None
Value = str | tuple[str, str] | None


class Columns(msgspec.Struct, frozen=True):
    """The columns to read: one of texts, or two of pairs, and optionally ids."""

    texts: tuple[str, ...]
    id: str | None = None

    @property
    def names(self) -> list[str]:
        return [*self.texts, *([self.id] if self.id else [])]


class InputFile(msgspec.Struct, frozen=True):
    """A file as it was when the job began.

    Attributes:
        rows: For Parquet; None if only reading the file tells.
        whole_ids: Whether ids are integers; otherwise they are strings.
    """

    path: str
    kind: str
    size_bytes: int
    modified_ns: int
    rows: int | None = None
    whole_ids: bool = False


class Row(msgspec.Struct, frozen=True):
    """A row of an input file.

    Attributes:
        value: A text or a pair of texts; None if `reason` says why there is none.
        progress: Share of the file up to this row, from 0 to 1.
    """

    value: Value
    id: Id
    reason: str
    progress: float


class Part(msgspec.Struct, frozen=True):
    """Some rows of a file.

    Attributes:
        number: From 0 in each file.
        first_row: Its number in the file, from 0.
    """

    number: int
    first_row: int
    rows: list[Row]

    def texts(self, count: int) -> pa.Table:
        """The columns of texts, named by number; null in rows without a text."""
        values = [row.value if isinstance(row.value, tuple) else [row.value] * count for row in self.rows]
        return pa.table([pa.array(each, pa.large_string()) for each in zip(*values, strict=True)], numbered(count))


def numbered(count: int) -> list[str]:
    """Names of columns that no column of answers has."""
    return [str(number) for number in range(count)]


def find(paths: Sequence[Path], columns: Columns) -> list[InputFile]:
    """The files of some paths; for a directory the files in it, by name.

    Raises:
        BatchError: There is none, one of them is of no known kind, or it lacks a column.
    """
    found: list[InputFile] = []
    for path in paths:
        files = sorted(each for each in path.iterdir() if each.suffix in SUFFIXES) if path.is_dir() else [path]
        if not files:
            raise BatchError(f"{path} contains no {', '.join(SUFFIXES)} files", exit_code=2)
        found += [_describe(file, columns) for file in files]
    if len({file.path for file in found}) < len(found):
        raise BatchError("an input file is listed twice", exit_code=2)
    if len({file.kind for file in found}) > 1:
        raise BatchError("the input files have several formats; run one job per format", exit_code=2)
    if len({file.whole_ids for file in found}) > 1:
        raise BatchError(
            f"the IDs in {quote(columns.id or '')} are numbers in some files and strings in others", exit_code=2
        )
    return found


def _describe(path: Path, columns: Columns) -> InputFile:
    kind = SUFFIXES.get(path.suffix)
    if kind is None:
        raise BatchError(f"{path} must end in {', '.join(SUFFIXES)}", exit_code=2)
    try:
        status = path.stat()
        rows, whole_ids = None, False
        if kind == "parquet":
            with pq.ParquetFile(path) as file:
                rows = file.metadata.num_rows
                _check_names(path, file.schema_arrow.names, columns)
                whole_ids = columns.id is not None and _whole(path, file.schema_arrow.field(columns.id))
        elif kind == "csv":
            _check_names(path, _header(path), columns)
        elif kind == "txt":
            _check_names(path, ["text"], columns)
            path.open("rb").close()
        elif columns.id is not None:
            first = next(_jsonl(InputFile(str(path), kind, status.st_size, 0, whole_ids=True), columns, 0), None)
            whole_ids = first is not None and first.id is not None
    except OSError as error:
        raise BatchError(f"{path}: {error.strerror or error}", exit_code=2) from error
    except (pa.ArrowException, csv.Error) as error:
        raise BatchError(f"{path} is not a valid {kind} file: {error}", exit_code=2) from error
    return InputFile(str(path.absolute()), kind, status.st_size, status.st_mtime_ns, rows, whole_ids)


def _check_names(path: Path, names: Sequence[str], columns: Columns) -> None:
    if missing := [name for name in columns.names if name not in names]:
        raise BatchError(f"{path} has no column {quote(missing[0])}; it has {all_quoted(names)}", exit_code=2)


def _whole(path: Path, field: pa.Field) -> bool:
    if pa.types.is_integer(field.type) and field.type != pa.uint64():
        return True
    if pa.types.is_string(field.type) or pa.types.is_large_string(field.type):
        return False
    message = f"{path}: the IDs in {quote(field.name)} have the type {field.type}; use integers or strings"
    raise BatchError(message, exit_code=2)


def _header(path: Path) -> list[str]:
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
        return next(csv.reader(text), [])


def parts(file: InputFile, columns: Columns, size: int, finished: Collection[int]) -> Iterator[Part]:
    """The unfinished parts of a file, in order, of `size` rows each; the last may have fewer.

    Raises:
        BatchError: The file ends within a structure or cannot be read.
    """
    first = next(number for number in itertools.count() if number not in finished)
    reader = {"parquet": _parquet, "csv": _csv, "jsonl": _jsonl, "txt": _txt}[file.kind]
    try:
        status = Path(file.path).stat()
        if (status.st_size, status.st_mtime_ns) != (file.size_bytes, file.modified_ns):
            raise BatchError(f"{file.path} has changed since the job began")
        rows = reader(file, columns, first * size)
        for number in itertools.count(first):
            chunk = list(itertools.islice(rows, size))
            if not chunk:
                return
            if number not in finished:
                yield Part(number, number * size, chunk)
    except (OSError, pa.ArrowException, csv.Error) as error:
        raise BatchError(f"{file.path} cannot be read: {error}") from error


def _parquet(file: InputFile, columns: Columns, skip: int) -> Iterator[Row]:
    """Skips row groups before the first wanted row."""
    with pq.ParquetFile(file.path, memory_map=True) as parquet:
        at, group = 0, 0
        while group < parquet.num_row_groups and at + parquet.metadata.row_group(group).num_rows <= skip:
            at += parquet.metadata.row_group(group).num_rows
            group += 1
        total = max(1, parquet.metadata.num_rows)
        for number in range(group, parquet.num_row_groups):
            for batch in parquet.iter_batches(_READ_ROWS, row_groups=[number], columns=columns.names):
                end = at + batch.num_rows
                wanted = batch.slice(max(0, skip - at))
                lists = [wanted.column(name).to_pylist() for name in columns.texts]
                ids = wanted.column(columns.id).to_pylist() if columns.id else [None] * wanted.num_rows
                at = max(at, skip)
                for values, own in zip(zip(*lists, strict=True), ids, strict=True):
                    at += 1
                    value, reason = _value(values)
                    yield Row(value, own, reason, at / total)
                at = end


def _csv(file: InputFile, columns: Columns, skip: int) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)
    with Path(file.path).open("rb") as raw:
        lines = (line.decode("utf-8-sig" if at == 0 else "utf-8", "surrogateescape") for at, line in enumerate(raw))
        rows = csv.reader(lines)
        header = next(rows, [])
        places = [header.index(name) for name in columns.texts]
        id_place = header.index(columns.id) if columns.id else None
        for row in itertools.islice((row for row in rows if row), skip, None):
            progress = raw.tell() / max(1, file.size_bytes)
            if len(row) != len(header):
                yield Row(None, None, f"{len(row)} fields where the header has {len(header)}", progress)
                continue
            value, reason = _value([row[place] for place in places])
            own = None if id_place is None else row[id_place]
            if own is not None and not _is_unicode(own):
                value, own, reason = None, None, f"the id is {_NOT_UNICODE}"
            yield Row(value, own, reason, progress)


def _jsonl(file: InputFile, columns: Columns, skip: int) -> Iterator[Row]:
    """A row for each line that is not blank: blanks between JSON values mean nothing."""
    lines = ((line, progress) for line, progress in _lines(file) if not line.isspace())
    for line, progress in itertools.islice(lines, skip, None):
        yield _json_row(line, file, columns, progress)


def _txt(file: InputFile, _: Columns, skip: int) -> Iterator[Row]:
    """A row for each line, so that its number is the line's."""
    for line, progress in itertools.islice(_lines(file), skip, None):
        text = line.rstrip(b"\r\n").decode("utf-8-sig", "surrogateescape")
        value, reason = (None, "a blank line") if not text.strip() else _value([text])
        yield Row(value, None, reason, progress)


def _lines(file: InputFile) -> Iterator[tuple[bytes, float]]:
    """The lines, and the share of the file up to each."""
    with Path(file.path).open("rb") as raw:
        read = 0
        for line in raw:
            read += len(line)
            yield line, read / max(1, file.size_bytes)


def _json_row(line: bytes, file: InputFile, columns: Columns, progress: float) -> Row:
    try:
        content = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return Row(None, None, f"not valid JSON: {error}", progress)
    if not isinstance(content, dict):
        return Row(None, None, "not a JSON object", progress)
    own: Id = content.get(columns.id) if columns.id else None
    if file.whole_ids:
        if own is not None and (not isinstance(own, int) or isinstance(own, bool) or own.bit_length() > 63):  # noqa: PLR2004  int64
            why = f"the id in {quote(columns.id or '')} is not an integer, unlike the first one"
            return Row(None, None, why, progress)
    elif own is not None and not isinstance(own, str):
        own = json.dumps(own)
    if missing := [name for name in columns.texts if name not in content]:
        return Row(None, own, f"no field {quote(missing[0])}", progress)
    value, reason = _value([content[name] for name in columns.texts])
    return Row(value, own, reason, progress)


def _value(values: Sequence[object]) -> tuple[Value, str]:
    """The text or pair of texts of a row, or why there is none."""
    try:
        return text_of(values), ""
    except InvalidRequest as error:
        return None, error.message


def text_of(values: Sequence[object]) -> str | tuple[str, str]:
    """The text or pair of texts of a row; raises `InvalidRequest`, which says why there is none."""
    texts = []
    for value in values:
        if value is None:
            raise InvalidRequest("null")
        if not isinstance(value, str):
            raise InvalidRequest(f"not a string but {type(value).__name__}")
        if not _is_unicode(value):
            raise InvalidRequest(_NOT_UNICODE)
        texts.append(value)
    return texts[0] if len(texts) == 1 else (texts[0], texts[1])


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
