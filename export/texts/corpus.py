"""The texts for the comparison of artifacts, as inputs of each task."""

from __future__ import annotations

import csv
import importlib.resources
import json
from array import array
from itertools import count
from typing import TYPE_CHECKING

from bertserve.export.errors import ExportError
from bertserve.serving.records import EncodedText
from bertserve.serving.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


MIN_TEXTS = 256
"""Minimum number of texts that prove batch invariance."""

Text = str | tuple[str, str]

_PARTNER_STRIDE = 101
_PARTNER_CHARACTERS = 600
_MASK_EVERY = 7
_SHOWN_CHARACTERS = 120


def read() -> list[Text]:
    """The texts and pairs of texts/parity.jsonl, for the comparison of numbers.

    Raises:
        ExportError: The file is missing from the installation, or damaged.
    """
    return _read("parity.jsonl", MIN_TEXTS)


def probes() -> list[Text]:
    """The texts and pairs of texts/probes.jsonl, which reveal differences of tokenizer settings; not for calibration.

    Raises:
        ExportError: The file is missing from the installation, or damaged.
    """
    return _read("probes.jsonl", 1)


def for_task(texts: Sequence[Text], task: str) -> list[Text]:
    """The texts as inputs of a task. For tasks with pairs, texts are paired, the shorter one first."""
    if not TASKS[task].paired:
        return list(texts)
    return [
        text if isinstance(text, tuple) else _pair(text, texts[index * _PARTNER_STRIDE % len(texts)])
        for index, text in enumerate(texts, 1)
    ]


def with_masks(texts: Iterable[EncodedText], special_ids: dict[str, int]) -> list[EncodedText]:
    """The texts with every seventh token, and at least one, replaced by the mask token."""
    special = set(special_ids.values()) - {special_ids.get("unk", -1)}
    return [_mask(text, special, special_ids["mask"]) for text in texts]


def shown(text: Text) -> str:
    """A text as quoted in a report, shortened."""
    whole = " / ".join(text) if isinstance(text, tuple) else text
    line = " ".join(whole.split())
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]}..."


def table(content: str, suffix: str) -> list[list[str]]:
    """The rows of a table: CSV, or TSV in which quotation marks are ordinary characters."""
    lines = content.splitlines(keepends=True)
    if suffix == ".csv":
        return [row for row in csv.reader(lines) if row]
    return [row for row in csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE) if row]


def _read(name: str, least: int) -> list[Text]:
    """One JSON object per line, with `text` and optionally `pair`."""
    try:
        lines = (importlib.resources.files("bertserve.export.texts") / name).read_text(encoding="utf-8").splitlines()
        entries = [json.loads(line) for line in lines if line.strip()]
        texts = [(str(e["text"]), str(e["pair"])) if "pair" in e else str(e["text"]) for e in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ExportError(f"export/texts/{name} cannot be read; reinstall bertserve: {error!r}") from error
    if len(texts) < least:
        raise ExportError(f"export/texts/{name} has {len(texts)} texts; at least {least} are needed")
    return texts


def _pair(text: str, partner: Text) -> tuple[str, str]:
    other = partner[0] if isinstance(partner, tuple) else partner
    short, long = sorted((text[:_PARTNER_CHARACTERS], other[:_PARTNER_CHARACTERS]), key=len)
    return short, long


def _mask(text: EncodedText, special: set[int], mask: int) -> EncodedText:
    ids = array("i", text.ids)
    positions = count()
    for index, token in enumerate(ids):
        if token not in special and next(positions) % _MASK_EVERY == 0:
            ids[index] = mask
    return EncodedText(ids, text.type_ids)
