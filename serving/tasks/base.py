"""The definition of a task, which all other packages read.

`Facts` is what a task knows about a model, and `Tokenizer` what it needs from a tokenizer. Tasks import neither the
bundles' nor the requests' packages, so that both can import tasks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np

from bertserve.serving.errors import InvalidRequest, quote
from bertserve.serving.records import IDS, MASK, POSITIONS, TYPES, TensorSpec
from bertserve.serving.tasks.parts import LARGEST_SIZE
from bertserve.serving.tasks.prompts import Prepared, Prompts, prepare

if TYPE_CHECKING:
    from typing import Literal

    from numpy.typing import NDArray

    from bertserve.serving.records import AlignedText, EncodedChunk, EncodedText, Row, TextInput, Truncate
    from bertserve.serving.tasks.parts import Activation, Embedding, Labels, MultiVector, Part, Sparse


O = TypeVar("O")  # noqa: E741  the options
O_contra = TypeVar("O_contra", contravariant=True)
V = TypeVar("V")
A = TypeVar("A", bound=Sized)
"""The answer of a task: one element for each input."""


CHARACTERS_PER_TOKEN = 32
"""Characters read for each token of `max_length`; more are read in part, or rejected if truncation is not allowed."""

MAX_ANSWER_NUMBERS = 1 << 25
"""Maximum numbers of an answer with vectors of tokens, and of an output that is padded: 128 MiB, or 350 MB as JSON."""


class TaskOptions(msgspec.Struct, Generic[A], frozen=True):
    """What a request may change about its answer. The class of the options selects the task."""


class Facts(Prompts, Protocol):
    """What a task may know about a model. A manifest implements and documents it."""

    @property
    def max_length(self) -> int: ...
    @property
    def special_ids(self) -> Mapping[str, int]: ...
    @property
    def inputs(self) -> Sequence[TensorSpec]: ...
    @property
    def outputs(self) -> Sequence[TensorSpec]: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def embedding(self) -> Embedding | None: ...
    @property
    def labels(self) -> Labels | None: ...
    @property
    def sparse(self) -> Sparse | None: ...
    @property
    def multi_vector(self) -> MultiVector | None: ...
    @property
    def activation(self) -> Activation | None: ...


class Tokenizer(Protocol):
    """What a task may ask of a model's tokenizer. `TextTokenizer` implements and documents it."""

    max_length: int
    mask_id: int | None
    mask_token: str
    frame: list[int]
    query_weights: NDArray[np.float32] | None
    multi_vector: MultiVector | None

    @property
    def marks_subwords(self) -> bool: ...
    def sizes_bytes(self, inputs: Sequence[TextInput], *, truncate: Truncate = False) -> list[int]: ...
    def encode(
        self, inputs: Sequence[TextInput], *, truncate: Truncate, most: int | None = None, whole: str = ""
    ) -> list[EncodedText]: ...
    def encode_bare(self, texts: Sequence[str], *, truncate: Truncate) -> list[EncodedText]: ...
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


Check = Callable[[], None]
"""Called between blocks of work. It raises if the work must end: its deadline has passed, or its client has left."""

_BLOCK = 1024


def go_on() -> None:
    """The `Check` of work without a deadline."""


def with_checks(values: Iterable[V], check: Check, block: int = _BLOCK) -> Iterator[V]:
    """The values, with a check before each block of them."""
    for index, value in enumerate(values):
        if index % block == 0:
            check()
        yield value


class Work(msgspec.Struct, Generic[O]):
    """A request that the engine has processed.

    Attributes:
        texts: The texts sent to the engine; at least one for each input.
        rows: Each text's row of every output. Outputs per token are padded. Empty if no engine was needed.
    """

    inputs: Sequence[TextInput]
    options: O
    texts: Sequence[EncodedText]
    rows: Sequence[Row]
    manifest: Facts
    tokenizer: Tokenizer
    check: Check = go_on


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


