"""What a checkpoint answers where it comes from: the library that its users load its folder with, from text on.

Sentence Transformers for vectors and rerankers, Transformers for the rest. Each answers what its users get, in the form
of `Answer`.
"""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from transformers.pipelines.token_classification import AggregationStrategy

from export.checkpoint.weights import unpickle
from export.progress import quiet
from serving.records import (
    AnswerOptions,
    ClassifyOptions,
    EmbedOptions,
    EmbedTokensOptions,
    FillMaskOptions,
    RerankOptions,
    TagOptions,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from export.checkpoint.reader import Checkpoint
    from export.texts.corpus import Text
    from serving.models.manifest import Task
    from serving.records import TaskOptions

    Tokens = tuple[list[int], list[int]]
    Numbers = NDArray[np.float64]

_BATCH = 8
_FEW = 4
"""Texts that are asked in a way that is not the usual one."""
_MOST_PROMPTS = 4
_LONGEST_WITH_ONE_MASK = 16
_LONGEST_REASON = 200


class NotLoadedError(Exception):
    """No library answers for this folder; the sentence says why."""


@dataclass(slots=True, frozen=True)
class Form:
    """A way of asking a model.

    Attributes:
        options: As a request has them.
        title: What it asks for, in words that follow others; empty for the usual way.
        prompt: The name of a prompt; None for the default one, or none.
        most: How many texts are asked in this way; None for all.
        exact: Whether it can be asked only of an artifact whose every number keeps a limit: one other tag makes other
            entities.
    """

    options: TaskOptions[Any]
    title: str = ""
    prompt: str | None = None
    most: int | None = None
    exact: bool = False


@dataclass(slots=True, frozen=True)
class Answer:
    """What one text is answered.

    Attributes:
        told: What it says whatever the precision: sizes, names, places.
        decided: What follows from the numbers: labels, words, spans.
        numbers: The numbers, float64 [n].
    """

    told: tuple[object, ...]
    decided: tuple[object, ...]
    numbers: Numbers


def vector(numbers: Any) -> Answer:  # noqa: ANN401  an array of NumPy's or of PyTorch's
    """A vector, or one for each token."""
    array = np.asarray(numbers, np.float64)
    return Answer(array.shape, (), array.ravel())


def score(number: float) -> Answer:
    """The score of a pair."""
    return Answer((), (), np.array([number], np.float64))


def labels(scores: Iterable[tuple[str, float]], *, chosen: bool) -> Answer:
    """Every label with its score; `chosen` where one of them is the answer."""
    ordered = sorted(scores)
    best = max(ordered, key=lambda pair: pair[1])[0]
    numbers = np.array([number for _, number in ordered], np.float64)
    return Answer(tuple(name for name, _ in ordered), (best,) if chosen else (), numbers)


def tagged(found: Iterable[tuple[str, float, int, str, int, int]]) -> Answer:
    """Tokens with their tags: tag, score, place, word, start, end of each."""
    whole = list(found)
    numbers = np.array([one[1] for one in whole], np.float64)
    return Answer(tuple(one[2:] for one in whole), tuple(one[0] for one in whole), numbers)


def entities(found: Iterable[tuple[str, float, int, int]]) -> Answer:
    """Entities: tag, score, start, end of each."""
    whole = list(found)
    decided = tuple((tag, start, end) for tag, _, start, end in whole)
    return Answer((), decided, np.array([one[1] for one in whole], np.float64))


def fillings(masks: Iterable[Sequence[tuple[float, int, str, str]]]) -> Answer:
    """The best words of each mask: score, token, word, whole text of each, best first."""
    whole = list(masks)
    numbers = np.array([word[0] for best in whole for word in best], np.float64)
    return Answer((len(whole),), tuple(best[0][1:] for best in whole), numbers)


def span(answer: str, number: float, start: int, end: int) -> Answer:
    """The part of a context that answers a question."""
    return Answer((), ((answer, start, end),), np.array([number], np.float64))


class Library(ABC):
    """A library that has loaded a checkpoint's folder.

    Attributes:
        name: With its version.
        tokenizer: The tokenizer that it loaded.
        missing: Whether it found no weights for a part of the model, which it then fills with random numbers.
    """

    name: str
    tokenizer: Any
    missing: bool

    @property
    def longest(self) -> int:
        """Tokens of its longest input."""
        return int(self.tokenizer.model_max_length)

    @longest.setter
    def longest(self, length: int) -> None:
        self.tokenizer.model_max_length = length

    @abstractmethod
    def forms(self) -> list[Form]:
        """The ways of asking that are compared, the usual one first."""

    @abstractmethod
    def asked(self, text: Text) -> Text | None:
        """A text as an input of the task; None where it can be none."""

    @abstractmethod
    def encode(self, text: Text) -> list[Tokens]:
        """Ids and segments of an input's tokens, or of those of its windows."""

    @abstractmethod
    def answer(self, texts: Sequence[Text], form: Form) -> list[Answer]:
        """What its users get."""


def _tokens(features: Mapping[str, Any], row: int = 0) -> Tokens:
    """The tokens of one row of a batch, without padding."""
    ids = [int(token) for token in features["input_ids"][row]]
    columns = {name: [int(value) for value in features[name][row]] for name in features if name in _BESIDE}
    kept = [at for at, is_text in enumerate(columns.get("attention_mask", [1] * len(ids))) if is_text]
    types = columns.get("token_type_ids", [0] * len(ids))
    return [ids[at] for at in kept], [types[at] for at in kept]


_BESIDE = ("attention_mask", "token_type_ids")


class _SentenceTransformers(Library):
    """Sentence Transformers: a model whose own method reads texts."""

    def __init__(self, checkpoint: Checkpoint, folder: Path) -> None:
        import sentence_transformers  # noqa: PLC0415  slow to import

        self.name = f"Sentence Transformers {sentence_transformers.__version__}"
        self._checkpoint = checkpoint
        with _reports() as reports:
            self._model = getattr(sentence_transformers, self._kind)(
                str(folder), device="cpu", local_files_only=True, trust_remote_code=False
            ).float()
        self.missing = any("MISSING" in report for report in reports)
        self.tokenizer = self._model.tokenizer

    _kind: str

    def encode(self, text: Text) -> list[Tokens]:
        return [_tokens(self._model.preprocess([text]))]


class _Encoder(_SentenceTransformers):
    _kind = "SentenceTransformer"

    def forms(self) -> list[Form]:
        checkpoint = self._checkpoint
        others = [name for name in checkpoint.sentence.prompts if name != checkpoint.default_prompt][:_MOST_PROMPTS]
        usual = EmbedTokensOptions() if checkpoint.task == "embed_tokens" else EmbedOptions()
        forms = [Form(usual), *(Form(usual, f"with the prompt {name!r}", name, _FEW) for name in others)]
        if checkpoint.task == "embed":
            size = checkpoint.matryoshka[0] if checkpoint.matryoshka else max(1, checkpoint.dimensions // 2)
            title = f"in {size} components and of length 1"
            forms.append(Form(EmbedOptions(normalize=True, dimensions=size), title, most=_FEW))
        return forms

    def asked(self, text: Text) -> Text | None:
        return text if isinstance(text, str) else None

    def encode(self, text: Text) -> list[Tokens]:
        model = self._model
        prompt = model.prompts[model.default_prompt_name] if model.default_prompt_name is not None else ""
        return super().encode(f"{prompt}{text}")

    def answer(self, texts: Sequence[Text], form: Form) -> list[Answer]:
        options = form.options
        asked: dict[str, Any] = {"prompt_name": form.prompt, "batch_size": _BATCH, "show_progress_bar": False}
        if isinstance(options, EmbedOptions):
            asked |= {"truncate_dim": options.dimensions} if options.dimensions else {}
            asked |= {"normalize_embeddings": bool(options.normalize)}
        else:
            asked |= {"output_value": "token_embeddings"}
        return [vector(row) for row in self._model.encode(list(texts), **asked)]


class _CrossEncoder(_SentenceTransformers):
    _kind = "CrossEncoder"

    def forms(self) -> list[Form]:
        return [Form(RerankOptions()), Form(RerankOptions(raw_scores=True), "as raw scores", most=_FEW)]

    def asked(self, text: Text) -> Text | None:
        return text if isinstance(text, tuple) else None

    def answer(self, texts: Sequence[Text], form: Form) -> list[Answer]:
        asked: dict[str, Any] = {"batch_size": _BATCH, "show_progress_bar": False}
        if isinstance(form.options, RerankOptions) and form.options.raw_scores:
            asked["activation_fn"] = torch.nn.Identity()
        return [score(float(number)) for number in self._model.predict(list(texts), **asked)]


class _Transformers(Library):
    """Transformers: a model, and a pipeline that reads texts for it."""

    def __init__(self, checkpoint: Checkpoint, folder: Path) -> None:
        self.name = f"Transformers {transformers.__version__}"
        self._checkpoint = checkpoint
        own: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        kind = getattr(transformers, self._kind)
        model, info = kind.from_pretrained(str(folder), dtype=torch.float32, output_loading_info=True, **own)
        self.model = model.eval()
        self.missing = bool(info["missing_keys"])
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), **own)
        self._raw: dict[str, Any] = {}  # of a text that is asked in several ways
        self._pipe: Any = None
        if self._pipeline:
            self._pipe = transformers.pipeline(self._pipeline, model=model, tokenizer=self.tokenizer, device="cpu")

    _kind: str
    _pipeline = ""

    def asked(self, text: Text) -> Text | None:
        return text if isinstance(text, str) else None


