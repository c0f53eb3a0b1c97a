"""The answers of the two libraries to a folder, and those of the server to its bundle, in one form each task."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import warnings
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import sentence_transformers
import torch
import transformers

from bertserve.export import build
from bertserve.export.checkpoint.reader import open_checkpoint
from bertserve.export.checkpoint.source import find
from bertserve.export.graph import editor, optimize, task_model
from bertserve.export.progress import Progress, quiet
from bertserve.export.proof import reference
from bertserve.export.proof.engine import open_engine
from bertserve.export.proof.parity import run_batch
from bertserve.export.recipe import Recipe
from bertserve.export.tasks import answer as questions
from bertserve.serving.errors import InvalidRequest
from bertserve.serving.inference.served_models import ServedModel
from bertserve.serving.inference.tokenizer import TextTokenizer
from bertserve.serving.models.artifact_selection import select_artifact
from bertserve.serving.models.bundle import BundleWriter, file_entry, open_bundle
from bertserve.serving.models.manifest import TOKENIZER, Artifact, Invariance, Parity
from bertserve.serving.records import ModelIndex
from bertserve.serving.tasks import TASK_ROUTES
from bertserve.serving.tasks.answer import AnswerOptions
from bertserve.serving.tasks.base import Work
from bertserve.serving.tasks.classify import ClassifyOptions
from bertserve.serving.tasks.embed import EmbedOptions
from bertserve.serving.tasks.fill_mask import FillMaskOptions
from bertserve.serving.tasks.rerank import RerankOptions
from bertserve.serving.tasks.tag import TagOptions
from tests.support.clients import post_json
from tests.support.folders.grammar import POSITIONS
from tests.support.pipelines import answers_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path


Input = str | tuple[str, str]
Answer = Any
"""Numbers, texts and lists of them."""


@dataclass(frozen=True)
class Unanswered:
    """What stands in the place of an answer."""

    reason: str


FILLED = 5
_NO_LIMIT = 1_000_000
"""Tokens: a tokenizer that names more has no limit."""


def library_answers(folder: Path, task: str, inputs: Sequence[Input], aggregation: str) -> list[Answer | Unanswered]:
    """What the folder's users get at home, each text alone and in fp32; raises whatever a library raises."""
    with _silent(), torch.inference_mode():
        ask = _LIBRARIES[task](str(folder), aggregation)
        read = _READ[task]
        answers: list[Answer | Unanswered] = []
        for each in inputs:
            try:
                found = ask(each)
                answers.append(found if isinstance(found, Unanswered) else read(found))
            # A text that is too long for its positions, or too short for a window.
            except BaseException as error:
                if (
                    not isinstance(error, Exception) and type(error).__name__ != "PanicException"
                ):  # as tokenizers has it
                    raise
                answers.append(Unanswered(f"{type(error).__name__}: {error}"))
        return answers


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    with quiet(), warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        transformers.utils.logging.disable_progress_bar()
        yield


_FP32 = {"dtype": "float32"}


def _embed(folder: str, _: str) -> Callable[[Any], Any]:
    model = sentence_transformers.SentenceTransformer(folder, device="cpu", local_files_only=True, model_kwargs=_FP32)
    return lambda text: model.encode(text, show_progress_bar=False)


def _rerank(folder: str, _: str) -> Callable[[Any], Any]:
    model = sentence_transformers.CrossEncoder(folder, device="cpu", local_files_only=True, model_kwargs=_FP32)
    return lambda pair: model.predict(pair, show_progress_bar=False)


def _pipeline(kind: str, folder: str, **options: Any) -> Any:
    pipe = transformers.pipeline(kind, model=folder, device="cpu", dtype="float32", **options)
    pipe.tokenizer.model_max_length = _limit(pipe.tokenizer, pipe.model)
    return pipe


def _limit(tokenizer: Any, model: Any) -> int:
    """The tokenizer's limit; that of the positions where it has none, or where their table has no more rows."""
    own = int(tokenizer.model_max_length)
    bounded = own > _NO_LIMIT or any("position_embeddings" in name for name, _ in model.named_parameters())
    return min(own, POSITIONS) if bounded else own


