"""The records that layers hand to one another: plain data, without imports from the project.

They are `msgspec.Struct`s, made in C: a request makes a dozen, and a dataclass would cost 4 us more for each while
a model's weights sweep the caches.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence, Sized
from typing import Any, Generic, Literal, NewType, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

A = TypeVar("A", bound=Sized)
"""What a task answers: one element for each input."""

Array: TypeAlias = NDArray[np.float32] | NDArray[np.int32]
"""One output of a graph."""

Row: TypeAlias = tuple[Array, ...]
"""One text's part of every output; outputs of a token each are as long as the batch was padded."""

Side = Literal["left", "right"]
"""The end of a text that is cut off."""

Truncate = bool | Side
"""Whether inputs that are too long are cut: at the end that is named, or at the model's own (true)."""

InputType = Literal["query", "search_query", "document", "search_document", "passage", "classification", "clustering"]
"""What a text is embedded for, in the words of Cohere's, Voyage's and NVIDIA's APIs."""

Long = Literal["truncate", "window"]
"""What to do with a text that is too long: cut it (or refuse it, as `truncate` says), or read it in windows."""

WindowScores = Literal["max", "mean"]

TokenIds = array
"""Token ids as an `array('i')`: four bytes each in the machine's order, the wire's own layout."""

ModelIndex = NewType("ModelIndex", int)
"""Position of a model in the list that the engine process was started with."""

BULK = 4
"""The class of work that nobody waits for: it has what the others leave, and a share of the device besides."""

PRIORITIES = (1, 2, 3, BULK)
"""Classes of requests; of the first three a smaller number goes first, always, as Triton counts them."""

DEFAULT_PRIORITY = 2


IDS, MASK, TYPES, POSITIONS = "input_ids", "attention_mask", "token_type_ids", "mask_positions"
"""Names of the inputs that a graph may have."""

DATA_SUFFIX = ".data"
"""What follows a graph's name in that of the file with its weights, where they are too large to lie in it."""


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor of a graph; -1 stands for a dimension that varies."""

    name: str
    dtype: Literal["int32", "float32"]
    shape: tuple[int, ...]


class ShapeProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One optimization profile of a TensorRT engine: (batch, sequence) at least, usually, at most."""

    min: tuple[int, int]
    opt: tuple[int, int]
    max: tuple[int, int]


