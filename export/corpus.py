"""The texts that artifacts are compared on."""

from __future__ import annotations

import importlib.resources
import json
from typing import Any

from export.errors import ExportError

LEAST_TEXTS = 256
"""Texts that batch invariance has to be proven on."""

Text = str | tuple[str, str]


def read() -> list[Text]:
    """The texts and pairs of texts/parity.jsonl: one JSON object a line, with `text` and maybe `pair`.

    Raises:
        ExportError: The file is not in the installation, or is damaged.
    """
    file = importlib.resources.files("export") / "texts" / "parity.jsonl"
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
        texts = [_text(json.loads(line)) for line in lines if line.strip()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ExportError(f"export/texts/parity.jsonl cannot be read; install bertserve again: {error!r}") from error
    if len(texts) < LEAST_TEXTS:
        raise ExportError(f"export/texts/parity.jsonl holds {len(texts)} texts; {LEAST_TEXTS} are needed")
    return texts


def _text(entry: dict[str, Any]) -> Text:
    return (str(entry["text"]), str(entry["pair"])) if "pair" in entry else str(entry["text"])
