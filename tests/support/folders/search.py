"""Looks for folders that are answered otherwise than by their own libraries."""

from __future__ import annotations

import random
import re
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from bertserve.export.errors import ExportError
from bertserve.serving.errors import BundleError
from tests.support.folders import grammar
from tests.support.folders.answering import Served, Unanswered, difference, export_graph, library_answers
from tests.support.folders.writing import LETTERS, special_tokens, write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tests.support.folders.answering import Answer, Asked, Input
    from tests.support.folders.grammar import Draw

    Change = Callable[[Path], None]

Outcome = Literal["same", "refused", "no library", "fault"]

LIMIT = 1e-5
"""Largest difference of a number, in parts of max(1, |x|)."""

_TEXTS = (
    "the Server café ÉLAN naïve text",
    "中国 and 東京が",
    "  two  spaces\tand\nnewline ",
    "a",
    "",
    "[MASK] [SEP] <mask></s> text",
    "an <j> and<d>text <a> in <x>.",
    "🙂 unknown ☃ zq don't «Élan»!",
    "".join(f"the {letter} " for letter in "abcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstu") + "END",
    "THE AND er: é, e\u0301 ü",
)
_MORE_TEXTS = ("naïve café Élan déjà vu", "THE QUICK BROWN FOX", "私はアリスです", "a\u200bb\u00a0c", "é e\u0301")
_QUERIES = ("the server?", "Café ÉLAN", "a b c d e f g h i j k l m n o p q r s t u v w x y z the and server text in")
_LONG = "the text and server in an e f g h i j k l m n o p q r s t u v w x y z a b c d e f g h i j k the"
_NAMED = re.compile(
    r"\w+\.(json|safetensors|bin|txt|model|onnx)\b|\b[a-z]+(_[a-z]+)+\b|modules\.json|architecture|weights"
)
"""What a refusal has to name: a file, or a field."""


@dataclass(frozen=True)
class Verdict:
    """What became of a folder.

    Attributes:
        outcome: `no library` where its own library does not take it either.
        words: What differs, and how; the sentence of a refusal.
    """

    outcome: Outcome
    words: str = ""


def inputs_of(draw: Draw, seed: int) -> list[Input]:
    """The texts that a folder is asked: those that tell settings apart, and some by the seed."""
    rng = random.Random(seed)
    task = draw["task"]
    texts = [*_TEXTS, *rng.sample(_MORE_TEXTS, 3)]
    if task == "rerank":
        pairs = [(rng.choice(_QUERIES[:2]), text) for text in texts]
        return [*pairs, (_QUERIES[2], _LONG), (_LONG, _QUERIES[2]), (_QUERIES[0], _LONG + " a b c")]
    if task == "classify":
        return [*texts, (_QUERIES[1], _TEXTS[0]), (_LONG, _QUERIES[2])]
    if task == "answer":
        long = " ".join(rng.choice(LETTERS) for _ in range(60))
        return [(rng.choice(_QUERIES[:2]), text) for text in [*texts[:4], *texts[5:8], *texts[9:], long]]
    if task == "fill_mask":
        mask = special_tokens(draw)["mask"]
        # A request may write any model's mask as BERT's, which no library knows.
        texts = [text for text in texts if mask == "[MASK]" or "[MASK]" not in text]
        return [
            f"the {mask} text",
            f"Café {mask}, ÉLAN{mask}",
            f"{mask}",
            f"an <j> <d>{mask} <a> in <x>.",
            *(f"{mask} {text}" for text in texts),
        ]
    return list(texts)


def _as_it_is(_folder: Path) -> None:
    pass


def judged(draw: Draw, seed: int, *, fused: bool, change: Change = _as_it_is) -> Verdict:
    """Writes a folder, asks its library and the server, and compares; without fusions it takes half of the time."""
    with tempfile.TemporaryDirectory(prefix="folders-") as place:
        case = prepared(draw, seed, Path(place), "folder", fused=fused, change=change)
        return case if isinstance(case, Verdict) else answered(case, case.served)


