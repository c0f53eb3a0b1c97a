"""The two v2 names of a model, each with its inputs and outputs.

`{model}` takes texts and returns the outputs of its task (`Task.outputs`), one row per text. `{model}.tokens` takes
token ids and returns the graph's own outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from bertserve.serving.errors import InvalidRequest
from bertserve.serving.oip.tensors import BYTES, FP32, INT32, INT64, PAIR, TEXT, Output
from bertserve.serving.records import IDS, POSITIONS
from bertserve.serving.tasks import TASKS, combined
from bertserve.serving.tasks.base import TaskOptions, pad_column
from bertserve.serving.tasks.combined import CombinedOptions
from bertserve.serving.tasks.tensors import TensorOptions

if TYPE_CHECKING:
    from bertserve.serving.engine.specs import EngineChoice
    from bertserve.serving.inference.served_models import Repository, ServedModel
    from bertserve.serving.models.manifest import Manifest
    from bertserve.serving.records import Row

_PLATFORMS = {False: ("onnxruntime_onnx", "onnxruntime"), True: ("tensorrt_plan", "tensorrt")}
"""Triton's names for the platform and the backend, by whether the artifact is an engine."""
TOKENS = ".tokens"

_DATATYPES = {"int32": INT32, "float32": FP32}
_CONFIG_TYPES = {BYTES: "TYPE_STRING"}

Values = Sequence[Any]
"""The values of each output, in the order of the outputs."""


class TensorMetadata(msgspec.Struct, frozen=True):
    """A tensor; -1 is a variable dimension."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(msgspec.Struct):
    """The inputs and outputs of a model."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class Reshape(msgspec.Struct):
    """The actual shape of a tensor, without the batch dimension."""

    shape: list[int]


class TensorConfig(msgspec.Struct, omit_defaults=True):
    """A tensor, without the batch dimension."""

    name: str
    data_type: str
    dims: list[int]
    reshape: Reshape | None = None


class DynamicBatching(msgspec.Struct):
    """Dynamic batching: requests are batched with each other."""

    max_queue_delay_microseconds: int = 0


class TransactionPolicy(msgspec.Struct):
    """Each request has exactly one reply."""

    decoupled: bool = False


class ConfigParameter(msgspec.Struct):
    """A parameter of a model's configuration."""

    string_value: str


class ModelConfig(msgspec.Struct):
    """A model's configuration in Triton's form."""

    name: str
    platform: str
    backend: str
    max_batch_size: int
    input: list[TensorConfig]
    output: list[TensorConfig]
    dynamic_batching: DynamicBatching
    model_transaction_policy: TransactionPolicy
    parameters: dict[str, ConfigParameter]


class View(msgspec.Struct, frozen=True):
    """One v2 name of a model.

    Attributes:
        options: The task options of requests to this name.
        inputs: The advertised inputs. More may be accepted.
        write: Makes the values of the outputs from an answer; None for outputs that were not computed.
        choose: Makes the task options of requests for some of the outputs; None if all are computed in any case.
    """

    name: str
    model: ServedModel
    options: TaskOptions[Any]
    takes_text: bool
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]
    write: Callable[[Any, Manifest, int], Values]
    choose: Callable[[Sequence[str]], TaskOptions[Any]] | None = None

    def choose_options(self, names: Sequence[str]) -> TaskOptions[Any]:
        """The task options of a request for some of the outputs.

        Raises:
            InvalidRequest: The model does not have an output, or it is named twice.
        """
        own = {info.name for info in self.outputs}
        if not own.issuperset(names) or len(set(names)) != len(names):
            raise InvalidRequest(f"unexpected output; the model has {', '.join(sorted(map(repr, own)))}, each once")
        return self.options if self.choose is None else self.choose(names)

    def answer(self, answer: Any, names: Sequence[str], width: int = 0) -> list[Output]:  # noqa: ANN401  of any task
        """The outputs of an answer.

        Args:
            answer: The answer to this view's options.
            names: Outputs to return, in this order; empty means all.
            width: Tokens in a row of the request, if it contains tokens.

        Raises:
            InvalidRequest: A text does not have exactly one mask, or a padded output would be too large.
        """
        outputs = [
            _output(info, values)
            for info, values in zip(self.outputs, self.write(answer, self.model.manifest, width), strict=True)
            if values is not None
        ]
        if not names:
            return outputs
        named = {output.name: output for output in outputs}
        return [named[name] for name in names]

    def count_numbers(self, texts: int, tokens: int, width: int) -> int:
        """The numbers of an answer, roughly; padding is not counted."""
        numbers = 0
        for info in self.outputs:
            row = info.shape[1:]
            numbers += math.prod(map(abs, row)) * (max(tokens, texts * width) if -1 in row else texts)
        return numbers

    def metadata(self) -> ModelMetadata:
        platform, _ = _PLATFORMS[self.model.artifact.engine is not None]
        return ModelMetadata(self.name, [self.model.version], platform, list(self.inputs), list(self.outputs))

    def config(self, max_batch_size: int, engine: EngineChoice) -> ModelConfig:
        """The configuration in Triton's form. Its parameters describe the engine."""
        platform, backend = _PLATFORMS[self.model.artifact.engine is not None]
        return ModelConfig(
            name=self.name,
            platform=platform,
            backend=backend,
            max_batch_size=int(max_batch_size),  # msgspec cannot encode a `Limit`
            input=[_config(info) for info in self.inputs],
            output=[_config(info) for info in self.outputs],
            dynamic_batching=DynamicBatching(),
            model_transaction_policy=TransactionPolicy(),
            parameters={name: ConfigParameter(value) for name, value in self._parameters(engine).items()},
        )

    def _parameters(self, engine: EngineChoice) -> dict[str, str]:
        manifest = self.model.manifest
        labels, embedding, vectors = manifest.labels, manifest.embedding, manifest.embedding or manifest.sparse
        said = {
            "problem_type": "regression" if labels and labels.problem == "regression" else None,
            "similarity": vectors.similarity if vectors else None,
            "matryoshka_dimensions": ", ".join(map(str, embedding.matryoshka if embedding else ())) or None,
            "prompts": _json(manifest.prompts) if manifest.prompts else None,
            "default_prompt_name": manifest.default_prompt,
        }
        return {**_parameters(engine), **{name: value for name, value in said.items() if value is not None}}


