"""The end-to-end check of an export: the server's answers to texts, compared with those of the reference library.

The bundle's answers pass through the server's tokenizer, prompts, truncation, batches and tasks. A setting of the
checkpoint that the export ignored makes a difference here. A comparison that begins with token ids cannot see it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bertserve.export.errors import ExportError
from bertserve.export.progress import quiet
from bertserve.export.proof.parity import run_batch, with_broken
from bertserve.export.proof.reference_library import failing_as
from bertserve.export.tasks import EXPORTS
from bertserve.export.tasks.decisions import cosine
from bertserve.export.texts.corpus import shown
from bertserve.serving.errors import BertserveError
from bertserve.serving.inference.served_models import ServedModel
from bertserve.serving.inference.tokenizer import TextTokenizer
from bertserve.serving.models.bundle import Bundle
from bertserve.serving.models.manifest import TOKENIZER, Artifact, EndToEnd
from bertserve.serving.records import TYPES, ModelIndex
from bertserve.serving.tasks import TASK_ROUTES
from bertserve.serving.tasks.base import Work

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from bertserve.export.tasks.libraries.answers import Answer, Variant
    from bertserve.export.tasks.libraries.library import Library, Tokens
    from bertserve.export.tasks.limits import Limits
    from bertserve.export.texts.corpus import Text
    from bertserve.serving.engine.base import Engine
    from bertserve.serving.models.manifest import Manifest
    from bertserve.serving.records import EncodedText, Row, TextInput

_BATCH = 8
_SHORT = 48
_MAX_SHORT = 800
_LONG = 600
"""Tokens of a short text, of all of those, and of the longest text whose numbers are compared.

The tokens of every text are compared; equal tokens give equal numbers, so few texts are enough for those.
"""
_MAX_LONG = 2
_SHOWN_TOKENS = 8
_SHOWN_NUMBERS = 3
_UNPROVEN = Artifact("", "fp32", "cpu", "", 0, batch_invariant=True, parity=None, invariance=None, operators={})
"""Stands for the artifact where a request's path does not read it."""


@dataclass(slots=True, frozen=True)
class _Question:
    """Texts for one variant of a request, as a server reads them, with the library's answers."""

    variant: Variant
    texts: Sequence[Text]
    inputs: Sequence[TextInput]
    encoded: Sequence[EncodedText]
    answers: Sequence[Answer]