def _classify(folder: str, _: str) -> Callable[[Any], Any]:
    pipe = _pipeline("text-classification", folder)

    def ask(each: Input) -> Any:
        found = pipe(_named(each), top_k=None, truncation=True)
        return found[0] if isinstance(found[0], list) else found

    return ask


def _named(each: Input) -> str | dict[str, str]:
    return each if isinstance(each, str) else {"text": each[0], "text_pair": each[1]}


def _tag(folder: str, aggregation: str) -> Callable[[Any], Any]:
    return _pipeline("token-classification", folder, aggregation_strategy=aggregation)


def _fill_mask(folder: str, _: str) -> Callable[[Any], Any]:
    pipe = _pipeline("fill-mask", folder)
    return lambda text: pipe(text, top_k=FILLED, tokenizer_kwargs={"truncation": True})


def _answer(folder: str, _: str) -> Callable[[Any], Any]:
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(folder, dtype="float32").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.model_max_length = _limit(tokenizer, model)

    def ask(pair: tuple[str, str]) -> Any:
        if not questions.reads_as_a_server(tokenizer, pair, tokenizer.model_max_length):
            return Unanswered("a server reads it in other windows")
        return answers_of(model, tokenizer, *pair, top_k=3)

    return ask


_LIBRARIES = {
    "embed": _embed,
    "rerank": _rerank,
    "classify": _classify,
    "tag": _tag,
    "fill_mask": _fill_mask,
    "answer": _answer,
}


def export_graph(folder: Path, models: Path, name: str, task: str | None, *, fused: bool) -> Path:
    """Exports a folder as the command does, without the proof and perhaps without fusions; returns the bundle.

    Raises:
        ExportError: The folder is refused.
    """
    checkpoint = open_checkpoint(find(str(folder)), None, lambda _: None, task)
    model = task_model.load(checkpoint)
    recipe = Recipe(str(folder), models, name, ("fp32",))
    with BundleWriter(models, name) as writer:
        (writer.path / "raw").mkdir()
        task_model.write(model, raw := writer.path / "raw" / "raw.onnx")
        if fused:
            optimize.fuse(raw, whole := raw.with_name("fused.onnx"), optimize.shape_of(checkpoint))
            raw = whole
        editor.copy(raw, graph := writer.path / "model.fp32.onnx", editor.MAPPED)
        shutil.rmtree(raw.parent)
        (writer.path / TOKENIZER).write_bytes(checkpoint.vocabulary.content)
        (writer.path / reference.REFERENCE).write_bytes(b"")
        made = build._Export(recipe, checkpoint, writer, Progress(io.StringIO(), lambda: None))
        entry = file_entry(graph)
        artifact = Artifact(
            file=graph.name,
            precision="fp32",
            target="cpu",
            sha256=entry.sha256,
            size_bytes=entry.size_bytes,
            batch_invariant=True,
            parity=Parity(1, 0.0, 1.0, 1.0, 1.0),
            invariance=Invariance(1, 0.0, 1.0),
            operators={},
        )
        return writer.publish(made._manifest((artifact,), made._files())).path


class Served:
    """A bundle behind all that a request passes but the queue: prompts, tokenizer, engine, task."""

    def __init__(self, bundle: Path) -> None:
        opened = open_bundle(bundle)
        form = select_artifact(opened, "fp32", "ort-cpu", unproven=False)
        manifest = opened.manifest
        self._model = ServedModel.of(form, ModelIndex(0), TextTokenizer.open(opened.path, manifest))
        self._engine = open_engine(form.spec(), "cpu", 1)

    def answers(self, inputs: Sequence[Input], aggregation: str) -> list[Answer | Unanswered]:
        """What the server answers; what it refuses alone is unanswered, all others share a batch."""
        options = self._options(aggregation)
        task, model = TASK_ROUTES[type(options)], self._model
        task.check(options, model.manifest)
        answers: list[Answer | Unanswered] = []
        whole: list[tuple[Any, Sequence[Any]]] = []
        for each in task.prepare(inputs, options, model.manifest, None, None).inputs:
            try:
                texts = task.encode(model.tokenizer, [each], options, truncate=True)
            except InvalidRequest as refusal:
                answers.append(Unanswered(f"422: {refusal.message}"))
                continue
            answers.append(None)
            whole.append((each, texts))
        rows = self._rows([text for _, texts in whole for text in texts])
        finished = iter(
            task.finish(Work([each], options, texts, [next(rows) for _ in texts], model.manifest, model.tokenizer))[0]
            for each, texts in whole
        )
        read = _READ[model.manifest.task]
        return [
            answer
            if isinstance(answer, Unanswered)
            else read(msgspec.to_builtins(next(finished), enc_hook=np.ndarray.tolist))
            for answer in answers
        ]

    def _rows(self, texts: Sequence[Any]) -> Iterator[Any]:
        output = run_batch(self._engine, texts)
        return iter([tuple(array[at] for array in output.arrays) for at in range(len(texts))])

    def _options(self, aggregation: Any) -> Any:
        return {
            "embed": EmbedOptions(),
            "rerank": RerankOptions(),
            "classify": ClassifyOptions(),
            "tag": TagOptions(aggregation),
            "fill_mask": FillMaskOptions(FILLED),
            "answer": AnswerOptions(3),
        }[self._model.manifest.task]


