"""Request and reply types of text-embeddings-inference's routes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from bertserve.serving.engine.specs import EngineChoice  # noqa: TC001  msgspec reads the annotations
from bertserve.serving.errors import (
    BertserveError,
    BuffersFull,
    EmptyInput,
    InvalidRequest,
    Overloaded,
    Unavailable,
    WrongTask,
)
from bertserve.serving.http.apis.vectors import SparseFormat  # noqa: TC001  likewise
from bertserve.serving.http.faults import ErrorFormat, word_of
from bertserve.serving.inference.requests import InputType, Token
from bertserve.serving.tasks.windows import LongScored

Direction = Literal["Right", "right", "Left", "left"]
"""End at which long texts are cut."""


class EmbedRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Texts to embed. A list of numbers is one input of token ids, including special tokens.

    Attributes:
        inputs: One input or a list of inputs.
        truncate: Truncate long inputs; null: the server's default.
        truncation_direction: End at which inputs are cut; null: the model's own, which is the right end by default.
        prompt_name: Name of the model's prompt to prepend to each text; null: the default prompt, if there is one.
        input_type: Purpose of the texts, which selects a prompt instead of its name.
        normalize: Scale vectors to length 1; null: as the model's folder says.
        dimensions: Number of leading components to keep.
        chunk: Split each text into chunks and return a list of `EmbeddedChunk` for each text.
        chunk_tokens: Maximum tokens per chunk; null: the model's limit.
        chunk_overlap: Tokens that adjacent chunks share.
        late_chunking: Encode the whole text before mean pooling each chunk's token vectors. Requires a model for the
            task `embed_tokens`.
        outputs: Return several embeddings of each text as an `EmbeddedText`: any of `dense`, `sparse` and `tokens` that
            the model has; null: the dense vector alone.
    """

    inputs: str | list[str | list[int] | int]
    truncate: bool | None = None
    truncation_direction: Direction | None = None
    prompt_name: str | None = None
    input_type: InputType | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    chunk: bool = False
    chunk_tokens: int | None = None
    chunk_overlap: int = 0
    late_chunking: bool = False
    outputs: list[str] | None = None


class EmbeddedChunk(msgspec.Struct):
    """A chunk's vector, and its characters in the text: from `start` to before `end`, in Unicode code points."""

    start: int
    end: int
    embedding: list[float]


class EmbedAllRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Texts whose tokens to embed."""

    inputs: str | list[str | list[int] | int]
    truncate: bool | None = None
    truncation_direction: Direction | None = None
    prompt_name: str | None = None
    input_type: InputType | None = None


class EmbedSparseRequest(EmbedAllRequest, forbid_unknown_fields=True):
    """Texts whose sparse vectors to compute.

    Attributes:
        input_type: Purpose of the texts, which selects a prompt, and the query or document side of the model.
        top_k: Maximum weights per text: the largest; null: all.
        threshold: Smallest weight to return; null: all.
        format: `list` returns a list of weights per text, `arrays` an object with the arrays `indices` and `values`,
            `tokens` an object from token to weight.
        tokens: Return the token of each weight too.
    """

    top_k: int | None = None
    threshold: float | None = None
    format: SparseFormat = "list"
    tokens: bool = False


class SparseWeight(msgspec.Struct, omit_defaults=True):
    """The weight of a token; `token` is its name, if the request asks for it."""

    index: int
    value: float
    token: str | None = None


class EmbeddedText(msgspec.Struct, omit_defaults=True):
    """The requested embeddings of a text: its vector, its sparse vector, and a vector for each token."""

    dense: list[float] | None = None
    sparse: list[SparseWeight] | None = None
    tokens: list[list[float]] | None = None


class PredictRequest(LongScored, frozen=True, forbid_unknown_fields=True):
    """Texts or pairs of texts to classify.

    Attributes:
        inputs: A text; a pair as a list of two texts; or a list whose elements are lists of one or two texts.
        truncate: Truncate long inputs; null: the server's default.
        truncation_direction: End at which inputs are cut; null: the model's own, which is the right end by default.
        raw_scores: Return the logits.
        long: `window` reads long texts in windows, by `window_tokens`, `window_overlap` and `window_scores`.
    """

    inputs: str | list[str | list[str]]
    truncate: bool | None = None
    truncation_direction: Direction | None = None
    raw_scores: bool = False


class RerankRequest(LongScored, frozen=True, forbid_unknown_fields=True):
    """Texts to rank by relevance to a query.

    Attributes:
        query: The query.
        texts: The texts.
        truncate: Truncate long inputs; null: the server's default.
        truncation_direction: End at which inputs are cut; null: the model's own, which is the right end by default.
        raw_scores: Return logits (true) or their sigmoids (false); null: as the model's folder says. A multi-vector
            model returns the sum of its products (true) or their mean over the query's vectors (false). A model with
            several outputs ignores it.
        return_text: Return each text with its score.
        top_n: Number of best texts to return (LiteLLM); null or 0: all.
        weights: Weights of the scores of a model with several outputs, by the names `dense`, `sparse` and `tokens`;
            null: the same weight for all.
        long: `window` reads long texts in windows, by `window_tokens`, `window_overlap` and `window_scores`.
    """

    query: str
    texts: list[str]
    truncate: bool | None = None
    truncation_direction: Direction | None = None
    raw_scores: bool | None = None
    return_text: bool = False
    top_n: Annotated[int, msgspec.Meta(ge=0)] | None = None
    weights: dict[str, float] | None = None


class Rank(msgspec.Struct, omit_defaults=True):
    """A text's score and its index in the request."""

    index: int
    score: float
    text: str | None = None


class Compared(msgspec.Struct, forbid_unknown_fields=True):
    """A sentence, and the sentences to compare it with."""

    source_sentence: str
    sentences: list[str]


class SimilarityParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Embedding options of a comparison; each as in `/embed`."""

    truncate: bool | None = None
    truncation_direction: Direction | None = None
    prompt_name: str | None = None
    input_type: InputType | None = None


class SimilarityRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Sentences to compare with one."""

    inputs: Compared
    parameters: SimilarityParameters | None = None


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Texts to tokenize; `add_special_tokens` adds the model's special tokens."""

    inputs: str | list[str]
    add_special_tokens: bool = True
    prompt_name: str | None = None
    input_type: InputType | None = None


class DecodeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Token ids to decode to text: the ids of one text, or a list of ids for each text."""

    ids: list[int | list[int]]
    skip_special_tokens: bool = True


TokenizeReply = list[list[Token]]
"""The tokens of each text."""


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


class TeiError(msgspec.Struct):
    """An error of text-embeddings-inference."""

    error: str
    error_type: str


_ERROR_TYPES: dict[type[BertserveError], str] = {
    EmptyInput: "Empty",
    WrongTask: "Backend",
    InvalidRequest: "Validation",
    Overloaded: "Overloaded",
    BuffersFull: "Overloaded",
    Unavailable: "Unhealthy",
    BertserveError: "Backend",
}

TEI_ERRORS = ErrorFormat(
    TeiError,
    lambda error, message, _: TeiError(message, word_of(_ERROR_TYPES, error)),
    wrong_task_status=424,
    empty="a list of inputs or an input",
)