class EndToEndProof:
    """Texts with a library's answers.

    Attributes:
        name: The library with its version.
        texts: Number of texts whose tokens were compared.
        obstacle: Why the library's numbers are useless; otherwise empty.
    """

    def __init__(self, library: Library, folder: Path, manifest: Manifest, probes: Sequence[Text]) -> None:
        """Compares the tokens of all texts, and computes the library's answers to some.

        Raises:
            ExportError: A text has other tokens in the bundle, or the library fails on one.
        """
        self.name, self.obstacle = library.name, ""
        self._lacks_weights = library.missing
        self._manifest = manifest
        tokenizer = TextTokenizer.open(folder, manifest)
        bundle = Bundle(folder, manifest, "")
        self._model = ServedModel(bundle=bundle, artifact=_UNPROVEN, index=ModelIndex(0), tokenizer=tokenizer)
        before = torch.get_num_threads()
        torch.set_num_threads(1)  # as in `task_model.answers`
        try:
            with quiet():
                self._ask(library, folder, probes)
        finally:
            torch.set_num_threads(before)

    def _ask(self, library: Library, folder: Path, probes: Sequence[Text]) -> None:
        variants, tokenized = library.variants(), library.tokenized()
        known = [text for probe in probes if (text := library.asked(probe)) is not None]
        # The bundle's tokenizer comes first: it ends rules that take too long.
        ours = {
            text: [self._seen(one) for variant in tokenized for one in self._read(variant, [text])[1]] for text in known
        }
        with failing_as(ExportError, f"{library.name} cannot tokenize a text"):
            asked = {text: library.encode(text) for text in ours}
        # A tokenizer's class may add special tokens without rows in the model, which then fails.
        most = self._manifest.vocab_size
        asked = {text: there for text, there in asked.items() if all(max(ids) < most for ids, _ in there)}
        texts, sizes = list(asked), []
        for text, there in asked.items():
            here = ours[text]
            if here != (seen := [self._blind(one) for one in there]):
                setting = _setting(library, (folder / TOKENIZER).read_bytes(), self._manifest)
                raise ExportError(
                    f"the text {shown(text)!r} has different tokens in the bundle and in {library.name} with the "
                    f"checkpoint: {self._tokens_apart(here, seen)}{setting}"
                )
            sizes.append(sum(len(ids) for ids, _ in here))
        self.texts = len(texts)
        chosen = _chosen(texts, sizes)
        self._questions = [self._question(library, variant, chosen[: variant.most]) for variant in variants]

    def _question(self, library: Library, variant: Variant, texts: Sequence[Text]) -> _Question:
        inputs, encoded = self._read(variant, texts)
        with failing_as(ExportError, f"{library.name} fails on a text"):
            return _Question(variant, texts, inputs, encoded, library.answer(texts, variant))

    def compare(
        self, engine: Engine, limits: Mapping[str, Limits], *, exact: bool, batched: bool
    ) -> tuple[EndToEnd | None, dict[str, str]]:
        """Answers the texts as a server does, with an artifact.

        Args:
            engine: Runs it as its only model.
            limits: The limits to keep, by task; first those of the bundle's own task.
            exact: Whether every number has a limit, as for fp32.
            batched: Whether it may be batched.

        Returns:
            The figures, None if the library's are useless; the broken limits, each with a sentence.

        Raises:
            ExportError: The answers differ in what no precision changes, or the engine failed.
        """
        if self.obstacle:
            return None, {}
        rows: dict[bytes, Row] = {}
        found = {task: _Found(self.name, directed=EXPORTS[task].vectors) for task in limits}
        try:
            for question in self._questions:
                if exact or not question.variant.exact:
                    here = self._answers(engine, question, rows, batched=batched)
                    for text, ours, theirs in zip(question.texts, here, question.answers, strict=True):
                        found[self._task(question.variant)].add(question.variant, text, ours, theirs, self._words)
        except _DifferentError as error:
            if not self._lacks_weights:
                raise ExportError(str(error)) from None
            broken = {"": str(error)}
        else:
            own, *others = found
            broken = found[own].broken(limits[own], exact=exact)
            for task in others:
                broken = with_broken(broken, task, found[task].broken(limits[task], exact=exact))
        if broken and self._lacks_weights:
            self.obstacle = f"{self.name} has no weights for a part of the model"
            return None, {}
        return _together([each.figures() for each in found.values()]), broken

    def _answers(self, engine: Engine, question: _Question, rows: dict[bytes, Row], *, batched: bool) -> list[Answer]:
        variant, model = question.variant, self._model
        way = TASK_ROUTES[type(variant.options)]
        way.check(variant.options, model.manifest)
        encoded = question.encoded
        if way.prepare((), variant.options, model.manifest, None, None).engineless:
            return self._finish(question, [])
        missing = list({_key(text): text for text in encoded if _key(text) not in rows}.values())
        size = _BATCH if batched else 1
        for begin in range(0, len(missing), size):
            batch = missing[begin : begin + size]
            arrays = run_batch(engine, batch).arrays
            rows.update((_key(text), tuple(array[at] for array in arrays)) for at, text in enumerate(batch))
        return self._finish(question, [rows[_key(text)] for text in encoded])

    def _finish(self, question: _Question, rows: Sequence[Row]) -> list[Answer]:
        options, model = question.variant.options, self._model
        work = Work(question.inputs, options, question.encoded, rows, model.manifest, model.tokenizer)
        read = EXPORTS[self._task(question.variant)].read
        return [read(one, model.manifest) for one in TASK_ROUTES[type(options)].finish(work)]

    def _task(self, variant: Variant) -> str:
        """The task of a variant, which may be one of those beside the bundle's own."""
        task = TASK_ROUTES[type(variant.options)].task or ""
        return task if task in self._manifest.also else self._manifest.task

    def _read(self, variant: Variant, texts: Sequence[Text]) -> tuple[Sequence[TextInput], Sequence[EncodedText]]:
        """Texts with their prompt, and their tokens."""
        model, way = self._model, TASK_ROUTES[type(variant.options)]
        inputs = way.prepare(texts, variant.options, model.manifest, variant.prompt, None).inputs
        try:
            return inputs, way.encode(model.tokenizer, inputs, variant.options, truncate=True)
        except BertserveError as error:
            raise ExportError(
                f"the bundle rejects the text {shown(texts[0])!r}, which {self.name} accepts: {error}"
            ) from error

    def _seen(self, text: EncodedText) -> Tokens:
        ids = list(text.ids)
        return self._blind((ids, [0] * len(ids) if text.type_ids is None else list(text.type_ids)))

    def _blind(self, tokens: Tokens) -> Tokens:
        """The tokens as the graph sees them: it may have no token types."""
        ids, types = tokens
        return (ids, types if any(spec.name == TYPES for spec in self._manifest.inputs) else [0] * len(ids))

    def _words(self, text: Text) -> str:
        _, (tokens, *_) = self._read(self._questions[0].variant, [text])
        return self._named(list(tokens.ids), 0)

    def _named(self, ids: Sequence[int], begin: int) -> str:
        part = [self._model.tokenizer.name(token) or f"[{token}]" for token in ids[begin : begin + _SHOWN_TOKENS]]
        return " ".join([*(["..."] if begin else []), *part, *(["..."] if begin + _SHOWN_TOKENS < len(ids) else [])])

    def _tokens_apart(self, here: Sequence[Tokens], there: Sequence[Tokens]) -> str:
        if len(here) != len(there):
            return f"{len(here)} windows here, {len(there)} there"
        (ids, types), (others, segments) = next(
            (one, other) for one, other in zip(here, there, strict=True) if one != other
        )
        sides = (types, segments) if ids == others else (ids, others)
        apart = next((at for at, pair in enumerate(zip(*sides, strict=False)) if pair[0] != pair[1]), None)
        begin = max(0, (min(map(len, sides)) if apart is None else apart) - 2)
        if ids == others:
            part = slice(begin, begin + _SHOWN_TOKENS)
            return f"segments {types[part]} here, {segments[part]} there, of {self._named(ids, begin)}"
        return (
            f"here {len(ids)} tokens, {self._named(ids, begin)}; there {len(others)} tokens, "
            f"{self._named(others, begin)}"
        )


