from __future__ import annotations

import csv
import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bertserve.serving.bulk.errors import BatchError
from bertserve.serving.bulk.sources import Columns, find, parts

if TYPE_CHECKING:
    from pathlib import Path

COLUMNS = Columns(("text",), "id")
ROWS = [{"id": f"doc {number}", "text": f'text, "{number}"\nin two lines é'} for number in range(23)]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=4)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text("\n\n".join(map(json.dumps, rows)))
    return path


def read(path: Path, *, size: int = 5, finished: frozenset[int] = frozenset(), columns: Columns = COLUMNS) -> list[Any]:
    """Every row of a file's parts that are not finished: number, id, value, reason."""
    (file,) = find([path], columns)
    return [
        (part.first_row + index, row.id, row.value, row.reason)
        for part in parts(file, columns, size, finished)
        for index, row in enumerate(part.rows)
    ]


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_parts_hold_the_same_rows_whatever_is_finished(kind: str, tmp_path: Path) -> None:
    """All rows come in their order with their ids; a finished part is left out and moves no other one."""
    path = write(tmp_path / f"docs.{kind}", ROWS)
    expected = [(number, row["id"], row["text"], "") for number, row in enumerate(ROWS)]
    assert read(path) == expected
    for finished in (frozenset({0}), frozenset({0, 1, 3}), frozenset({4}), frozenset(range(5))):
        assert read(path, finished=finished) == [row for row in expected if row[0] // 5 not in finished]


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_progress_ends_at_one(kind: str, tmp_path: Path) -> None:
    """How far a file is read grows with each part and ends with the file."""
    (file,) = find([write(tmp_path / f"docs.{kind}", ROWS)], COLUMNS)
    reached = [part.rows[-1].progress for part in parts(file, COLUMNS, 5, ())]
    assert reached == sorted(reached)
    assert reached[-1] == 1.0


def test_rows_of_json_that_hold_no_text_say_why(tmp_path: Path) -> None:
    path = tmp_path / "docs.jsonl"
    lines = ['{"id": 7, "text": "good"}', '{"id": 8, "text": null}', '{"id": 9, "text": 5}', '{"id": 10}', "[1]", "{"]
    path.write_bytes("\n".join([*lines, '{"id": "x", "text": "bad id"}']).encode() + b'\n{"text": "\xff"}')
    reasons = {row: reason for row, _, _, reason in read(path)}
    assert reasons[0] == ""
    assert reasons[1] == "null"
    assert reasons[2] == "not a string but int"
    assert reasons[3] == 'no field "text"'
    assert reasons[4] == "not a JSON object"
    assert reasons[5].startswith("not valid JSON: ")
    assert reasons[6] == 'the id in "id" is not an integer, unlike the first one'
    assert reasons[7].startswith("not valid JSON: ")
    assert [own for _, own, _, _ in read(path)][:4] == [7, 8, 9, 10]


def test_rows_of_csv_that_hold_no_text_say_why(tmp_path: Path) -> None:
    """Too few fields, or bytes that are not UTF-8."""
    path = tmp_path / "docs.csv"
    path.write_bytes(b"id,text\na,good\nb\nc,\xff\n")
    assert read(path) == [
        (0, "a", "good", ""),
        (1, None, None, "1 fields where the header has 2"),
        (2, "c", None, "not valid Unicode"),
    ]


def test_lines_of_a_plain_file_are_texts(tmp_path: Path) -> None:
    """Its only column is `text`; each line is a row, and one without a text is rejected with its reason."""
    path = tmp_path / "docs.txt"
    path.write_bytes(b'\xef\xbb\xbfone, "text"\r\n\n  \ntwo \xc3\xa9\n\xff\nlast')
    assert read(path, size=2, columns=Columns(("text",))) == [
        (0, None, 'one, "text"', ""),
        (1, None, None, "a blank line"),
        (2, None, None, "a blank line"),
        (3, None, "two é", ""),
        (4, None, None, "not valid Unicode"),
        (5, None, "last", ""),
    ]


def test_pairs_are_read_from_two_columns(tmp_path: Path) -> None:
    """In the order in which the columns are named."""
    path = write(tmp_path / "docs.parquet", [{"id": 1, "text": "answer", "query": "question"}])
    assert read(path, columns=Columns(("query", "text"), "id")) == [(0, 1, ("question", "answer"), "")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("docs.parquet", b"no", "is not a valid parquet file"),
        ("docs.doc", b"text", "must end in .parquet"),
        ("docs.txt", b"text", 'has no column "id"; it has "text"'),
        ("docs.csv", b"id,body\n", 'has no column "text"; it has "id", "body"'),
        ("folder", None, "contains no "),
        ("missing.csv", None, "No such file"),
    ],
)
def test_files_that_cannot_be_read_are_named(name: str, content: bytes | None, message: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(BatchError, match=message):
        find([tmp_path / name], COLUMNS)


def test_a_file_that_changes_ends_the_job(tmp_path: Path) -> None:
    (file,) = find([write(tmp_path / "docs.csv", ROWS)], COLUMNS)
    write(tmp_path / "docs.csv", ROWS[:-1])
    with pytest.raises(BatchError, match="has changed since the job began"):
        list(parts(file, COLUMNS, 5, ()))
