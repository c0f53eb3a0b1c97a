"""What a task is: one module that says everything about it, which all other rooms ask.

What it says of a model is in the words of `Facts`, and what it asks of a tokenizer in those of `Tokenizer`: tasks stand
above the rooms of bundles and of requests, so that both may ask them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np

from serving.errors import InvalidRequest
from serving.fields.owners import NO_OWNER, Owners
from serving.records import IDS, MASK, POSITIONS, TYPES, TensorSpec

if TYPE_CHECKING:
    from typing import Literal

    from numpy.typing import NDArray

    from serving.records import AlignedText, EncodedChunk, EncodedText, Row, TextInput, Truncate


O = TypeVar("O")  # noqa: E741  the options
O_contra = TypeVar("O_contra", contravariant=True)
A = TypeVar("A", bound=Sized)
"""What a task answers: one element for each input."""


class TaskOptions(msgspec.Struct, Generic[A], frozen=True):
    """What a request may change about its answer; the class of the options says which task is asked for."""


class Facts(Protocol):
    """What a task may know of a model; a manifest is that, and explains them."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def vector_size(self) -> int: ...
    @property
    def max_length(self) -> int: ...
    @property
    def special_ids(self) -> Mapping[str, int]: ...
    @property
    def inputs(self) -> Sequence[TensorSpec]: ...
    @property
    def outputs(self) -> Sequence[TensorSpec]: ...
    @property
    def pooling(self) -> str | None: ...
    @property
    def normalize(self) -> bool: ...
    @property
    def matryoshka(self) -> Sequence[int]: ...
    @property
    def labels(self) -> Sequence[str]: ...
    @property
    def multi_label(self) -> bool: ...
    @property
    def regression(self) -> bool: ...
    @property
    def activation(self) -> str: ...
    @property
    def candidates(self) -> int: ...


class Tokenizer(Protocol):
    """What a task may ask of a model's tokenizer; `TextTokenizer` explains it."""

    max_length: int
    mask_id: int | None
    mask_token: str
    frame: list[int]

    @property
    def marks_subwords(self) -> bool: ...
    def sizes_bytes(self, inputs: Sequence[TextInput], *, truncate: Truncate = False) -> list[int]: ...
    def encode(self, inputs: Sequence[TextInput], *, truncate: Truncate) -> list[EncodedText]: ...
    def encode_aligned(self, texts: Sequence[str], *, truncate: Truncate) -> list[AlignedText]: ...
    def windows_sizes_bytes(
        self, inputs: Sequence[str | tuple[str, str]], *, truncate: Truncate = False
    ) -> list[int]: ...
    def encode_windows(
        self,
        inputs: Sequence[str | tuple[str, str]],
        *,
        length: int,
        overlap: int,
        truncate: Truncate,
        whole_words: bool = True,
        most: int | None = None,
    ) -> list[AlignedText]: ...
    def encode_chunks(
        self, pairs: Sequence[tuple[str, str]], *, tokens: int, overlap: int, most: int
    ) -> list[EncodedChunk]: ...
    def decode(self, ids: Sequence[int], *, bare: bool = False) -> str: ...
    def name(self, token: int) -> str: ...
    def first_id(self, word: str) -> int | None: ...


class Work(msgspec.Struct, Generic[O]):
    """A request that the engine has answered.

    Attributes:
        texts: What went to the engine; at least one for each input.
        rows: Each text's row of every output; outputs of a token each are padded.
    """

    inputs: Sequence[TextInput]
    options: O
    texts: Sequence[EncodedText]
    rows: Sequence[Row]
    manifest: Facts
    tokenizer: Tokenizer


class SizesBytes(Protocol[O_contra]):
    def __call__(
        self, tokenizer: Tokenizer, inputs: Sequence[TextInput], options: O_contra, /, *, truncate: Truncate
    ) -> list[int]: ...


class Encode(Protocol[O_contra]):
    def __call__(
        self, tokenizer: Tokenizer, inputs: Sequence[TextInput], options: O_contra, /, *, truncate: Truncate
    ) -> Sequence[EncodedText]: ...


def accept(_: object, __: Facts) -> None: ...


def sizes_bytes(tokenizer: Tokenizer, inputs: Sequence[TextInput], _: object, *, truncate: Truncate) -> list[int]:
    return tokenizer.sizes_bytes(inputs, truncate=truncate)


def never(_: object) -> bool:
    return False