class _Classifier(_Transformers):
    _kind, _pipeline = "AutoModelForSequenceClassification", "text-classification"

    def forms(self) -> list[Form]:
        return [Form(ClassifyOptions()), Form(ClassifyOptions(function="none"), "as raw scores", most=_FEW)]

    def asked(self, text: Text) -> Text | None:
        """Transformers takes a pair whose second text is empty for a single text."""
        return text if isinstance(text, str) or text[1] else None

    def encode(self, text: Text) -> list[Tokens]:
        return [_tokens(self._pipe.preprocess(_keyed(text), truncation=True))]

    def answer(self, texts: Sequence[Text], form: Form) -> list[Answer]:
        named = self._checkpoint.labels
        asked = form.options.function if isinstance(form.options, ClassifyOptions) else None
        # A value is what the person asks for by `--task regression`, whatever the folder says.
        function = asked or ("none" if named.regression else None)
        replies = self._pipe(list(map(_keyed, texts)), top_k=None, truncation=True, function_to_apply=function)
        chosen = not (named.regression or named.multi_label)
        return [labels(((one["label"], one["score"]) for one in reply), chosen=chosen) for reply in replies]


def _keyed(text: Text) -> dict[str, str]:
    return {"text": text} if isinstance(text, str) else {"text": text[0], "text_pair": text[1]}


