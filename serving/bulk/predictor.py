"""Runs texts through an engine in this process: the core of `bertserve batch` and of Ray pipelines.

The engine and its bundle are the server's: the same choice of engine and artifact, the same proof, tokenizer and tasks.
There is no queue and no deadline. Texts are sorted by length and batched by padded tokens, so batches depend on the
texts alone, and the same texts give the same bits.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa
import pydantic

from bertserve.serving.bulk.answers import AnswerColumn
from bertserve.serving.bulk.errors import BatchError
from bertserve.serving.bulk.sources import text_of
from bertserve.serving.engine.base import Batch, EngineLoad, LaneKind
from bertserve.serving.engine.batches import OneByOne
from bertserve.serving.engine.process.worker import open_backend
from bertserve.serving.errors import (
    BertserveError,
    BundleError,
    EngineFault,
    InvalidRequest,
    StartupError,
    all_quoted,
    quote,
)
from bertserve.serving.fields.rule import Ignored, Level
from bertserve.serving.host import available_cpus
from bertserve.serving.records import ModelIndex
from bertserve.serving.rollout.engine_choice import Chooser
from bertserve.serving.rollout.engine_load import fitted
from bertserve.serving.settings import Settings
from bertserve.serving.tasks import TASKS
from bertserve.serving.tasks.base import Work

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bertserve.serving.engine.base import Runner
    from bertserve.serving.inference.served_models import ServedModel
    from bertserve.serving.records import EncodedText, Row
    from bertserve.serving.rollout.engine_choice import Choice
    from bertserve.serving.tasks.base import TaskOptions
    from bertserve.serving.tasks.prompts import Prepared

TOKENS_ON_A_CPU, TOKENS_ON_A_GPU = 256, 16_384
"""Padded tokens of a batch."""

_ENCODED_AT_ONCE = 64

_VALUE = re.compile(r"(?<=^Invalid enum value )'(.*)'", re.DOTALL)
"""Where a message of msgspec repeats a received value."""


class Prediction(msgspec.Struct, frozen=True):
    """The result for one row.

    Attributes:
        answer: As the task returns it; None if the row is rejected.
        reason: Why it is rejected; empty if it is answered.
        tokens: Tokens that the model read.
    """

    answer: Any = None
    reason: str = ""
    tokens: int = 0


class Model:
    """A task of one model in a repository: verified, and not loaded yet.

    Attributes:
        options: Options of the task.
        engineless: Whether they need no engine.
        column: The column of its answers.
        ignored: Names of ignored options, as in a server's replies; empty for none.
    """

    def __init__(
        self,
        models: str | Path = "models",
        task: str | None = None,
        *,
        model: str | None = None,
        options: dict[str, Any] | None = None,
        truncate: bool = False,
        prompt_name: str | None = None,
        **settings: Any,  # noqa: ANN401  see below
    ) -> None:
        """Verifies the repository and selects the artifact, as a server does.

        Args:
            models: Model repository: `<models>/<model>/<version>/`.
            task: `embed`, `embed_tokens`, `embed_sparse`, `classify`, `rerank`, `answer`, `tag` or `fill_mask`; None
                for the model's.
            model: Its name; None for the only one of the task.
            options: Of the task, as `{"top_k": 3}`; the classes of `serving.records` list them. Others follow the rules
                for fields (docs/reference/protocols.md).
            truncate: Truncate long texts; otherwise they are rejected.
            prompt_name: The model's prompt to prepend to each text.
            **settings: `engine`, `precision`, `threads`, `cache_dir`, `allow_unproven` and others, as
            in docs/reference/settings.md.

        Raises:
            BatchError: One of them is invalid, or the models must not be served.
        """
        if task is not None and task not in TASKS:
            raise BatchError(f"unknown task {quote(task)}; available: {', '.join(TASKS)}", exit_code=2)
        try:
            self.settings = Settings(models=Path(models), **settings)
            self.choice: Choice = Chooser(self.settings).first()
            self.served: ServedModel = self.choice.repository.find(model, task=task)
            self.task = task or self.served.manifest.task
            self._task = TASKS[self.task]
            self._way = self._task.way
            self.options, self.ignored = self._read(options or {})
            self._way.check(self.options, self.served.manifest)
            self._prompt_name = prompt_name
            _, prepared, self.engineless = self._prepared("text")
            # An explicit side goes before that of the prompt, as with `encode_query(..., prompt_name=...)`.
            if (options or {}).get("query") is None:
                self.options = prepared
            else:
                self.engineless = self._way.prepare((), self.options, self.served.manifest, None, None).engineless
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            raise BatchError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}", exit_code=2) from error
        except msgspec.ValidationError as error:
            why = _VALUE.sub(lambda found: quote(found[1]), str(error))
            raise BatchError(f"options of {task or 'the task'}: {why}", exit_code=2) from error
        except BertserveError as error:
            raise BatchError(error.message, exit_code=2) from error
        except StartupError as error:
            raise BatchError(str(error), exit_code=error.exit_code) from error
        self.column = AnswerColumn(self._task, self.options, self.served.manifest)
        self._truncate = truncate

    def _read(self, options: dict[str, Any]) -> tuple[TaskOptions[Any], str]:
        """The known options, and the names of ignored ones."""
        kind = self._way.options
        level = Level(kind.__struct_fields__)
        ignored = Ignored()
        level.apply_rule(options, ignored)
        read = {name: value for name, value in options.items() if name in level.names and value is not None}
        return msgspec.convert(read, kind), str(ignored)

    @property
    def reads(self) -> list[bool]:
        """For each output of the graph, whether the task reads it; the graph may answer other tasks too."""
        names = {output.name for output in (*self._task.graph, *self._task.token_head)}
        return [spec.name in names for spec in self.served.manifest.outputs]

    def check_columns(self, columns: int) -> None:
        """Raises BatchError if the task does not read this number of columns."""
        allowed = self._task.texts
        if columns not in allowed:
            what = " or ".join(f"{count} column{'s' if count > 1 else ''}" for count in allowed)
            raise BatchError(f"the task {self.task} reads {what} of text, not {columns}", exit_code=2)

    def encode(self, value: object) -> Sequence[EncodedText]:
        """A row's token ids, in several windows if the options ask for them.

        Raises:
            InvalidRequest: It is not a text or pair of texts, or too long.
        """
        inputs = self._prepared(value).inputs
        tokenizer = self.served.tokenizer
        self._way.sizes_bytes(tokenizer, inputs, self.options, truncate=self._truncate)
        return self._way.encode(tokenizer, inputs, self.options, truncate=self._truncate)

    def finish(self, value: object, texts: Sequence[EncodedText], rows: Sequence[Row]) -> Prediction:
        """The answer to a row from the engine's answers to its texts."""
        served = self.served
        work: Work[Any] = Work(
            self._prepared(value).inputs, self.options, texts, rows, served.manifest, served.tokenizer
        )
        try:
            return Prediction(self._way.finish(work)[0], tokens=sum(len(text.ids) for text in texts))
        except InvalidRequest as error:
            return _rejected(error)

    def _prepared(self, value: object) -> Prepared[Any]:
        texts = value if isinstance(value, tuple) else (value,)
        is_query = self._prompt_name is None and getattr(self.options, "query", False)
        side = "query" if is_query else None
        return self._way.prepare([text_of(texts)], self.options, self.served.manifest, self._prompt_name, side)


