"""A request without its protocol, its answer, and what is noted of it on its way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Literal

import msgspec

from serving.errors import InvalidRequest
from serving.records import BULK, DEFAULT_PRIORITY, PRIORITIES
from serving.tasks.base import A

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.records import TextInput, Truncate
    from serving.tasks.base import TaskOptions

InputType = Literal["query", "search_query", "document", "search_document", "passage", "classification", "clustering"]
"""What a text is embedded for, in the words of Cohere's, Voyage's and NVIDIA's APIs."""


class InferRequest(msgspec.Struct, Generic[A]):
    """One client request: its protocol fills in what the body says, and its wire adds the rest (`stamp`).

    Attributes:
        inputs: One or more inputs; all are answered or none.
        max_inputs: The limit of the route on `len(inputs)`.
        model: None means the only model of the task.
        version: None means the newest.
        truncate: None means the server's default.
        prompt_name: Key of the model's prompt to put before each text.
        input_type: What the texts are for, in place of a prompt's name.
        timeout_ms: None means the server's default.
        priority: None means `DEFAULT_PRIORITY`.
        arrival: When the request was complete, in seconds of the clock `time.perf_counter`.
        request_id: Echoed to the client and written into logs.
        trace: Where the transport has its answers noted until the reply is sent; None where no reply follows.
    """

    inputs: Sequence[TextInput]
    options: TaskOptions[A]
    max_inputs: int
    model: str | None = None
    version: str | None = None
    truncate: Truncate | None = None
    prompt_name: str | None = None
    input_type: InputType | None = None
    timeout_ms: float | None = None
    priority: int | None = None
    arrival: float = 0.0
    request_id: str = ""
    trace: RequestTrace | None = None

    def stamp(
        self,
        arrival: float,
        request_id: str,
        trace: RequestTrace | None = None,
        timeout_ms: float | None = None,
        priority: int | None = None,
    ) -> InferRequest[A]:
        """Adds what the wire says; the smaller time limit counts, and the body's priority before the wire's."""
        self.arrival, self.request_id, self.trace = arrival, request_id, trace
        if timeout_ms is not None and (self.timeout_ms is None or timeout_ms < self.timeout_ms):
            self.timeout_ms = timeout_ms
        if self.priority is None:
            self.priority = priority
        return self


def priority_of(value: object, name: str) -> int:
    """The priority that a request asks for: 1 goes before 2, and 2 before 3; 4 is bulk work, 0 Triton's default, 2.

    `name` is that of the header or parameter, for the error. Raises `InvalidRequest` for anything else.
    """
    if value == 0 and not isinstance(value, bool | float):
        return DEFAULT_PRIORITY
    if isinstance(value, int) and not isinstance(value, bool) and value in PRIORITIES:
        return value
    raise InvalidRequest(f"{name} must be 0 for the default, 1 (first) to 3 (last), or {BULK} for bulk work")


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

    def add_outcome(self, outcome: Outcome[Any], queued: float, computed: float) -> None:
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