class _Tagger(_Transformers):
    _kind, _pipeline = "AutoModelForTokenClassification", "token-classification"

    def forms(self) -> list[Form]:
        grouped = [
            Form(TagOptions(name, ignore_labels=()), f"aggregated by {name!r}", exact=True)
            for name in ("simple", "first", "average", "max")
        ]
        return [Form(TagOptions("none", ignore_labels=())), *grouped, Form(TagOptions(), most=_FEW, exact=True)]

    def encode(self, text: Text) -> list[Tokens]:
        return [_tokens(one) for one in self._pipe.preprocess(text, is_split_into_words=False)]

    def answer(self, texts: Sequence[Text], form: Form) -> list[Answer]:
        options = form.options
        return [self._answer(str(text), options) for text in texts if isinstance(options, TagOptions)]

    def _answer(self, text: str, options: TagOptions) -> Answer:
        pipe = self._pipe
        raw = self._raw.get(text)
        if raw is None:
            raw = [pipe.forward(one) for one in pipe.preprocess(text, is_split_into_words=False)]
            self._raw[text] = raw
        strategy = AggregationStrategy(options.aggregation)
        found = pipe.postprocess(raw, aggregation_strategy=strategy, ignore_labels=list(options.ignore_labels))
        if options.aggregation == "none":
            return tagged(
                (one["entity"], one["score"], one["index"], one["word"], one["start"], one["end"]) for one in found
            )
        return entities((one["entity_group"], one["score"], one["start"], one["end"]) for one in found)


class _Filler(_Transformers):
    _kind, _pipeline = "AutoModelForMaskedLM", "fill-mask"

    def forms(self) -> list[Form]:
        return [Form(FillMaskOptions(top_k=min(FillMaskOptions().top_k, self._checkpoint.candidates)))]

    def asked(self, text: Text) -> Text | None:
        """With a mask behind it, and one before a longer text, so that one is left whichever end is cut.

        A request may write any model's mask as BERT's, and Transformers does not know that.
        """
        mask = str(self.tokenizer.mask_token)
        if not isinstance(text, str) or ("[MASK]" in text and mask != "[MASK]"):
            return None
        before = "" if len(text.encode()) <= _LONGEST_WITH_ONE_MASK else f"{mask} "
        return f"{before}{text} {mask}"

    def encode(self, text: Text) -> list[Tokens]:
        return [_tokens(self._pipe.preprocess(text, tokenizer_kwargs={"truncation": True}))]

    def answer(self, texts: Sequence[Text], form: Form) -> list[Answer]:
        top_k = form.options.top_k if isinstance(form.options, FillMaskOptions) else None
        return [self._answer(text, top_k) for text in texts]

    def _answer(self, text: Text, top_k: int | None) -> Answer:
        found = self._pipe(text, top_k=top_k, tokenizer_kwargs={"truncation": True})
        masks = found if isinstance(found[0], list) else [found]
        return fillings(
            [(one["score"], one["token"], one["token_str"], one["sequence"]) for one in best] for best in masks
        )