class Predictor:
    """A loaded model: a thread for each lane of its engine."""

    def __init__(self, model: Model) -> None:
        """Loads the model; raises BatchError if that fails."""
        self.model = model
        choice, threads = model.choice, model.settings.threads or available_cpus()
        (spec,), _ = fitted([model.served], threads, choice.gpus)
        load = EngineLoad(
            engine=choice.engine,
            models=[spec],
            threads=threads,
            options=model.settings.of_engine(choice.engine),
            gpus=[gpu.ordinal for gpu in choice.gpus][:1],
            max_batch_tokens=TOKENS_ON_A_GPU if choice.gpus else TOKENS_ON_A_CPU,
        )
        try:
            backend, _ = open_backend(load)
        except BundleError as error:
            raise BatchError(str(error)) from error
        self._tokens, self._largest = load.max_batch_tokens, backend.largest_batch
        lanes = list(backend.lanes())
        # Lanes of one kind give the same bits; the lane of a batch is arbitrary.
        kind = LaneKind.NARROW if spec.narrow and LaneKind.NARROW in lanes else LaneKind.WIDE
        self._idle: list[Runner] = [
            OneByOne(backend.runner(index), [spec]) for index, lane in enumerate(lanes) if lane is kind
        ]
        self._pool = ThreadPoolExecutor(len(self._idle))
        self._reads = model.reads

    def predict(self, values: Sequence[object]) -> list[Prediction]:
        """The result for each row: a text, or a pair of texts as a tuple; anything else is rejected.

        Raises:
            DeviceLost: The engine must end with its process.
        """
        texts: list[Sequence[EncodedText]] = []
        predictions: dict[int, Prediction] = {}
        for encoded in self._pool.map(self._encoded, _slices(values, _ENCODED_AT_ONCE)):
            for each in encoded:
                if isinstance(each, InvalidRequest):
                    predictions[len(texts)] = _rejected(each)
                texts.append(() if isinstance(each, InvalidRequest) else each)
        run = [] if self.model.engineless else texts
        keys = [(len(text.ids), row, part) for row, parts in enumerate(run) for part, text in enumerate(parts)]
        batches = list(self._batches(sorted(keys, reverse=True)))
        rows: dict[tuple[int, int], Row | str] = {}
        ran = self._pool.map(lambda batch: self._run([texts[row][part] for _, row, part in batch]), batches)
        for batch, answered in zip(batches, ran, strict=True):
            rows |= {(row, part): each for (_, row, part), each in zip(batch, answered, strict=True)}
        for row, parts in enumerate(texts):
            if row not in predictions:
                own = [rows[row, part] for part in range(len(parts))] if run else []
                predictions[row] = self._finished(values[row], parts, own)
        return [predictions[row] for row in range(len(values))]

    def _encoded(self, values: Sequence[object]) -> list[Sequence[EncodedText] | InvalidRequest]:
        return [_attempt(self.model, value) for value in values]

    def _batches(self, keys: Sequence[tuple[int, int, int]]) -> Iterator[Sequence[tuple[int, int, int]]]:
        """Batches of similar lengths, the longest first: as many texts as fit a batch padded to its longest."""
        at = 0
        while at < len(keys):
            size = min(self._largest, max(1, self._tokens // keys[at][0]))
            yield keys[at : at + size]
            at += size

    def _run(self, texts: Sequence[EncodedText]) -> list[Row | str]:
        """Each text's answer, or why it has none. A failed batch is run again text by text."""
        runner = self._idle.pop()  # there are as many threads as runners
        try:
            output = runner.run(Batch(ModelIndex(0), texts))
        except EngineFault as fault:
            if len(texts) == 1:
                return [f"the engine failed: {fault.message}"]
        else:
            # All rows of a chunk are held until its end.
            unread = np.empty((len(texts), 0), np.float32)
            arrays = (array if read else unread for array, read in zip(output.arrays, self._reads, strict=True))
            rows = zip(*arrays, strict=True)
            return [
                row if finite else "the model returned NaN or infinity"
                for row, finite in zip(rows, output.finite, strict=True)
            ]
        finally:
            self._idle.append(runner)
        return [row for text in texts for row in self._run([text])]

    def _finished(self, value: object, texts: Sequence[EncodedText], rows: Sequence[Row | str]) -> Prediction:
        computed: list[Row] = []
        for row in rows:
            if isinstance(row, str):
                return Prediction(reason=row)
            computed.append(row)
        return self.model.finish(value, texts, computed)


class BatchPredictor:
    """A model for `map_batches` of Ray Data, with `batch_format="pyarrow"`: adds a column of answers, and `error`.

    The column is called `embedding`, `embeddings`, `sparse`, `labels`, `score`, `answers`, `entities` or `masks`, by
    task. A rejected row has null there and the reason in `error`, which is null otherwise. Rows keep their order. Large
    batches are faster, because their rows are computed by length.
    """

    def __init__(self, column: str | Sequence[str], **model: Any) -> None:  # noqa: ANN401  those of `Model`
        """Loads the model.

        Args:
            column: The column of texts; two for pairs.
            **model: As `Model` takes them.

        Raises:
            BatchError: The model cannot be loaded or does not read this number of columns.
        """
        self._columns = [column] if isinstance(column, str) else list(column)
        self._predictor = Predictor(Model(**model))
        self._predictor.model.check_columns(len(self._columns))

    def __call__(self, table: pa.Table) -> pa.Table:
        if not isinstance(table, pa.Table):
            raise BatchError(f"a batch is a {type(table).__name__}; give map_batches batch_format='pyarrow'")
        if missing := [column for column in self._columns if column not in table.column_names]:
            raise BatchError(f"unknown column {quote(missing[0])}; available: {all_quoted(table.column_names)}")
        columns = [table[column].to_pylist() for column in self._columns]
        rows = columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))
        return self._answered(table, self._predictor.predict(rows))

    def _answered(self, table: pa.Table, predictions: Sequence[Prediction]) -> pa.Table:
        column = self._predictor.model.column
        errors = pa.array([each.reason or None for each in predictions], pa.string())
        answers = column.array([None if each.reason else each.answer for each in predictions])
        return table.append_column(column.name, answers).append_column("error", errors)


def _attempt(model: Model, value: object) -> Sequence[EncodedText] | InvalidRequest:
    try:
        return model.encode(value)
    except InvalidRequest as error:
        return error.without_traceback()


def _rejected(error: InvalidRequest) -> Prediction:
    return Prediction(reason=error.message.replace("input 0", "the text"))


def _slices(values: Sequence[object], size: int) -> Iterator[Sequence[object]]:
    return (values[start : start + size] for start in range(0, len(values), size))
