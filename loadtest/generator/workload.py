"""Real English texts with an exact number of tokens, and the bundle whose tokenizer counts them.

Reads the manifest and tokenizer files of a bundle. Imports nothing of the server.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from bertserve.loadtest.errors import BenchError
from bertserve.serving.host import command

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_TRIES_PER_TEXT = 20
_TOKENS_PER_WORD = 1.26
_SPECIAL_TOKENS = 2


@dataclass(slots=True, frozen=True)
class Bundle:
    """The properties of a model that a load test needs.

    Attributes:
        path: `<repository>/<model>/<version>`.
        model: The model's name.
        version: A whole number.
        hidden_size: Size of an embedding.
        max_length: Maximum input length in tokens, special tokens included.
        inputs: Names of the graph's inputs.
        artifact: The ONNX file that the server runs.
        precision: `int8` or `fp32`.
        batch_invariant: Whether the server may batch texts for this artifact.
    """

    path: Path
    model: str
    version: int
    hidden_size: int
    max_length: int
    inputs: tuple[str, ...]
    artifact: Path
    precision: str
    batch_invariant: bool


@dataclass(slots=True, frozen=True)
class Text:
    """A text and its token ids, special tokens included."""

    text: str
    ids: list[int]


def find_bundle(repository: Path, precision: str = "auto", target: str = "cpu") -> Bundle:
    """The newest version of the first model in a repository, which is the server's default.

    Args:
        repository: Holds `<model>/<version>/manifest.json`.
        precision: `fp32`, `int8`, or `auto`: int8 if available, as the server does on a CPU.
        target: Runtime of the artifact: `cpu` (ONNX Runtime) or `openvino`.

    Raises:
        BenchError: There is no model, or it has no such artifact.
    """
    paths = sorted(path.parent for path in repository.glob("[!.]*/[0-9]*/manifest.json") if path.parent.name.isdigit())
    if not paths:
        raise BenchError(f"{repository} has no models; export one with `{command('export')}`")
    path = max((path for path in paths if path.parent == paths[0].parent), key=lambda path: int(path.name))
    manifest = json.loads((path / "manifest.json").read_bytes())
    artifact = _artifact(manifest, ("int8", "fp32") if precision == "auto" else (precision,), target)
    if artifact is None:
        raise BenchError(f"{path} has no {precision} artifact for {target}")
    return Bundle(
        path=path,
        model=manifest["model"],
        version=manifest["version"],
        hidden_size=manifest["hidden_size"],
        max_length=manifest["max_length"],
        inputs=tuple(tensor["name"] for tensor in manifest["inputs"]),
        artifact=path / artifact["file"],
        precision=artifact["precision"],
        batch_invariant=artifact["batch_invariant"],
    )


def _artifact(manifest: dict[str, Any], precisions: tuple[str, ...], target: str) -> dict[str, Any] | None:
    for precision in precisions:
        for artifact in manifest["artifacts"]:
            if (artifact["precision"], artifact["target"]) == (precision, target):
                return dict(artifact)
    return None


def make_texts(bundle: Path, tokens: int, count: int) -> list[Text]:
    """Distinct texts with exactly `tokens` tokens, special tokens included. Deterministic.

    `bundle` is the directory with `tokenizer.json`.

    Raises:
        BenchError: Too few such texts could be made with this tokenizer.
    """
    tokenizer = Tokenizer.from_str((bundle / "tokenizer.json").read_text(encoding="utf-8"))
    words = sentence_words()
    costs = [len(tokenizer.encode(word, add_special_tokens=False)) for word in words]
    special = tokenizer.num_special_tokens_to_add(is_pair=False)
    dice = random.Random(1)
    found: dict[str, Text] = {}
    for _ in range(_TRIES_PER_TEXT * count):
        start = dice.randrange(len(words))
        text = " ".join(words[index] for index in _fitting(costs, start, tokens - special))
        ids = tokenizer.encode(text).ids
        # A tokenizer may merge across a word boundary, so only the count of the whole text is reliable.
        if text and len(ids) == tokens:
            found[text] = Text(text, ids)
        if len(found) == count:
            return list(found.values())
    raise BenchError(f"only {len(found)} of {count} texts of {tokens} tokens could be built")


def spoken_text(tokens: int, dice: random.Random) -> str:
    """Consecutive words of real English with about `tokens` tokens, special tokens included. Needs no tokenizer."""
    words = sentence_words()
    count = max(1, round((tokens - _SPECIAL_TOKENS) / _TOKENS_PER_WORD))
    start = dice.randrange(len(words))
    return " ".join(itertools.islice(itertools.cycle(words), start, start + count))


def different_texts(least: int, most: int, count: int, seed: int = 1) -> list[str]:
    """Distinct texts of consecutive English words, with random lengths from `least` to `most` words.

    Raises:
        BenchError: There are fewer than `count` such texts.
    """
    words, lengths = sentence_words(), range(least, most + 1)
    twice = [*words, *words]
    choices = len(words) * len(lengths)
    texts: dict[str, None] = {}
    for choice in random.Random(seed).sample(range(choices), choices):
        start, place = divmod(choice, len(lengths))
        texts[" ".join(twice[start : start + lengths[place]])] = None
        if len(texts) == count:
            return list(texts)
    raise BenchError(f"there are only {len(texts)} distinct texts of {least} to {most} words, not {count}")


@functools.cache
def sentence_words() -> list[str]:
    """The words of the built-in English text."""
    return (files("bertserve.loadtest") / "data" / "sentences.txt").read_text(encoding="utf-8").split()


def _fitting(costs: list[int], start: int, tokens: int) -> Iterator[int]:
    """Indexes of consecutive words from `start`; words that exceed the remaining tokens are skipped."""
    left = tokens
    for step in range(len(costs)):
        index = (start + step) % len(costs)
        if 0 < costs[index] <= left:
            left -= costs[index]
            yield index
        if not left:
            return