@dataclass(slots=True, frozen=True)
class Way(Generic[O, A]):
    """How requests with one class of options are answered, in functions between inputs, rows and the answer.

    Attributes:
        task: Of the models that answer; None suits models of every task.
        check: Refuses options that a model cannot follow, with `InvalidRequest`.
        sizes_bytes: Size of each input; refuses those that are too long to be read.
        expand: Makes the inputs that the model reads of the request's; None where they are the same.
        encode: None where each input is encoded by itself, as `TextTokenizer.encode` does.
        token_outputs: Whether finishing takes time for each token, so that long texts need a thread for it.
        prompt_apart: Whether inputs are pairs of the prompt and the text, in place of both in one.
        windows: Whether a text that is too long is read in several windows with these options; otherwise it is cut.
    """

    options: type[O]
    task: str | None
    finish: Callable[[Work[O]], A]
    check: Callable[[O, Facts], None] = accept
    sizes_bytes: SizesBytes[O] = sizes_bytes
    expand: Callable[[Sequence[TextInput], O], Sequence[TextInput]] | None = None
    encode: Encode[O] | None = None
    token_outputs: bool = False
    windows: Callable[[O], bool] = never
    prompt_apart: bool = False


class GraphOutput(NamedTuple):
    """An output of a task's graph.

    Attributes:
        dims: Beside the batch: -1 for each token (or mask), `hidden_size`, `labels`, `candidates`, or a number.
    """

    name: str
    dims: tuple[int | str, ...]
    dtype: Literal["int32", "float32"] = "float32"


def _no_dims(_: Facts) -> tuple[int, ...]:
    return ()


class Output(NamedTuple):
    """An output on the Open Inference Protocol: its name, its datatype and its dimensions beside the batch."""

    name: str
    datatype: str
    dims: Callable[[Facts], tuple[int, ...]] = _no_dims


class Vector(NamedTuple):
    """The type of a vector of so many float32, in a column of bulk work."""

    size: int


class Asked(NamedTuple):
    """What a message of a task's own route asks for."""

    inputs: Sequence[TextInput]
    options: TaskOptions[Any]
    truncate: bool | None = None


@dataclass(slots=True, frozen=True)
class Route:
    """A task's own route, in the shape of Hugging Face's inference API.

    Attributes:
        gives: The type of what it answers, for the document.
        read: Reads a message. The second argument is whether it came where no task was named (`/`, `/models/{model}`),
            whose clients expect the defaults of Transformers' pipelines.
        write: What is answered, of the message and the answer.
        summary: A sentence for the document.
    """

    takes: Any
    gives: Any
    read: Callable[[Any, bool], Asked]
    write: Callable[[Any, Any], Any]
    summary: str


@dataclass(slots=True, frozen=True)
class LoadFormat:
    """Requests and replies as the load generator makes and reads them, in code apart from what answers.

    Attributes:
        fields: What a line of texts must name.
        optional: What it may name.
        item: The fields of a text alone.
        body: The JSON that asks for an item on the task's own route.
        tensors: The Open Inference Protocol's input tensors for it, each with one text for a row.
        answers: The answer to each input, of a reply's JSON.
        row: The answer to an input, of its row of each output of the Open Inference Protocol.
        check: Raises for what is no answer, and else tells the width that all answers of a model share.
        inputs: How many inputs an item is.
    """

    answers: Callable[[Any], Sequence[Any]]
    row: Callable[..., Any]
    check: Callable[[Any], int]
    fields: tuple[str, ...] = ("text",)
    optional: tuple[str, ...] = ()
    item: Callable[[str], Mapping[str, Any]] = lambda text: {"text": text}
    body: Callable[[Mapping[str, Any]], object] = lambda item: {"inputs": item["text"]}
    tensors: Callable[[Mapping[str, Any]], dict[str, Sequence[str]]] = lambda item: {"text": [item["text"]]}
    inputs: Callable[[Mapping[str, Any]], int] = lambda _: 1