class _DifferentError(Exception):
    """Answers differ in what no precision changes."""


class _Found:
    """The running result of a comparison."""

    def __init__(self, name: str, *, directed: bool) -> None:
        self._name, self._directed = name, directed
        self._difference, self._worst = 0.0, ""
        self._same, self._decisions, self._other = 0, 0, ""
        self._cosines: list[float] = []
        self._farthest = ""
        self._texts: set[Text] = set()

    def add(self, variant: Variant, text: Text, here: Answer, there: Answer, tokens: Callable[[Text], str]) -> None:
        """Compares two answers to a text; `tokens` shows those of a text for a message."""
        self._texts.add(text)
        what = f"{shown(text)!r}{f' {variant.title}' if variant.title else ''}"
        misshapen = there.sure and not there.decisions and here.numbers.shape != there.numbers.shape
        if here.structure != there.structure or misshapen:
            raise _DifferentError(
                f"the text {what} returns {_short(here.structure)}, but {self._name} with the checkpoint "
                f"returns {_short(there.structure)}; tokens: {tokens(text)}"
            )
        if here.decisions != there.decisions and not there.sure:
            return
        same = [one == other for one, other in zip(here.decisions, there.decisions, strict=False)]
        self._decisions += max(len(here.decisions), len(there.decisions))
        self._same += sum(same)
        if here.decisions != there.decisions:
            self._other = self._other or (
                f"the text {what} returns {_short(here.decisions)} here, {_short(there.decisions)} there; "
                f"tokens: {tokens(text)}"
            )
            return
        if not there.numbers.size:
            return
        apart = np.abs(here.numbers - there.numbers) / np.maximum(1, np.abs(there.numbers))
        worst = float(np.max(apart)) if np.isfinite(apart).all() else math.inf
        if worst > self._difference:
            self._difference = worst
            self._worst = (
                f"the text {what}: {_short(here.numbers)} here, {_short(there.numbers)} there; tokens: {tokens(text)}"
            )
        if self._directed:
            # Two sparse vectors without a weight are the same.
            near = float(cosine(here.numbers, there.numbers)) if here.numbers.any() or there.numbers.any() else 1.0
            if not self._cosines or near < min(self._cosines):
                self._farthest = f"the text {what}; tokens: {tokens(text)}"
            self._cosines.append(near)

    def figures(self) -> EndToEnd:
        agreement = self._same / self._decisions if self._decisions else None
        mean = float(np.mean(self._cosines)) if self._cosines else None
        return EndToEnd(len(self._texts), self._difference, mean, agreement)

    def broken(self, limits: Limits, *, exact: bool) -> dict[str, str]:
        broken, figures = {}, self.figures()
        if not self._difference <= limits.max_abs_difference:
            broken["max_abs_difference"] = (
                f"largest difference from {self._name}, {self._difference:.2g}, allowed {limits.max_abs_difference:g}, "
                f"at {self._worst}"
            )
        # As far as so few decisions can tell.
        least = limits.agreement - 2 * math.sqrt(limits.agreement * (1 - limits.agreement) / max(1, self._decisions))
        if figures.agreement is not None and figures.agreement < (limits.agreement if exact else least):
            broken["agreement"] = (
                f"{self._decisions - self._same} of {self._decisions} decisions differ from {self._name}: {self._other}"
            )
        # These texts are unusual on purpose, so the smallest cosine of INT8 says little about others.
        if figures.cosine_mean is not None and figures.cosine_mean < limits.cosine_mean:
            broken["cosine_mean"] = (
                f"mean cosine to {self._name}, {figures.cosine_mean:.4f}, at least {limits.cosine_mean:g} needed, "
                f"farthest at {self._farthest}"
            )
        return broken