def views(repository: Repository) -> dict[str, View]:
    """All names of all models. If two are equal, the name that a bundle gave itself wins."""
    tokens = [_tokens_view(model) for model in repository.models]
    return {view.name: view for view in (*tokens, *map(_text_view, repository.models))}


def _parameters(engine: EngineChoice) -> dict[str, str]:
    """Describes the engine of a model: its name, its GPUs, missing GPUs, and why faster engines were rejected."""
    gpus = {"gpu": ", ".join(gpu.name for gpu in engine.gpus)} if engine.gpus else {}
    rejected = {f"not_{rejected.engine}": rejected.reason for rejected in engine.rejected}
    missing = {"gpus_missing": "; ".join(words)} if (words := (*engine.left_out, *engine.lost)) else {}
    return {"engine": engine.engine, "degraded": str(engine.degraded).lower(), **gpus, **rejected, **missing}


def _config(info: TensorMetadata) -> TensorConfig:
    kind = _CONFIG_TYPES.get(info.datatype, f"TYPE_{info.datatype}")
    # Triton requires at least one dimension besides the batch, and `reshape` removes it again.
    return TensorConfig(info.name, kind, info.shape[1:] or [1], None if info.shape[1:] else Reshape([]))


def _text_view(model: ServedModel) -> View:
    manifest = model.manifest
    task = model.task
    inputs = tuple(TensorMetadata(name, BYTES, [-1, 1]) for name in ((TEXT, PAIR) if task.paired else (TEXT,)))
    tasks = (task, *(TASKS[name] for name in manifest.also))
    outputs = tuple(
        TensorMetadata(name, kind, [-1, *dims(manifest)]) for each in tasks for name, kind, dims in each.outputs
    )
    write = task.write
    if manifest.also:
        options = CombinedOptions(combined.offered(manifest))
        return View(model.name, model, options, True, inputs, outputs, _write_several, _options_for)
    return View(
        model.name,
        model,
        task.options(manifest),
        True,
        inputs,
        outputs,
        lambda answer, facts, _: write(answer, facts),
    )


_PARTS = {output.name: part for part, task in combined.TASKS.items() for output in task.outputs}
"""The part of a combined answer that an output belongs to."""


def _options_for(names: Sequence[str]) -> CombinedOptions:
    return CombinedOptions(tuple(dict.fromkeys(_PARTS[name] for name in names)))


def _write_several(answer: Sequence[combined.Embedded], manifest: Manifest, _: int) -> Values:
    values: list[Any] = []
    for part in combined.offered(manifest):
        task, found = combined.TASKS[part], combined.column(answer, part)
        values += [None] * len(task.outputs) if found is None else task.write(found, manifest)
    return values


def _output(info: TensorMetadata, values: Any) -> Output:  # noqa: ANN401  numbers or texts
    if not isinstance(values, np.ndarray):
        return Output(info.name, info.datatype, [len(values)], values)
    return Output(info.name, info.datatype, values.shape, values.ravel().tolist() if values.dtype == object else values)


def _tokens_view(model: ServedModel) -> View:
    inputs = (TensorMetadata(IDS, INT64, [-1, -1]),)
    outputs = tuple(
        TensorMetadata(spec.name, _DATATYPES[spec.dtype], list(spec.shape)) for spec in model.manifest.outputs
    )
    return View(model.name + TOKENS, model, TensorOptions(), False, inputs, outputs, _rows)


def _json(message: Any) -> str:  # noqa: ANN401  anything that msgspec encodes
    return msgspec.json.encode(message).decode()


def _rows(answer: Sequence[Row], manifest: Manifest, width: int) -> Values:
    """Stacks the rows of each output. Outputs per token or per mask are padded with zeros."""
    ragged = [spec.shape[1:2] == (-1,) for spec in manifest.outputs]
    if any(spec.name == POSITIONS for spec in manifest.inputs):
        width = 0
    return [
        pad_column(column, width) if uneven else np.stack(column)
        for uneven, column in zip(ragged, zip(*answer, strict=True), strict=True)
    ]