@dataclass(frozen=True)
class Case:
    name: str
    task: str
    inputs: Sequence[Input]
    aggregation: str
    wanted: Sequence[Answer | Unanswered]
    bundle: Path

    @property
    def served(self) -> Served:
        return Served(self.bundle)


def prepared(
    draw: Draw, seed: int, place: Path, name: str, *, fused: bool, change: Change = _as_it_is
) -> Case | Verdict:
    """Writes a folder, asks its library, and exports it below `place`; a verdict where it comes to no comparison."""
    folder = place / "folders" / name
    inputs, task = inputs_of(draw, seed), draw["task"]
    aggregation = random.Random(seed).choice(("simple", "first", "average", "max", "none"))
    try:
        change(write(folder, draw, seed))
        wanted = library_answers(folder, task, inputs, aggregation)
    except Exception as error:  # noqa: BLE001  whatever a library raises says that it does not take the folder
        return Verdict("no library", _told(error))
    if all(isinstance(answer, Unanswered) for answer in wanted):
        return Verdict("no library", str(wanted[0]))
    try:
        asked = None if _says_its_task(draw) else task
        bundle = export_graph(folder, place / "models", name, asked, fused=fused)
    except (ExportError, BundleError) as refusal:
        return _refused(draw, str(refusal).replace(str(folder), "FOLDER"))
    except Exception as error:  # noqa: BLE001  a fault of ours
        return Verdict("fault", f"the export ends in {_told(error)}")
    return Case(name, task, inputs, aggregation, wanted, bundle)


def answered(case: Case, server: Served | Asked) -> Verdict:
    try:
        found = server.answers(case.inputs, case.aggregation)
    except Exception as error:  # noqa: BLE001  a fault of ours
        return Verdict("fault", f"the server ends in {_told(error)}")
    return _compared(case.inputs, found, case.wanted)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _says_its_task(draw: Draw) -> bool:
    """Whether the export is asked without `--task`."""
    return "architectures" not in draw and draw["task"] in {"embed", "tag", "fill_mask", "answer"}


def _refused(draw: Draw, sentence: str) -> Verdict:
    if not grammar.refusable(draw):
        return Verdict("fault", f"refused, which no choice explains: {sentence}")
    if not _NAMED.search(sentence.replace("FOLDER", "")):
        return Verdict("fault", f"refused without the name of a file or a field: {sentence}")
    return Verdict("refused", sentence)


def _compared(
    inputs: Sequence[Input], found: Sequence[Answer | Unanswered], wanted: Sequence[Answer | Unanswered]
) -> Verdict:
    faults = []
    for each, ours, theirs in zip(inputs, found, wanted, strict=True):
        if isinstance(theirs, Unanswered):
            continue  # its library has no answer, whatever ours is
        if isinstance(ours, Unanswered):
            if not each and '"Empty"' in ours.reason:
                continue  # its routes refuse an empty text, as text-embeddings-inference does
            faults.append((float("inf"), f"{each!r}: no answer ({ours.reason}) for {_short(theirs)}"))
        elif (off := difference(ours, theirs)) > LIMIT:
            faults.append((off, f"{each!r}: {_short(ours)} for {_short(theirs)}"))
    if not faults:
        return Verdict("same")
    off, words = max(faults)
    return Verdict("fault", f"{len(faults)} of {len(inputs)} texts differ, by up to {off:.2g}; {words}")


def _short(answer: Answer) -> str:
    def rounded(one: Answer) -> Answer:
        if isinstance(one, list):
            return [rounded(each) for each in one[:4]]
        return round(one, 5) if isinstance(one, float) else one

    return str(rounded(answer))


def search(seeds: Iterable[int], *, fused: bool) -> tuple[list[str], Counter[Outcome]]:
    """Judges the folders of these seeds; the faults, and how many folders had each outcome."""
    faults: list[str] = []
    counts: Counter[Outcome] = Counter()
    for seed in seeds:
        draw = grammar.drawn(seed)
        verdict = judged(draw, seed, fused=fused)
        counts[verdict.outcome] += 1
        if verdict.outcome == "fault":
            faults.append(f"seed {seed}: {grammar.shown(draw)}\n    {verdict.words}")
    return faults, counts
