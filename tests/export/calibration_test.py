"""Files of calibration text."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from bertserve.export.errors import ExportError
from bertserve.export.precision import calibration
from bertserve.export.texts import corpus

if TYPE_CHECKING:
    from pathlib import Path

WORDS = [f"text number {number}" for number in range(calibration.MIN_TEXTS)]


def lines(*parts: str) -> str:
    return "\n".join(parts)


FILES = {
    "plain.txt": (lines("\ufeff", *WORDS, "", "  "), None, WORDS),
    "twice.txt": (lines(*WORDS, *WORDS), None, WORDS),
    "objects.jsonl": (lines(*(json.dumps({"text": word, "id": 1}) for word in WORDS)), None, WORDS),
    "strings.jsonl": (lines(*map(json.dumps, WORDS)), None, WORDS),
    "pairs.jsonl": (
        lines(*(json.dumps({"text": word, "pair": "p"}) for word in WORDS)),
        None,
        [(word, "p") for word in WORDS],
    ),
    "first.csv": (lines(*(f'"{word}",0' for word in WORDS)), None, WORDS),
    "number.tsv": (lines(*(f"0\t{word}" for word in WORDS)), "2", WORDS),
    "named.csv": (lines("label,body", *(f"0,{word}" for word in WORDS)), "body", WORDS),
    "short-rows.csv": (lines("label,body", "1", *(f"0,{word}" for word in WORDS)), "body", WORDS),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_texts_is_read(tmp_path: Path, name: str) -> None:
    """One text a line, objects, or a column by its number or name; empty and repeated ones are left out."""
    content, column, expected = FILES[name]
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert calibration.read(tmp_path / name, column) == calibration.Calibration(name, expected)


BAD_FILES = {
    "missing": ("absent.txt", None, None, "No such file"),
    "few": ("few.txt", "one\ntwo", None, "has 2 distinct texts; calibration needs at least 16"),
    "empty": ("empty.csv", "", None, "has 0 distinct texts"),
    "no-json": ("a.jsonl", lines(*map(json.dumps, WORDS), "{"), None, "line 17: not JSON"),
    "no-text": ("a.jsonl", '{"body": "b"}', None, "line 1: must be a text, or an object with `text`"),
    "empty-text": ("a.jsonl", '{"text": " "}', None, "line 1: must be a text, or an object with `text`"),
    "number-text": ("a.jsonl", '{"text": "a", "pair": 3}', None, "line 1: must be a text, or an object with `text`"),
    "column-name": ("a.csv", "label,body\n0,b", "text", "no column 'text'; columns: label, body"),
    "column-number": ("a.csv", "label,body\n0,b", "3", "no column 3; the file has 2"),
    "column-zero": ("a.csv", "label,body\n0,b", "0", "no column 0; the file has 2"),
    "column-of-lines": ("a.txt", "one\ntwo", "1", "--calibration-column needs a .csv or .tsv file"),
    "no-text-at-all": ("a.txt", b"text\xff", None, "not UTF-8, at byte 4"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_refused_in_one_sentence(tmp_path: Path, name: str) -> None:
    """It names the file, and what is wrong with it."""
    file, content, column, sentence = BAD_FILES[name]
    if content is not None:
        (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ExportError, match=sentence) as raised:
        calibration.read(tmp_path / file, column)
    assert str(raised.value).startswith(str(tmp_path / file))


def test_texts_are_taken_from_the_whole_file(tmp_path: Path) -> None:
    """A long file gives as many as are useful, evenly, since it may be sorted."""
    (tmp_path / "long.txt").write_text(lines(*(str(number) for number in range(10_000))), encoding="utf-8")
    texts = calibration.read(tmp_path / "long.txt", None).texts
    assert len(texts) == calibration.MAX_TEXTS
    assert texts[0] == "0"
    assert int(str(texts[-1])) > 9_900


def test_half_of_our_own_texts_are_left_to_judge_by() -> None:
    """What ranges were taken from says little about ranges."""
    own = calibration.own()
    assert own.source == calibration.OWN
    assert len(own.texts) == calibration.MAX_TEXTS
    assert len(set(corpus.read()) - set(own.texts)) >= calibration.MAX_TEXTS