def encode(tokenizer: Tokenizer, inputs: Sequence[TextInput], _: object, *, truncate: Truncate) -> list[EncodedText]:
    return tokenizer.encode(inputs, truncate=truncate)


def never(_: object, __: object = None) -> bool:
    return False


@dataclass(slots=True, frozen=True)
class TaskRoute(Generic[O, A]):
    """How requests with one class of options are answered: functions from inputs to rows to the answer.

    Attributes:
        task: The task of the models that answer; None fits models of every task.
        check: Rejects options that a model does not support, with `InvalidRequest`.
        sizes_bytes: Size of each input. Rejects inputs that are too long to be read.
        prepare: Turns checked options and the inputs into those that the model reads, by the request's prompt name and
            input type. By default it puts the prompt before each text.
        encode: By default each input is encoded by itself.
        token_numbers: Numbers of the answer for each token; 0 if the answer does not grow with a text's tokens.
        text_numbers: The same for each text of the engine.
        token_outputs: Whether finishing takes time for each token, so that long texts need a thread for it.
        after: Units of work that finishing takes, by the inputs and the tokens of each text of the engine. The warm-up
            measures the time of a unit. None if it takes no time to speak of.
        windows: Whether these options read a text that is too long in several windows; otherwise it is truncated.
    """

    options: type[O]
    task: str | None
    finish: Callable[[Work[O]], A]
    check: Callable[[O, Facts], None] = accept
    sizes_bytes: SizesBytes[O] = sizes_bytes
    prepare: Callable[[Sequence[TextInput], O, Facts, str | None, str | None], Prepared[O]] = prepare
    encode: Encode[O] = encode
    token_numbers: Callable[[O, Facts], int] = never
    text_numbers: Callable[[O, Facts], int] = never
    token_outputs: bool = False
    after: Callable[[Sequence[TextInput], Sequence[int], O, Facts], int] | None = None
    windows: Callable[[O], bool] = never


class GraphOutput(NamedTuple):
    """An output of a task's graph.

    Attributes:
        dims: Dimensions besides the batch: -1 (per token or mask), a number, or the name of a size: `hidden_size`,
            `labels`, `candidates`, `active`, `token_size`.
    """

    name: str
    dims: tuple[int | str, ...]
    dtype: Literal["int32", "float32"] = "float32"


def output_at(facts: Facts, output: str) -> int:
    """The index of an output of the graph."""
    return [spec.name for spec in facts.outputs].index(output)


def size_of(facts: Facts, output: str) -> int:
    """The last dimension of an output of the graph."""
    return facts.outputs[output_at(facts, output)].shape[-1]


def _no_dims(_: Facts) -> tuple[int, ...]:
    return ()


class Output(NamedTuple):
    """An output on the Open Inference Protocol: its name, datatype, and dimensions besides the batch."""

    name: str
    datatype: str
    dims: Callable[[Facts], tuple[int, ...]] = _no_dims


class Vector(NamedTuple):
    """The type of a float32 vector in a column of bulk work."""

    size: int


class TaskInputs(NamedTuple):
    """The inputs and options of a message to a task's own route."""

    inputs: Sequence[TextInput]
    options: TaskOptions[Any]
    truncate: bool | None = None


@dataclass(slots=True, frozen=True)
class Route:
    """A task's own route, in the form of Hugging Face's inference API.

    Attributes:
        gives: The type of the reply, for the OpenAPI document.
        read: Reads a message. The second argument is whether its path names no task (`/`, `/models/{model}`); such
            clients expect the defaults of Transformers' pipelines.
        write: Makes the reply from the message and the answer.
        summary: A sentence for the OpenAPI document.
    """

    takes: Any
    gives: Any
    read: Callable[[Any, bool], TaskInputs]
    write: Callable[[Any, Any], Any]
    summary: str