def _together(figures: Sequence[EndToEnd]) -> EndToEnd:
    """The figures of several tasks: the worst of each."""
    if len(figures) == 1:
        return figures[0]
    cosines = [each.cosine_mean for each in figures if each.cosine_mean is not None]
    return EndToEnd(
        figures[0].texts, max(each.max_difference for each in figures), min(cosines, default=None), figures[0].agreement
    )


def _short(values: Any) -> str:  # noqa: ANN401  a tuple or an array
    part = [f"{value:.6g}" if isinstance(value, float) else repr(value) for value in values[:_SHOWN_NUMBERS]]
    return f"({', '.join([*part, *(['...'] if len(values) > _SHOWN_NUMBERS else [])])})"


def _key(text: EncodedText) -> bytes:
    return bytes(text.ids) + (b"" if text.type_ids is None else b"|" + bytes(text.type_ids))


def _chosen(texts: Sequence[Text], sizes: Sequence[int]) -> list[Text]:
    """Short texts of all kinds in a fixed order, and some long ones."""
    order = np.random.default_rng(0).permutation(len(texts)).tolist()
    short, tokens = [], 0
    for index in order:
        if sizes[index] <= _SHORT and tokens + sizes[index] <= _MAX_SHORT:
            short.append(texts[index])
            tokens += sizes[index]
    long = sorted((index for index in order if _SHORT < sizes[index] <= _LONG), key=lambda index: -sizes[index])
    return [*short, *(texts[index] for index in long[:_MAX_LONG])]


def _setting(library: Library, content: bytes, manifest: Manifest) -> str:
    """The setting that explains a difference, as the end of a sentence; empty if unknown."""
    apart = []
    if library.longest != manifest.max_length:
        apart.append(f"the maximum length ({manifest.max_length} tokens here, {library.longest} there)")
    backend = getattr(library.tokenizer, "backend_tokenizer", None)
    if backend is not None:
        here, there = json.loads(content), json.loads(backend.to_str())
        apart += [name for name in _PARTS if here.get(name) != there.get(name)]
    if library.tokenizer.truncation_side != manifest.truncation_side:
        apart.append("truncation_side")
    if any(spec.name == TYPES for spec in manifest.inputs) and TYPES not in library.tokenizer.model_input_names:
        apart.append("model_input_names")
    return f". They differ in {', '.join(apart)}" if apart else ""


_PARTS = ("normalizer", "pre_tokenizer", "model", "post_processor", "added_tokens")