class Asked:
    def __init__(self, address: str, name: str, task: str) -> None:
        self._address, self._name, self._task = address, name, task

    def answers(self, inputs: Sequence[Input], aggregation: str) -> list[Answer | Unanswered]:
        """What the server answers, to all inputs in one request where it takes all, else to each alone."""
        found = self._ask(inputs, aggregation)
        if len(inputs) > 1 and any(isinstance(answer, Unanswered) for answer in found):
            return [answer for each in inputs for answer in self.answers([each], aggregation)]
        return found

    def _ask(self, inputs: Sequence[Input], aggregation: str) -> list[Answer | Unanswered]:
        if self._task == "rerank" and len({query for query, _ in inputs}) > 1:
            return [Unanswered("one query a request")]
        reply = post_json(self._address, f"/models/{self._name}", json.dumps(self._body(inputs, aggregation)).encode())
        if reply.status != HTTPStatus.OK:
            return [Unanswered(f"{reply.status}: {reply.body.decode()}")]
        found = reply.json()
        if self._task == "rerank":
            found = [each["score"] for each in sorted(found, key=lambda each: each["index"])]
        return list(map(_READ[self._task], found))

    def _body(self, inputs: Sequence[Input], aggregation: str) -> dict[str, Any]:
        if self._task == "rerank":
            return {"query": inputs[0][0], "texts": [text for _, text in inputs], "truncate": True}
        listed: list[Any] = list(inputs)
        if self._task == "answer":
            listed = [{"question": question, "context": context} for question, context in inputs]
        if self._task == "classify":
            listed = list(map(_named, inputs))
        further = {"tag": {"aggregation_strategy": aggregation}, "fill_mask": {"top_k": FILLED}, "answer": {"top_k": 3}}
        return {"inputs": listed, "parameters": {"truncate": True, **further.get(self._task, {})}}


def _read_masks(found: Any) -> Answer:
    masks = found if found and isinstance(found[0], list) else [found]
    return [[[one["token"], one["score"], one["token_str"], one["sequence"]] for one in mask] for mask in masks]


_READ: dict[str, Callable[[Any], Answer]] = {
    "embed": lambda vector: [float(number) for number in vector],
    "rerank": float,
    "classify": lambda found: sorted([str(one["label"]), one["score"]] for one in found),
    "tag": lambda found: [
        [str(one.get("entity_group", one.get("entity"))), float(one["score"]), one["start"], one["end"]]
        for one in found
    ],
    "fill_mask": _read_masks,
    "answer": lambda found: [[one["answer"], one["score"], one["start"], one["end"]] for one in found],
}
"""What is compared of an answer; the libraries, the server's tasks and its replies have the same names."""


def difference(found: Answer, wanted: Answer) -> float:
    """The largest difference of a number, in parts of max(1, |x|); infinite where something else differs."""
    if isinstance(wanted, list):
        if not isinstance(found, list) or len(found) != len(wanted):
            return float("inf")
        return max((difference(one, other) for one, other in zip(found, wanted, strict=True)), default=0.0)
    if isinstance(wanted, float):
        off = abs(found - wanted) / max(1.0, abs(wanted)) if isinstance(found, int | float) else float("inf")
        return off if off == off else float("inf")  # noqa: PLR0124  not a number
    return 0.0 if found == wanted else float("inf")
