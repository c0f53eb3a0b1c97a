"""A request independent of the protocol, its answer, and its trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Literal

import msgspec

from bertserve.serving.errors import InvalidRequest
from bertserve.serving.records import BULK, DEFAULT_PRIORITY, PRIORITIES
from bertserve.serving.tasks.base import A

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bertserve.serving.inference.device import Admitted
    from bertserve.serving.records import TextInput, Truncate
    from bertserve.serving.tasks.base import TaskOptions

InputType = Literal["query", "search_query", "document", "search_document", "passage", "classification", "clustering"]
"""The purpose of an embedding, in the terms of the APIs of Cohere, Voyage and NVIDIA."""


class InferRequest(msgspec.Struct, Generic[A]):
    """One client request. The protocol fills in the body's fields; the transport adds the rest (`stamp`).

    Attributes:
        inputs: One or more inputs; all are answered or none.
        model: None means the task's default or only model.
        version: None means the newest.
        truncate: None means the server's default.
        prompt_name: Key of the model's prompt to put before each text.
        input_type: The purpose of the texts, which selects a prompt instead of `prompt_name`.
        timeout_ms: None means the server's default.
        priority: None means `DEFAULT_PRIORITY`.
        arrival: When the request was complete, in seconds of the clock `time.perf_counter`.
        request_id: Echoed to the client and written to logs.
        trace: Collects the answers until the reply is sent; None if no reply follows.
        as_bytes: Whether the reply has the answer's numbers as bytes, which takes no time to speak of.
    """

    inputs: Sequence[TextInput]
    options: TaskOptions[A]
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
    as_bytes: bool = False

    def stamp(
        self,
        arrival: float,
        request_id: str,
        trace: RequestTrace | None = None,
        timeout_ms: float | None = None,
        priority: int | None = None,
    ) -> InferRequest[A]:
        """Adds the transport's fields. The smaller timeout wins; the body's priority wins over the transport's."""
        self.arrival, self.request_id, self.trace = arrival, request_id, trace
        if timeout_ms is not None and (self.timeout_ms is None or timeout_ms < self.timeout_ms):
            self.timeout_ms = timeout_ms
        if self.priority is None:
            self.priority = priority
        return self


def priority_of(value: object, name: str) -> int:
    """Parses a request's priority: 1 (first) to 3 (last), 4 for bulk work, 0 for the default of 2 as in Triton.

    `name` is the header or parameter, for the error. Raises `InvalidRequest` for other values.
    """
    if value == 0 and not isinstance(value, bool | float):
        return DEFAULT_PRIORITY
    if isinstance(value, int) and not isinstance(value, bool) and value in PRIORITIES:
        return value
    raise InvalidRequest(f"{name} must be 1 (highest) to 3 (lowest), {BULK} for bulk work, or 0 for the default")


class Timings(msgspec.Struct):
    """Times of a request in microseconds; `queue` and `compute` are the longest of its inputs."""

    tokenize_us: float = 0.0
    queue_us: float = 0.0
    compute_us: float = 0.0
    total_us: float = 0.0


class Outcome(msgspec.Struct, Generic[A], frozen=True):
    """The answer to an `InferRequest`.

    Attributes:
        tokens: Computed tokens, including special tokens, without padding.
        truncated_tokens: Tokens cut off, over all inputs.
        compute_type: The engine's name for what computed it.
        cached: Whether nothing was computed for it: all rows were cached, or computed for other requests.
        permit: Its admission, whose deadline ends the writing of the reply too; None if it needed none.
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
    permit: Admitted | None = None


class RequestTrace(msgspec.Struct):
    """Data of one request for metrics, the access log and spans.

    The transport begins and ends it; the pipeline fills in the rest. Times are in seconds of the clock
    `time.perf_counter`; 0 means that it did not happen.

    Attributes:
        method: The HTTP method; `POST` for gRPC.
        route: The path with parameter names in place of the client's values; `?` for an unknown path.
        began: When the request was complete.
        traceparent: The W3C header as received.
        tracestate: The W3C header as received.
        decoded: When the pipeline got the request.
        queued: When its texts were queued.
        computed: When the last of them was computed.
        ended: When its reply was sent.
        status: The HTTP status, or the name of the gRPC status.
        reason: `ok`, or the reason of its error.
        error_status: The HTTP status of its error, whatever the transport; 0 without an error.
        model: The requested model, when it is known.
        version: This field and the ones below are set only if there was an answer.
        outcomes: The answers, counted when they are sent.
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
        """Adds an answer; a request may bring several that are answered separately."""
        self.queued, self.computed = queued, computed
        self.outcomes += (outcome,)

    def let_go(self) -> tuple[Outcome[Any], ...]:
        """Records the figures of the answers and returns them; they are large, so they are not kept."""
        outcomes, self.outcomes = self.outcomes, ()
        for outcome in outcomes:
            self.model, self.version = outcome.model, outcome.version
            self.texts += len(outcome.answer)
            self.tokens += outcome.tokens
            self.truncated_tokens += outcome.truncated_tokens
            self.timings = outcome.timings
        return outcomes

    def failed(self, reason: str, http_status: int, status: int | str) -> None:
        """Records an error without keeping it, because its traceback holds the whole request.

        `http_status` is the error's status over HTTP; `status` is the status that this transport sends.
        """
        self.reason, self.error_status, self.status = reason, http_status, status


class Totals(msgspec.Struct):
    """Counts of a model's answers since the server started.

    Attributes:
        texts: Inputs of answered requests. This field and the next three leave out requests for which nothing was
            computed.
        total_us: Time from arrival to answer.
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

    def add(self, more: Totals) -> None:
        """Adds counts of the same model; the time of the last answer is the later one."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(more, name))
        self.last_at = max(self.last_at - more.last_at, more.last_at)


class Token(msgspec.Struct, frozen=True):
    """A token of a text.

    Attributes:
        id: Its id.
        text: Its characters in the text; the name of a special token.
        special: Whether the tokenizer added it.
        start: Its first character, in Unicode code points; null for a special token.
        stop: The character after its last; null for a special token.
    """

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None