@dataclass(slots=True, frozen=True)
class LoadFormat:
    """How the load generator makes requests and reads replies, independent of the serving code.

    Attributes:
        fields: Required fields of an item in a file of texts.
        optional: Optional fields of an item.
        item: The fields of an item that is only a text.
        body: The JSON that requests an item on the task's own route.
        tensors: The input tensors of an item on the Open Inference Protocol, each with one text per row.
        answers: The answer to each input, from a reply's JSON.
        row: The answer to one input, from its row of each output of the Open Inference Protocol.
        split: Splits the outputs of a reply into the rows of its inputs.
        check: Raises if a value is not an answer; otherwise returns the width that all answers of a model share.
        inputs: Number of inputs in an item.
    """

    answers: Callable[[Any], Sequence[Any]]
    row: Callable[..., Any]
    check: Callable[[Any], int]
    fields: tuple[str, ...] = ("text",)
    optional: tuple[str, ...] = ()
    item: Callable[[str], Mapping[str, Any]] = lambda text: {"text": text}
    body: Callable[[Mapping[str, Any]], object] = lambda item: {"inputs": item["text"]}
    tensors: Callable[[Mapping[str, Any]], dict[str, Sequence[str]]] = lambda item: {"text": [item["text"]]}
    split: Callable[..., Iterable[tuple[Any, ...]]] = lambda *outputs: zip(*outputs, strict=True)
    inputs: Callable[[Mapping[str, Any]], int] = lambda _: 1


@dataclass(slots=True, frozen=True, kw_only=True)
class Task(Generic[O, A]):
    """A task. `export.tasks` defines the parts that need PyTorch: its head, and how its answers are verified.

    Attributes:
        graph: The outputs of its graph. The graph computes what a request cannot change; the rest is computed outside.
        part: The part of a manifest that belongs to it; None if none does.
        token_head: The outputs with which the graph of the task embed answers it too, after its own; empty if it
            cannot.
        head: The suffix of the Transformers class that answers it, after the model's stem.
        texts: Possible numbers of texts in an input. Of two texts, the first is the query or the question.
        served_agreement: Minimum share of decisions equal to PyTorch's with which INT8 is served by default.
        example: An example body.
        parameters: Whether its requests have `parameters` besides their `inputs`.
        route: Its own route; None if the module of a protocol defines it.
        outputs: Its outputs on the Open Inference Protocol.
        write: The values of each output, in the order of the outputs, from an answer.
        asked: The options of requests on the Open Inference Protocol; None means the defaults.
        recorded: A sample answer to a number of inputs, for the OpenAPI document.
        column: Name and type of its column in bulk work: `float`, a record, a `Vector`, or a list of one of them.
        summary: A model's answers in a few words; empty to show only the task's name.
    """

    way: TaskRoute[O, A]
    graph: tuple[GraphOutput, ...]
    part: Part | None = None
    token_head: tuple[GraphOutput, ...] = ()
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
        """Whether it returns the output of the encoder, without a head."""
        return self.head == "Model"

    @property
    def embeds(self) -> bool:
        return self.part in {"embedding", "sparse", "multi_vector"}

    @property
    def fills_masks(self) -> bool:
        return any("candidates" in output.dims for output in self.graph)

    def graph_inputs(self, *, segments: bool) -> tuple[TensorSpec, ...]:
        """The inputs of its graph.

        `input_ids`, `attention_mask` and, if the architecture has token types, `token_type_ids`: int32 [batch,
        sequence]. A task with masks also takes `mask_positions`, int32 [batch, masks]: positions in the sequence. The
        rest of a row is 0, and its answers are discarded.
        """
        names = [IDS, MASK, *([TYPES] if segments else []), *([POSITIONS] if self.fills_masks else [])]
        return tuple(TensorSpec(name, "int32", (-1, -1)) for name in names)

    def graph_outputs(self, *also: Task[Any, Any], **sizes: int) -> tuple[TensorSpec, ...]:
        """The outputs of its graph, for the sizes that `GraphOutput` names; `hidden_size` is embed's vector size.

        `also` are further tasks that the graph answers (`Task.token_head`).
        """
        return tuple(
            TensorSpec(name, dtype, (-1, *(sizes[size] if isinstance(size, str) else size for size in dims)))
            for name, dims, dtype in self._graph(also)
        )

    def has_outputs(self, outputs: Sequence[TensorSpec], *also: Task[Any, Any], labels: int) -> bool:
        """Whether these are the outputs of its graph, for this number of labels and any other sizes."""
        graph = self._graph(also)
        if [len(output.dims) + 1 for output in graph] != [len(spec.shape) for spec in outputs]:
            return False
        sizes = {
            name: min(max(1, size), LARGEST_SIZE)
            for output, spec in zip(graph, outputs, strict=True)
            for name, size in zip(output.dims, spec.shape[1:], strict=True)
            if isinstance(name, str)
        }
        return tuple(outputs) == self.graph_outputs(*also, **{**sizes, "labels": labels})

    def _graph(self, also: Sequence[Task[Any, Any]]) -> list[GraphOutput]:
        return [*self.graph, *(output for task in also for output in task.token_head)]

    def options(self, facts: Facts) -> O:
        return self.way.options() if self.asked is None else self.asked(facts)


