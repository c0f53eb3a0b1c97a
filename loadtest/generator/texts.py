"""Inputs of requests: a plain text or a task's fields, from the built-in text or a file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from bertserve.loadtest.errors import BenchError
from bertserve.serving.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Text = str | dict[str, Any]
"""A plain text, or a task's fields."""


def fields_of(task: str, text: Text) -> Mapping[str, Any]:
    """The task's fields for a text; fields other than the text get generated values."""
    return text if isinstance(text, dict) else TASKS[task].load.item(text)


def inputs_in(task: str, text: Text) -> int:
    """Number of inputs in a request for `text`."""
    return TASKS[task].load.inputs(fields_of(task, text))


def read_texts(path: Path) -> tuple[tuple[int, Text], ...]:
    """The texts of a file with their line numbers: one per line, or in a `.jsonl` file one JSON object per line.

    Raises:
        BenchError: The file cannot be read or is empty, or a line is not an object.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BenchError(f"--texts {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BenchError(f"--texts {path}: not UTF-8 at byte {error.start}; must be one text per line") from error
    texts = tuple(
        (number, _object(path, number, line) if path.suffix == ".jsonl" else line.strip())
        for number, line in enumerate(lines, 1)
        if line.strip()
    )
    if not texts:
        raise BenchError(f"--texts {path}: has no texts; expected one per line")
    return texts


def texts_for(task: str, path: Path, texts: tuple[tuple[int, Text], ...]) -> tuple[Text, ...]:
    """The texts of a file, after checking that each has the task's fields.

    Raises:
        BenchError: A line has missing, unknown or invalid fields.
    """
    needed = TASKS[task].load.fields
    known = needed + TASKS[task].load.optional
    for number, text in texts:
        if isinstance(text, dict):
            where = f"--texts {path}: line {number}"
            if missing := [name for name in needed if name not in text]:
                raise BenchError(f"{where} has no {missing[0]!r}; the task {task} needs {' and '.join(needed)}")
            if other := [name for name in text if name not in known]:
                raise BenchError(f"{where}: {other[0]!r} is unknown; the task {task} takes {', '.join(known)}")
            for name, value in text.items():
                _check_value(where, name, value)
    return tuple(text for _, text in texts)


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise BenchError(f"--texts {path}: line {number} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise BenchError(f'--texts {path}: line {number} must be an object, as in {{"text": "..."}}')
    return found


def _check_value(where: str, name: str, value: object) -> None:
    if name == "texts":
        if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
            raise BenchError(f"{where}: 'texts' must be a list of one or more strings")
    elif not isinstance(value, str):
        raise BenchError(f"{where}: {name!r} must be a string, not {value!r}")