class _Reader(_Transformers):
    """With the pipeline that Transformers 4 had, from its definition: Transformers 5 has none."""

    _kind = "AutoModelForQuestionAnswering"

    def forms(self) -> list[Form]:
        return [
            Form(AnswerOptions()),
            Form(AnswerOptions(no_answer=True), "where there may be no answer"),
            Form(AnswerOptions(whole_words=False), "in tokens", exact=True),
        ]

    @property
    def _length(self) -> int:
        return min(self.longest, AnswerOptions().window_tokens)

    def asked(self, text: Text) -> Text | None:
        """A question and its context, where the pipeline takes them, in the windows in which a server reads them.

        The pipeline refuses an empty context, and a question that leaves no room, which a server cuts. Where little
        is left to a context, a server's windows overlap less.
        """
        if not isinstance(text, tuple) or not text[1]:
            return None
        used = len(self.tokenizer(text[0], add_special_tokens=False)["input_ids"])
        used += self.tokenizer.num_special_tokens_to_add(pair=True)
        room = self._length - used
        return text if used <= self._length // 2 and room - self._stride >= self._length // 6 else None

    @property
    def _stride(self) -> int:
        return min(self._length // 2, 128)

    def _windows(self, text: Text) -> Any:  # noqa: ANN401  what a tokenizer of Transformers gives
        return self.tokenizer(
            *text,
            truncation="only_second",
            max_length=self._length,
            stride=self._stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )

    def encode(self, text: Text) -> list[Tokens]:
        windows = self._windows(text)
        return [_tokens(windows, row) for row in range(len(windows["input_ids"]))]

    def answer(self, texts: Sequence[Text], form: Form) -> list[Answer]:
        options = form.options
        return [self._answer(text, options) for text in texts if isinstance(options, AnswerOptions)]

    def _answer(self, text: Text, options: AnswerOptions) -> Answer:
        windows, context = self._windows(text), text[1]
        found: dict[str, list[Any]] = {}
        null = 1.0
        for row, ids in enumerate(windows["input_ids"]):
            output = self._output(windows, row)
            allowed = np.array([part == 1 for part in windows.sequence_ids(row)])
            allowed |= np.array(ids) == self.tokenizer.cls_token_id
            starts, ends = (
                _softmax(np.where(allowed, logits[0].numpy(), np.float32(-10000.0)))
                for logits in (output.start_logits, output.end_logits)
            )
            null = min(null, float(starts[0] * ends[0]))
            starts[0] = ends[0] = 0
            for start, end, number in _spans(starts, ends, allowed, options):
                first, last = self._places(windows, row, start, end, options)
                known = found.setdefault(context[first:last].lower(), [0.0, first, last])
                known[0] += number
        answers = [(context[first:last], number, first, last) for number, first, last in found.values()]
        if options.no_answer:
            answers.append(("", null, 0, 0))
        return span(*max(answers, key=lambda answer: answer[1]))

    def _output(self, windows: Any, row: int) -> Any:  # noqa: ANN401  of Transformers both
        key = str(windows["input_ids"][row])
        if key not in self._raw:
            named = {name: torch.tensor([windows[name][row]]) for name in ("input_ids", *_BESIDE) if name in windows}
            with torch.inference_mode():
                self._raw[key] = self.model(**named)
        return self._raw[key]

    @staticmethod
    def _places(windows: Any, row: int, start: int, end: int, options: AnswerOptions) -> tuple[int, int]:  # noqa: ANN401
        offsets = windows["offset_mapping"][row]
        words = windows.word_ids(row)
        if not options.whole_words or words[start] is None or words[end] is None:
            return offsets[start][0], offsets[end][1]
        first = windows.word_to_chars(row, words[start], sequence_index=1)
        return first.start, windows.word_to_chars(row, words[end], sequence_index=1).end


def _softmax(logits: Numbers) -> Numbers:
    scaled = np.exp(logits - logits.max())
    probabilities: Numbers = scaled / scaled.sum()
    return probabilities


def _spans(
    starts: Numbers, ends: Numbers, allowed: NDArray[np.bool_], options: AnswerOptions
) -> Iterator[tuple[int, int, float]]:
    """The likeliest spans of a window, in tokens, that begin and end where they may."""
    scores = np.tril(np.triu(np.outer(starts, ends)), options.max_answer_tokens - 1)
    wanted = 2 * options.top_k + 10 if options.whole_words else options.top_k
    for index in np.argsort(-scores, axis=None, kind="stable")[:wanted].tolist():
        start, end = divmod(index, scores.shape[1])
        if allowed[start] and allowed[end]:
            yield start, end, float(scores[start, end])


_LIBRARIES: Mapping[Task, type[_SentenceTransformers | _Transformers]] = {
    "embed": _Encoder,
    "embed_tokens": _Encoder,
    "rerank": _CrossEncoder,
    "classify": _Classifier,
    "tag": _Tagger,
    "fill_mask": _Filler,
    "answer": _Reader,
}


def load(checkpoint: Checkpoint, *, cut: bool) -> Library:
    """Loads a checkpoint's folder as its users do, by what the folder says alone; nothing is asked of the hub.

    Args:
        checkpoint: The checkpoint.
        cut: Whether a person asked for its longest input, in place of what the folder says.

    Raises:
        NotLoadedError: The library cannot load it without code of its own, or has no such model.
        ExportError: A pickle in it is not what weights are.
    """
    if checkpoint.sentence.encoder.imported is not None:
        raise NotLoadedError("no library loads a folder of this layout")
    positions = checkpoint.config.get("position_embedding_type", "absolute")
    if positions != "absolute":
        raise NotLoadedError(
            f"Transformers {transformers.__version__} has no model with position_embedding_type {positions!r}"
        )
    kind = _LIBRARIES[checkpoint.task]
    with quiet(), _no_bars(), _without_pickles(checkpoint) as folder:
        try:
            library = kind(checkpoint, folder)
        except Exception as error:
            reason = " ".join(str(error).split())[:_LONGEST_REASON]
            raise NotLoadedError(
                f"{'Sentence Transformers' if issubclass(kind, _SentenceTransformers) else 'Transformers'} "
                f"cannot load the folder by itself: {reason}"
            ) from error
    # What no model could read; Sentence Transformers does not count the positions that RoBERTa leaves out.
    if cut or library.longest > checkpoint.positions:
        library.longest = checkpoint.max_length
    return library


@contextmanager
def _no_bars() -> Iterator[None]:
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()


@contextmanager
def _reports() -> Iterator[list[str]]:
    """What Transformers logs in the block: where another library calls it, its log alone says what is missing."""
    reports: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            reports.append(record.getMessage())

    logger = logging.getLogger("transformers")
    handlers, propagate, disabled = logger.handlers, logger.propagate, logging.root.manager.disable
    logger.handlers, logger.propagate = [Collector()], False
    logging.disable(logging.NOTSET)
    try:
        yield reports
    finally:
        logging.disable(disabled)
        logger.handlers, logger.propagate = handlers, propagate


@contextmanager
def _without_pickles(checkpoint: Checkpoint) -> Iterator[Path]:
    """The folder for a library to load: the checkpoint's or, where weights are pickled, one with safetensors instead.

    Pickles are read in a process of its own alone, see `export.checkpoint.unpickle`.
    """
    source = checkpoint.source.path
    files = [path for pattern in ("*", "*/*") for path in source.glob(pattern) if path.is_file()]
    if not any(path.suffix == ".bin" for path in files):
        yield source
        return
    with TemporaryDirectory(prefix="bertserve-library-") as made:
        for path in files:
            target = Path(made) / path.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            if ".bin" not in path.suffixes:
                target.symlink_to(path.resolve())
            elif path.name.startswith("pytorch_model") and not path.with_name(_safe_name(path.name)).exists():
                _without_pickle(path, target.with_name(_safe_name(path.name)))
        yield Path(made)


def _without_pickle(path: Path, target: Path) -> None:
    if path.suffix == ".bin":
        unpickle(path, target)
        return
    index = json.loads(path.read_bytes())
    index["weight_map"] = {name: _safe_name(file) for name, file in index["weight_map"].items()}
    target.write_text(json.dumps(index))


def _safe_name(name: str) -> str:
    return name.replace("pytorch_model", "model").replace(".bin", ".safetensors")