@dataclass(slots=True, frozen=True, kw_only=True)
class Task(Generic[O, A]):
    """A task. `export.tasks` says beside it what needs PyTorch: its head, and how its answers are proven.

    Attributes:
        graph: The outputs of its graph: what a request may not change lies inside, what it may change outside.
        facts: The fields of a manifest that belong to it; those of `NEEDED` it must have.
        head: What follows the stem in the name of the class of Transformers that answers it.
        texts: How many texts an input may be. Of two the first is the query or the question.
        served_agreement: The least share of decisions that are PyTorch's with which INT8 is served by default.
        example: A body for it.
        parameters: Whether its requests have `parameters` beside their `inputs`.
        route: What its own route takes and gives; None where a protocol's module says that.
        outputs: Those on the Open Inference Protocol.
        write: Each output's values, in the order of the outputs, of an answer.
        asked: What the Open Inference Protocol asks of a model.
        recorded: An answer to so many inputs, for the API's document.
        column: Name and type of its column in bulk work: `float`, a record, a `Vector`, or a list of one of them.
        owners: Who documents options beside those that are read.
        summary: What a model answers, in a few words; empty for nothing beside the task's name.
    """

    way: Way[O, A]
    graph: tuple[GraphOutput, ...]
    facts: frozenset[str] = frozenset()
    head: str = "Model"
    texts: tuple[int, ...] = (1,)
    served_agreement: float = 0
    path: str
    example: Mapping[str, Any]
    parameters: bool = True
    route: Route | None = None
    outputs: tuple[Output, ...]
    write: Callable[[Any, Facts], Sequence[Any]]
    asked: Callable[[Facts], O] | None = None
    recorded: Callable[[O, Facts, int], Any]
    column: Callable[[O, Facts], tuple[str, Any]]
    owners: Owners = field(default=NO_OWNER)
    summary: Callable[[Facts], str] = lambda _: ""
    load: LoadFormat

    @property
    def name(self) -> str:
        return self.way.task or ""

    @property
    def paired(self) -> bool:
        return 1 not in self.texts

    @property
    def headless(self) -> bool:
        """Whether it answers what the encoder does, without a head."""
        return self.head == "Model"

    def graph_inputs(self, *, segments: bool) -> tuple[TensorSpec, ...]:
        """The inputs of its graph.

        `input_ids`, `attention_mask` and, where the architecture knows segments, `token_type_ids`: int32 [batch,
        sequence]. A task of masks takes `mask_positions` too, int32 [batch, masks]: positions in the sequence; what is
        left of a row is 0 and its answers are thrown away.
        """
        names = [IDS, MASK, *([TYPES] if segments else []), *([POSITIONS] if "candidates" in self.facts else [])]
        return tuple(TensorSpec(name, "int32", (-1, -1)) for name in names)

    def graph_outputs(self, **sizes: int) -> tuple[TensorSpec, ...]:
        """The outputs of its graph, given `hidden_size` (of a text's vector, for embed), `labels` and `candidates`."""
        return tuple(
            TensorSpec(name, dtype, (-1, *(sizes[size] if isinstance(size, str) else size for size in dims)))
            for name, dims, dtype in self.graph
        )

    def options(self, facts: Facts) -> O:
        return self.way.options() if self.asked is None else self.asked(facts)


def each(answer: object) -> Callable[[Any, Facts, int], list[Any]]:
    """The same recorded answer for every input."""
    return lambda _, __, count: [answer] * count


def check_top_k(top_k: int | None, most: int) -> None:
    if top_k is not None and not 1 <= top_k <= most:
        raise InvalidRequest(f"`top_k` is {top_k}; between 1 and {most} are given")


def texts_of(inputs: Sequence[TextInput]) -> list[str]:
    """The inputs of a task whose answer points into its text; anything else is an `InvalidRequest`."""
    texts = [value for value in inputs if isinstance(value, str)]
    if len(texts) != len(inputs):
        raise InvalidRequest("each input must be one text")
    return texts


def pairs_of(inputs: Sequence[TextInput]) -> list[tuple[str, str]]:
    """The inputs of a task that looks at two texts at once; anything else is an `InvalidRequest`."""
    pairs = [value for value in inputs if isinstance(value, tuple)]
    if len(pairs) != len(inputs):
        raise InvalidRequest("each input must be a pair of texts")
    return pairs


def floats(values: Sequence[Any]) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def padded(column: Sequence[Any], width: int = 0) -> NDArray[Any]:
    """Arrays [n, ...] of different lengths as one, [arrays, longest or `width`, ...], filled up with zeros."""
    filled = np.zeros((len(column), max(width, *map(len, column)), *column[0].shape[1:]), column[0].dtype)
    for row, part in zip(filled, column, strict=True):
        row[: len(part)] = part
    return filled


def softmax(logits: NDArray[np.floating]) -> NDArray[np.float64]:
    """Probabilities along the last axis; the largest logit is subtracted first, so that none overflows."""
    scaled = np.exp(logits - logits.max(axis=-1, keepdims=True), dtype=np.float64)
    probabilities: NDArray[np.float64] = scaled / scaled.sum(axis=-1, keepdims=True)
    return probabilities


def sigmoid(logits: NDArray[np.floating]) -> NDArray[np.float64]:
    """Each number between 0 and 1 by itself; no logit overflows."""
    probabilities: NDArray[np.float64] = np.exp(-np.logaddexp(0.0, -logits.astype(np.float64)))
    return probabilities