class EngineBuild(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a TensorRT engine is tied to."""

    flavour: Literal["rtx", "enterprise"]
    version: str
    compute_capability: str
    profiles: tuple[ShapeProfile, ...]


PARTIAL = ".partial"
"""What follows the name of a tensor in that of a rank's share of it, which the ranks add up."""


class PartFile(msgspec.Struct, frozen=True):
    """One of the files of a model that was cut into parts; `data_sha256` as in `ModelSpec`."""

    path: str
    sha256: str
    data_sha256: str = ""


SplitBy = Literal["layers", "tensors"]
"""How a model is cut into parts: each has some of the layers, or a share of every layer."""


def stages(files: int, *, lookups: bool) -> int:
    """How many parts by layers so many files are, where with `lookups` each but the first has two of them."""
    return (files + 1) // 2 if lookups else files


class ModelSpec(msgspec.Struct, frozen=True):
    """A model as an engine loads it.

    Attributes:
        path: Artifact file; empty for the fake engine.
        data_sha256: Of the file beside a graph that holds its weights; empty where they lie in the graph.
        second: The same model for OpenVINO, with the engine `cpu`.
        batch_invariant: Whether batches and padding leave answers unchanged.
        vocab_size: Token ids are below this.
        max_length: Longest input in tokens.
        special_ids: Ids of the special tokens by role.
        copied: Whether each lane may hold a copy, because it is small.
        build: None for a graph.
        parts: What follows the file in `path` where that is only the first part of the model.
        split_by: How it was cut; None for a whole model.
        ranks: In how many shares its layers are split; each has as many of the files, in order. 1 for whole layers.
        lookups: Whether the parts share a table: each but the first then has a second file, behind those of the parts.
    """

    name: str
    path: str
    sha256: str
    batch_invariant: bool
    vocab_size: int
    max_length: int
    special_ids: dict[str, int]
    inputs: tuple[str, ...]
    outputs: tuple[TensorSpec, ...]
    copied: bool = False
    build: EngineBuild | None = None
    data_sha256: str = ""
    second: ModelSpec | None = None
    parts: tuple[PartFile, ...] = ()
    split_by: SplitBy | None = None
    ranks: int = 1
    lookups: bool = False

    @property
    def narrow(self) -> bool:
        """Whether narrow lanes run it too: where it is not batched or in stages, nothing else fills the device."""
        if self.split_by is not None:
            return self.stages > 1
        return self.copied or not self.batch_invariant

    @property
    def stages(self) -> int:
        """How many batches it works on at once: one in each part that has layers of its own."""
        return stages(1 + len(self.parts), lookups=self.lookups) if self.split_by == "layers" else 1


class KernelFiles(msgspec.Struct, frozen=True):
    """Where an engine reads and writes the kernels that its library compiles while it loads a model.

    Attributes:
        read: What an earlier start compiled; empty for nothing.
        sha256: Of that file.
        write: Where to put what this start compiles; empty for nowhere.
    """

    read: str = ""
    sha256: str = ""
    write: str = ""


class Windows(msgspec.Struct, frozen=True):
    """That a text which is too long is read in overlapping windows, not cut.

    Attributes:
        tokens: Of a window, special tokens and what each window repeats included; None for what the model takes.
        overlap_tokens: Tokens that neighbouring windows share; None for 128, or a quarter of a window if that is less.
        scores: Which of the windows' scores is the text's: the highest, or their mean.
        most: Windows of a text; what goes beyond them is cut off. None for as many as it needs.
    """

    tokens: int | None = None
    overlap_tokens: int | None = None
    scores: WindowScores = "max"
    most: int | None = None


class TaskOptions(msgspec.Struct, Generic[A], frozen=True):
    """What a request may change about its answer; the class of the options says which task is asked for."""


class EmbedTokensOptions(TaskOptions[list[NDArray[np.float32]]], frozen=True):
    """The answer is, for each input, float32 [tokens, hidden size], special tokens included, not normalised."""


class EmbedOptions(TaskOptions[NDArray[np.float32]], frozen=True):
    """The answer is float32 [inputs, dimensions].

    Attributes:
        normalize: Scale each vector to length 1; None means as the model does by itself.
        dimensions: Keep only the first components, before normalising; None keeps all.
    """

    normalize: bool | None = None
    dimensions: int | None = None


class LabelScore(msgspec.Struct, frozen=True):
    """A class and how likely it is, or its raw score."""

    label: str
    score: float


class ClassifyOptions(TaskOptions[list[list[LabelScore]]], frozen=True):
    """The answer is, for each input, its classes with the best first.

    Attributes:
        function: `none` leaves logits as they are. None means the model's own: `softmax`, or `sigmoid` where classes
            are independent of one another or there is only one; `none` for a regression.
        top_k: None keeps all classes.
        windows: None cuts texts that are too long. Windows are scored each for itself.
        ranked: The best first; otherwise in the order of the model's labels, of which two may have the same name.
    """

    function: Literal["softmax", "sigmoid", "none"] | None = None
    top_k: int | None = None
    windows: Windows | None = None
    ranked: bool = True


class ZeroShotOptions(TaskOptions[list[list[LabelScore]]], frozen=True):
    """The answer is, for each text, the request's own labels with the likeliest first, by a model of inference.

    Attributes:
        template: A sentence with `{}` where a label goes; the model says whether the text entails it.
        multi_label: Labels are independent of one another; otherwise their scores add up to 1.
    """

    labels: tuple[str, ...]
    template: str = "This example is {}."
    multi_label: bool = False


class RerankOptions(TaskOptions[list[float]], frozen=True):
    """The answer is one score for each pair of query and text.

    Attributes:
        raw_scores: The logit itself, or else its sigmoid; None means as the model does by itself.
        windows: None cuts pairs that are too long; in windows, each repeats the query.
    """

    raw_scores: bool | None = None
    windows: Windows | None = None


class Chunk(msgspec.Struct, frozen=True, eq=False):
    """A part of a text and its vector, float32 [dimensions].

    Attributes:
        start: Its first character, counted in Unicode code points.
        end: The character behind its last.
    """

    start: int
    end: int
    embedding: NDArray[np.float32]


class ChunkOptions(TaskOptions[list[list[Chunk]]], frozen=True):
    """The answer is, for each text, its chunks in their order; each ends with a word, if words are that short.

    Attributes:
        tokens: Of the largest chunk, special tokens and those of a prompt included; None for what the model takes.
        overlap_tokens: Tokens, about, that neighbouring chunks share; half a chunk at most.
        vectors: How vectors are answered.
    """

    tokens: int | None = None
    overlap_tokens: int = 0
    vectors: EmbedOptions = EmbedOptions()


class LateChunkOptions(ChunkOptions, frozen=True):
    """The same from one reading of the whole text: a chunk's vector is the mean of its tokens' vectors."""


class AnswerSpan(msgspec.Struct, frozen=True):
    """A part of a context that answers a question; an empty one says that the context holds no answer.

    Attributes:
        answer: The characters of the context.
        score: Probability that the answer starts and ends there, in its window; the sum where the same words are an
            answer several times.
        start: Its first character, counted in Unicode code points.
        end: The character behind its last.
    """

    answer: str
    score: float
    start: int
    end: int


class AnswerOptions(TaskOptions[list[list[AnswerSpan]]], frozen=True):
    """The answer is, for each pair of question and context, its answers with the best first.

    Attributes:
        top_k: Answers wanted; a short context has fewer.
        no_answer: Let "the context holds no answer" compete with the answers.
        overlap_tokens: Tokens that neighbouring windows of a long context share; None for half of a window, 128 at
            most.
        window_tokens: Tokens of a window, question included; at most the model's.
        whole_words: Answers begin and end with words, not with tokens inside of them.
    """

    top_k: int = 1
    max_answer_tokens: int = 15
    no_answer: bool = False
    overlap_tokens: int | None = None
    window_tokens: int = 384
    whole_words: bool = True


class Entity(msgspec.Struct, frozen=True):
    """A part of a text that has a tag.

    Attributes:
        entity_group: The tag, without the prefix that says where an entity begins.
        score: Mean probability of the tag over the entity's words.
        word: The characters of the text.
        start: Its first character, counted in Unicode code points.
        end: The character behind its last.
    """

    entity_group: str
    score: float
    word: str
    start: int
    end: int


class TaggedToken(msgspec.Struct, frozen=True):
    """A token and its tag, prefix included.

    Attributes:
        entity: The tag.
        score: Its probability.
        index: The token's place, special tokens counted.
        word: The token's name in the vocabulary; the characters of the text where it has none.
        start: Its first character, counted in Unicode code points.
        end: The character behind its last.
    """

    entity: str
    score: float
    index: int
    word: str
    start: int
    end: int


Aggregation = Literal["none", "simple", "first", "average", "max"]
"""What decides the tag of a word: its `first` token, as models are trained; the `average` of its tokens' probabilities;
the token with the highest one (`max`). With `simple` each token has its own tag; with `none` tokens are not grouped."""


class TagOptions(TaskOptions[list[list[Entity | TaggedToken]]], frozen=True):
    """The answer is, for each text, its entities in the order of the text, or its tokens where they are not grouped.

    Attributes:
        aggregation: How tokens become entities.
        ignore_labels: Tags that are no entities.
        windows: None cuts texts that are too long. In windows, a token is tagged in the one that shows most around it.
        by_window: Find entities in each window instead; of those that overlap the longest is kept, as in Transformers.
    """

    aggregation: Aggregation = "first"
    ignore_labels: tuple[str, ...] = ("O",)
    windows: Windows | None = None
    by_window: bool = False


class FilledMask(msgspec.Struct, frozen=True):
    """A token for a mask.

    Attributes:
        score: Its probability over the whole vocabulary.
        token: Its id.
        token_str: Its text.
        sequence: The input with the mask filled, as the tokenizer writes it.
    """

    score: float
    token: int
    token_str: str
    sequence: str


class FillMaskOptions(TaskOptions[list[list[list[FilledMask]]]], frozen=True):
    """The answer is, for each text and each of its masks, the best `top_k` tokens.

    Attributes:
        targets: Only these words compete: tokens of the vocabulary, or what begins with one. None for all.
    """

    top_k: int = 5
    targets: tuple[str, ...] | None = None


class TensorOptions(TaskOptions[Sequence[Row]], frozen=True):
    """The answer is each input's row of every output of the model's graph, whatever its task."""


class InferRequest(msgspec.Struct, Generic[A]):
    """One client request, stripped of its protocol.

    Attributes:
        inputs: One or more inputs; all are answered or none.
        arrival: When the request was complete, in seconds of the clock `time.perf_counter`.
        request_id: Echoed to the client and written into logs.
        max_inputs: The limit of the route on `len(inputs)`.
        model: None means the only model of the task.
        version: None means the newest.
        truncate: None means the server's default.
        prompt_name: Key of the model's prompt to put before each text.
        input_type: What the texts are for, in place of a prompt's name.
        timeout_ms: None means the server's default.
        trace: Where the transport has its answers noted until the reply is sent; None where no reply follows.
    """

    inputs: Sequence[TextInput]
    options: TaskOptions[A]
    arrival: float
    request_id: str
    max_inputs: int
    model: str | None = None
    version: str | None = None
    truncate: Truncate | None = None
    prompt_name: str | None = None
    input_type: InputType | None = None
    timeout_ms: float | None = None
    priority: int = DEFAULT_PRIORITY
    trace: RequestTrace | None = None


class EncodedText(msgspec.Struct, frozen=True):
    """One input as token ids, special tokens included.

    Attributes:
        type_ids: Segment of each token; None when all are 0.
        truncated: Tokens that were cut off.
    """

    ids: TokenIds[int]
    type_ids: TokenIds[int] | None = None
    truncated: int = 0


class AlignedText(EncodedText, frozen=True, eq=False, kw_only=True):
    """An input, or a window of one, whose tokens point back into its text (of a pair: into the second part).

    Attributes:
        source: Position of the input in the request.
        spans: int32 [tokens, 2], the characters [start, end) that each token stands for.
        words: int32 [tokens], the number of each token's word; -1 for tokens that are not of the text.
        start: Of a window: how many tokens of the text lie before it.
        head: Of a window: how many tokens stand before those of the text, in every window of it.
        tail: Likewise behind them.
    """

    source: int
    spans: NDArray[np.int32]
    words: NDArray[np.int32]
    start: int = 0
    head: int = 0
    tail: int = 0


class EncodedChunk(EncodedText, frozen=True, kw_only=True):
    """A chunk of an input.

    Attributes:
        source: Position of the input in the request.
        start: Its first character in the input.
        end: The character behind its last.
    """

    source: int
    start: int
    end: int


TextInput = str | tuple[str, str] | list[int] | EncodedText
"""One input: a text, a pair of texts, or token ids with their special tokens, with or without segments."""


class Batch(msgspec.Struct, frozen=True):
    """What an engine runs at once: one or more texts for one of the engine's models."""

    model: ModelIndex
    texts: Sequence[EncodedText]

    @property
    def padded_length(self) -> int:
        """Tokens of the longest input: the sequence length of the tensors."""
        return max(len(text.ids) for text in self.texts)


class BatchOutput(msgspec.Struct, frozen=True):
    """What an engine answers.

    Attributes:
        arrays: The graph's outputs in the manifest's order, each [len(texts), ...].
        finite: For each input, whether all of its numbers are finite.
        compute_us: Time the engine spent, in microseconds.
    """

    arrays: Sequence[Array]
    finite: Sequence[bool]
    compute_us: float


class Timings(msgspec.Struct):
    """Where a request's time went, in microseconds; `queue` and `compute` are the longest of its inputs."""

    tokenize_us: float = 0.0
    queue_us: float = 0.0
    compute_us: float = 0.0
    total_us: float = 0.0


class Outcome(msgspec.Struct, Generic[A], frozen=True):
    """The answer to an `InferRequest`.

    Attributes:
        tokens: Tokens computed, special tokens included, padding not.
        truncated_tokens: Tokens cut off, over all inputs.
        compute_type: What computed it, as an engine says of itself.
        cached: Whether nothing was computed for it: all of it had been, or was being, computed for others.
        priority: The request's class.
    """

    answer: A
    model: str
    version: str
    timings: Timings
    tokens: int
    truncated_tokens: int
    compute_type: str = "cpu"
    cached: bool = False
    priority: int = DEFAULT_PRIORITY


class RequestTrace(msgspec.Struct):
    """What counts, the access log and spans need of one request.

    The transport begins and ends it, the pipeline fills in the rest. Times are in seconds of the clock
    `time.perf_counter`; 0 stands for what did not happen.

    Attributes:
        method: HTTP's method; `POST` for gRPC.
        route: With the names of a path's parts in place of what the client wrote there; `?` for an unknown path.
        began: When the request was complete.
        bytes_in: Size of the body or message.
        traceparent: W3C's header, as it came.
        tracestate: W3C's header, as it came.
        decoded: When the pipeline got the request.
        queued: When its texts were queued.
        computed: When the last of them was computed.
        ended: When its reply was sent.
        status: HTTP's status, or the name of gRPC's.
        reason: `ok`, or the reason of its error.
        error_status: The HTTP status of its error, whatever the transport; 0 without an error.
        model: The one that the request is for, once that is known.
        version: This and what follows are set only where there was an answer.
        outcomes: The answers, to be counted once they are sent.
    """

    protocol: Literal["http", "grpc"]
    method: str
    route: str
    request_id: str
    began: float
    bytes_in: int = 0
    traceparent: bytes | None = None
    tracestate: bytes | None = None
    decoded: float = 0.0
    queued: float = 0.0
    computed: float = 0.0
    ended: float = 0.0
    bytes_out: int = 0
    status: int | str = 0
    reason: str = "ok"
    error_status: int = 0
    model: str = ""
    version: str = ""
    texts: int = 0
    tokens: int = 0
    truncated_tokens: int = 0
    timings: Timings | None = None
    outcomes: tuple[Outcome[Any], ...] = ()

    def answered(self, outcome: Outcome[Any], queued: float, computed: float) -> None:
        """Notes an answer; a request may bring several that are answered each for itself."""
        self.queued, self.computed = queued, computed
        self.outcomes += (outcome,)

    def let_go(self) -> tuple[Outcome[Any], ...]:
        """Notes of the answers what is told of them, and gives them away, as they are large."""
        outcomes, self.outcomes = self.outcomes, ()
        for outcome in outcomes:
            self.model, self.version = outcome.model, outcome.version
            self.texts += len(outcome.answer)
            self.tokens += outcome.tokens
            self.truncated_tokens += outcome.truncated_tokens
            self.timings = outcome.timings
        return outcomes

    def failed(self, reason: str, http_status: int, status: int | str) -> None:
        """Notes an error without keeping it, because its traceback holds the whole request.

        `http_status` is the error's status over HTTP, `status` the one that this transport answers.
        """
        self.reason, self.error_status, self.status = reason, http_status, status


class Token(msgspec.Struct, frozen=True):
    """A token of a text.

    Attributes:
        id: Its id.
        text: The characters of the text that it stands for; the name of a special token.
        special: Whether the tokenizer added it.
        start: Its first character, counted in Unicode code points; null for a special token.
        stop: The character behind its last.
    """

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class Totals(msgspec.Struct):
    """What a model has answered since the server started.

    Attributes:
        texts: Inputs of the requests answered, and like the next three without those for which nothing was computed.
        total_us: From arrival to answer.
        cached: Requests for which nothing was computed.
        cached_us: Their time from arrival to answer.
        last_at: When the last request was answered, in seconds since 1970; 0 before the first.
    """

    requests: int = 0
    texts: int = 0
    tokenize_us: float = 0.0
    queue_us: float = 0.0
    compute_us: float = 0.0
    total_us: float = 0.0
    cached: int = 0
    cached_us: float = 0.0
    last_at: float = 0.0


class Gpu(msgspec.Struct, frozen=True):
    """A GPU that this process may use.

    Attributes:
        ordinal: Its index in CUDA's order.
        uuid: As NVML has it: `GPU-` and 32 digits in groups.
        compute_capability: Major and minor, as `7.5`.
    """

    ordinal: int
    name: str
    uuid: str
    compute_capability: str
    memory_bytes: int

    @property
    def target(self) -> str:
        """The target of artifacts for this GPU, such as `sm75`."""
        return f"sm{self.compute_capability.replace('.', '')}"


class RejectedEngine(msgspec.Struct, frozen=True):
    """An engine that was not taken, and why; behind a semicolon `reason` says what to do, where something can be."""

    engine: str
    reason: str


class EngineChoice(msgspec.Struct, frozen=True):
    """What runs the models, and why nothing faster does.

    Attributes:
        engine: As `--engine` calls it.
        degraded: Whether it is less than was meant.
        gpus: The GPUs that it runs on; none for a CPU.
        rejected: What was tried before it, the best first.
        left_out: GPUs like those that cannot take part, each with its reason.
        lost: GPUs that were given up while serving, each with its reason.
    """

    engine: str
    degraded: bool = False
    gpus: tuple[Gpu, ...] = msgspec.field(default=(), name="cards")  # in `/status` since version 0.1
    rejected: tuple[RejectedEngine, ...] = ()
    left_out: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()

    def where(self, threads: int) -> str:
        """The hardware that it computes on, for the log."""
        return f"{len(self.gpus)} x {self.gpus[0].name}" if self.gpus else f"{threads} threads"
