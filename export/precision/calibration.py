"""Calibration texts for INT8 with static ranges."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bertserve.export.errors import ExportError
from bertserve.export.texts import corpus

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from bertserve.export.texts.corpus import Text

MIN_TEXTS = 16
MAX_TEXTS = 128
"""More texts change no measured figure, and cost time."""

OWN = "built-in texts"


@dataclass(slots=True, frozen=True)
class Calibration:
    """Calibration text.

    Attributes:
        source: A file's name, or `OWN`.
        texts: At most `MAX_TEXTS`.
    """

    source: str
    texts: Sequence[Text]


def own() -> Calibration:
    """Every second of the package's own texts; the others are for the comparison with PyTorch."""
    return Calibration(OWN, corpus.read()[::2])


def read(path: Path, column: str | None) -> Calibration:
    """Reads a file of texts.

    Args:
        path: One text per line. By suffix: `.jsonl` with an object with `text` and optionally `pair` per line, or
            `.csv` or `.tsv` with texts in a column.
        column: The column's number from 1 on, or its name in the first row; None for the first column.

    Raises:
        ExportError: It cannot be read like this, or holds too few texts.
    """
    try:
        content = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ExportError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ExportError(f"{path}: not UTF-8, at byte {error.start}") from error
    texts = list(dict.fromkeys(_texts(path, content, column)))
    if len(texts) < MIN_TEXTS:
        raise ExportError(f"{path}: has {len(texts)} distinct texts; calibration needs at least {MIN_TEXTS}")
    # Evenly from the whole file, which may be sorted.
    chosen = [texts[index * len(texts) // MAX_TEXTS] for index in range(MAX_TEXTS)]
    return Calibration(path.name, chosen if len(texts) > MAX_TEXTS else texts)


def _texts(path: Path, content: str, column: str | None) -> Iterable[Text]:
    if path.suffix in {".csv", ".tsv"}:
        return _column(path, content, column)
    if column is not None:
        raise ExportError(f"{path}: --calibration-column needs a .csv or .tsv file")
    lines = [(number, line) for number, line in enumerate(content.splitlines(), 1) if line.strip()]
    if path.suffix == ".jsonl":
        return [_object(path, number, line) for number, line in lines]
    return [line.strip() for _, line in lines]


def _column(path: Path, content: str, column: str | None) -> list[Text]:
    try:
        rows = corpus.table(content, path.suffix)
    except csv.Error as error:
        raise ExportError(f"{path}: not a table: {error}") from error
    if not rows:
        return []
    head, index = rows[0], 0
    if column is not None and column.isdecimal():
        index = int(column) - 1
    elif column is not None:
        if column not in head:
            raise ExportError(f"{path}: no column {column!r}; columns: {', '.join(head)}")
        index, rows = head.index(column), rows[1:]
    if not 0 <= index < len(head):
        raise ExportError(f"{path}: no column {column}; the file has {len(head)}")
    return [row[index] for row in rows if len(row) > index and row[index].strip()]


def _object(path: Path, number: int, line: str) -> Text:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ExportError(f"{path}, line {number}: not JSON: {error}") from error
    parts = [entry]
    if isinstance(entry, dict):
        parts = [entry.get("text"), *([entry["pair"]] if "pair" in entry else [])]
    if not all(isinstance(part, str) and part.strip() for part in parts):
        raise ExportError(f"{path}, line {number}: must be a text, or an object with `text`")
    return (parts[0], parts[1]) if len(parts) > 1 else parts[0]
