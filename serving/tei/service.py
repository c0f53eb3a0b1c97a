"""The parts of the TEI API that are not inference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from serving.engine.specs import EngineChoice  # noqa: TC001  msgspec reads the annotations
from serving.errors import EmptyInput, InvalidRequest, too_many_inputs
from serving.inference.pipeline import check_not_empty
from serving.oip.service import SERVER_VERSION
from serving.tasks.combined import offered

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.inference.pipeline import Pipeline
    from serving.inference.requests import InputType
    from serving.inference.served_models import Repository, ServedModel
    from serving.records import TextInput
    from serving.settings import Settings

_MODEL_TYPES: Sequence[str] = ("embed", "embed_tokens", "embed_sparse", "rerank", "classify")
BYTES_PER_ID = 4
_PAIR = 2


class Info(msgspec.Struct):
    """A model and the limits of its server.

    Attributes:
        model_id: Name of the checkpoint.
        model_sha: Digest of the checkpoint.
        model_dtype: Precision of the artifact.
        served_model_name: Name of the model in requests.
        model_type: `embedding` with its pooling (`splade` for sparse vectors), `classifier` or `reranker` with their
            labels. A `classifier` whose `problem_type` is `regression` returns raw values.
        max_concurrent_requests: Maximum concurrent requests of full length.
        max_input_length: Maximum tokens of an input.
        max_batch_tokens: Maximum tokens of a batch.
        max_batch_requests: Always null: only tokens limit a batch.
        max_client_batch_size: Maximum inputs of one request.
        auto_truncate: Whether inputs that are too long are truncated by default.
        tokenization_workers: Texts that are tokenized concurrently.
        version: Version of the server.
        sha: Always null.
        docker_label: Always null.
        engine: The engine that runs the models, and why faster ones were rejected.
        prompts: Prompts that a request may prepend to its texts, by name.
        default_prompt_name: The prompt that is prepended if a request names none.
        outputs: Values of `outputs` that `/embed` accepts; empty for models of other tasks.
    """

    model_id: str
    model_sha: str | None
    model_dtype: str
    served_model_name: str
    model_type: dict[str, dict[str, Any]]
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int | None
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str
    sha: str | None = None
    docker_label: str | None = None
    engine: EngineChoice | None = None
    prompts: dict[str, str] = {}
    default_prompt_name: str | None = None
    outputs: tuple[str, ...] = ()


class TeiService:
    """The parts of the TEI API that do not run in the pipeline."""

    def __init__(self, pipeline: Pipeline, repository: Repository, settings: Settings) -> None:
        self.pipeline = pipeline
        self._repository = repository
        self.settings = settings

    def model(self, name: str | None) -> ServedModel:
        """The model with a name; without a name, the only model or the first task's only or default model.

        The tasks are tried in the order of `_MODEL_TYPES`.

        Raises:
            ModelNotFound: No model of that name is served.
            ModelNotNamed: No name is given, and there are several models to choose from.
        """
        repository = self._repository
        if name is not None or len(repository.models) == 1:
            return repository.find(name)
        for task in _MODEL_TYPES:
            if repository.of_task(task):
                return repository.find(None, task=task)
        return repository.find(None)

    def info(self, name: str | None) -> Info:
        model, settings = self.model(name), self.settings
        manifest = model.manifest
        labels = manifest.labels or ("score",)
        named: dict[str, Any] = {
            "id2label": {str(index): label for index, label in enumerate(labels)},
            "label2id": {label: index for index, label in enumerate(labels)},
        }
        if manifest.regression:
            named["problem_type"] = "regression"
        pooling = ("embedding", {"pooling": manifest.pooling})
        sparse = ("embedding", {"pooling": "splade"})
        kinds = {"rerank": ("reranker", named), "embed": pooling, "embed_tokens": pooling, "embed_sparse": sparse}
        kind, details = kinds.get(manifest.task, ("classifier", named))
        return Info(
            model_id=manifest.source.name,
            model_sha=manifest.source.sha256,
            model_dtype={"fp32": "float32", "fp16": "float16"}.get(model.artifact.precision, model.artifact.precision),
            served_model_name=model.name,
            model_type={kind: details},
            max_concurrent_requests=max(1, settings.max_queue_tokens // manifest.max_length),
            max_input_length=manifest.max_length,
            max_batch_tokens=settings.max_batch_tokens,
            max_batch_requests=None,
            max_client_batch_size=int(settings.max_client_batch_size),  # msgspec cannot encode a `Limit`
            auto_truncate=settings.auto_truncate,
            tokenization_workers=1,
            version=SERVER_VERSION,
            engine=self._repository.engine,
            prompts=manifest.prompts,
            default_prompt_name=manifest.default_prompt,
            outputs=offered(manifest) if manifest.task == "embed" else (),
        )

    async def tokenize(
        self,
        model: str | None,
        texts: Sequence[str],
        *,
        special: bool,
        prompt_name: str | None,
        input_type: InputType | None,
    ) -> bytes:
        """The tokens of texts, as JSON. `special` adds the special tokens around them."""
        found = self.model(model)
        self.check_count(len(texts), "inputs")
        check_not_empty(texts)
        inputs = found.prompted(texts, prompt_name, input_type)
        prompted = [text for text in inputs if isinstance(text, str)]
        size = sum(found.tokenizer.sizes_bytes(prompted))
        return await self.pipeline.read(
            found,
            size,
            lambda tokenizer: msgspec.json.encode([tokenizer.tokens(text, special=special) for text in prompted]),
        )

    async def decode(self, model: str | None, rows: Sequence[Sequence[int]], *, bare: bool) -> bytes:
        """The texts of token ids, as JSON. `bare` omits special tokens."""
        found = self.model(model)
        self.check_count(len(rows), "ids")
        check_not_empty(rows, "input_ids")
        for row in rows:
            found.tokenizer.check_readable(row)
        size = BYTES_PER_ID * sum(map(len, rows))
        return await self.pipeline.read(
            found, size, lambda tokenizer: msgspec.json.encode([tokenizer.decode(row, bare=bare) for row in rows])
        )

    def check_count(self, count: int, field: str) -> None:
        most = self.settings.max_client_batch_size
        if not count:
            raise EmptyInput(f"`{field}` is empty; send at least one")
        if count > most:
            raise too_many_inputs(count, most)


def text_or_pair(texts: Sequence[str]) -> TextInput:
    """One input of `/predict`: a text, or a pair of texts.

    Raises:
        InvalidRequest: There are neither one nor two texts.
    """
    if not 1 <= len(texts) <= _PAIR:
        raise InvalidRequest(f"an input has {len(texts)} texts; send one text or a pair")
    return texts[0] if len(texts) == 1 else (texts[0], texts[1])