def each(answer: object) -> Callable[[Any, Facts, int], list[Any]]:
    """Makes a function that returns the same sample answer for every input."""
    return lambda _, __, count: [answer] * count


def all_tokens(_: Sequence[TextInput], lengths: Sequence[int], __: object, ___: Facts) -> int:
    """The units of work (`Way.after`) that is proportional to tokens."""
    return sum(lengths)


def check_top_k(top_k: int | None) -> None:
    if top_k is not None and top_k < 1:
        raise InvalidRequest(f"`top_k` is {quote(top_k)}; it must be at least 1")


def texts_of(inputs: Sequence[TextInput]) -> list[str]:
    """The inputs of a task whose answer points into its text.

    Raises:
        InvalidRequest: An input is not a single text.
    """
    texts = [value for value in inputs if isinstance(value, str)]
    if len(texts) != len(inputs):
        raise InvalidRequest("each input must be one text")
    return texts


def pairs_of(inputs: Sequence[TextInput]) -> list[tuple[str, str]]:
    """The inputs of a task that reads two texts at once.

    Raises:
        InvalidRequest: An input is not a pair of texts.
    """
    pairs = [value for value in inputs if isinstance(value, tuple)]
    if len(pairs) != len(inputs):
        raise InvalidRequest("each input must be a pair of texts")
    return pairs


def floats(values: Sequence[Any]) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def check_answer(numbers: int) -> None:
    """Rejects an answer that would take too much memory; raises `InvalidRequest`."""
    if numbers > MAX_ANSWER_NUMBERS:
        raise InvalidRequest(
            f"the answer would have {numbers} numbers; the maximum is {MAX_ANSWER_NUMBERS}. Send fewer or shorter texts"
        )


def pad_column(column: Sequence[Any], width: int = 0) -> NDArray[Any]:
    """Stacks arrays [n, ...] of different lengths into [arrays, longest or `width`, ...], padded with zeros.

    Raises:
        InvalidRequest: The result would be too large.
    """
    shape = (len(column), max(width, *map(len, column)), *column[0].shape[1:])
    check_answer(math.prod(shape))
    filled = np.zeros(shape, column[0].dtype)
    for row, part in zip(filled, column, strict=True):
        row[: len(part)] = part
    return filled


def softmax(logits: NDArray[np.floating]) -> NDArray[np.float64]:
    """Probabilities along the last axis. The largest logit is subtracted first, so that none overflows."""
    scaled = np.exp(logits - logits.max(axis=-1, keepdims=True), dtype=np.float64)
    probabilities: NDArray[np.float64] = scaled / scaled.sum(axis=-1, keepdims=True)
    return probabilities


def sigmoid(logits: NDArray[np.floating]) -> NDArray[np.float64]:
    """The sigmoid of each number by itself. No logit overflows."""
    probabilities: NDArray[np.float64] = np.exp(-np.logaddexp(0.0, -logits.astype(np.float64)))
    return probabilities
