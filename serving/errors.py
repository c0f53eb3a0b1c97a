"""The error tree: every failure a client can see, with its reason, HTTP status and gRPC code (as google.rpc.Code).

Each class states these if they differ from its parent's. A message is made from a template that names the field, the
limit and the size received. It repeats nothing received but names and numbers, as `quote` writes them. Errors that no
client sees are at the end.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, ClassVar, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST_QUOTED, _MOST_NAMES = 64, 8


class BertserveError(Exception):
    """A failure with an answer: the message is sent to the client unchanged.

    Attributes:
        retry_after_s: When a retry is worthwhile; None if unknown.
    """

    reason: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    grpc_code: ClassVar[str] = "INTERNAL"

    def __init_subclass__(cls, *, reason: str = "", http: int = 0, grpc: str = "") -> None:
        super().__init_subclass__()
        cls.reason = reason or cls.reason
        cls.http_status = http or cls.http_status
        cls.grpc_code = grpc or cls.grpc_code

    def __init__(self, message: str, *, retry_after_s: float | None = None, jitter: float = 0.0) -> None:
        """`jitter`, from 0 to 1, delays this client further, as a share of `retry_after_s`.

        So clients that are rejected together do not come back together.
        """
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s
        self._jitter = jitter

    def without_traceback(self) -> Self:
        """The error without its traceback and causes, whose frames hold the whole request.

        For code that keeps an error, even in a variable: variable, frame, traceback and error would form a reference
        cycle with the request, until a collection.
        """
        self.__traceback__ = self.__cause__ = self.__context__ = None
        return self

    @property
    def retry_after_ms(self) -> int | None:
        """With its jitter."""
        return None if self.retry_after_s is None else math.ceil(self.retry_after_s * (1 + self._jitter) * 1e3)


class InvalidRequest(BertserveError, reason="invalid_request", http=422, grpc="INVALID_ARGUMENT"):
    """The request was understood and breaks the schema or a limit.

    Attributes:
        param: The invalid field, for OpenAI's error format; None if there is no such field.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class MalformedRequest(InvalidRequest, reason="malformed_request", http=400):
    """The bytes could not be parsed."""


class InvalidCompression(MalformedRequest, reason="invalid_compression", grpc="INTERNAL"):
    """A gRPC message that is not compressed as declared; the code is that of gRPC's own table (statuscodes.md)."""


class WrongMessageCount(MalformedRequest, reason="message_count", grpc="UNIMPLEMENTED"):
    """A gRPC call without a whole message, or with several, where the method takes one (statuscodes.md)."""


class VersionNotSpoken(MalformedRequest, reason="version_not_spoken", http=505):
    """A request in an unsupported version of HTTP, or one that is not supported on this port."""


class EmptyInput(InvalidRequest, reason="empty_input", http=400):
    """An empty list of inputs, or an empty text where the route's protocol rejects it."""


class WrongTask(InvalidRequest, reason="wrong_task", http=400, grpc="FAILED_PRECONDITION"):
    """The model exists and has another task."""


class ModelNotNamed(InvalidRequest, reason="model_not_named", http=400):
    """Several models could answer, none of them is the default, and the request names none.

    The message ends in "name one", and the protocol adds how.
    """


class ForeignTokenIds(InvalidRequest, reason="foreign_token_ids", http=400):
    """Token ids that are probably of another tokenizer than the model's."""


class RouteNotFound(InvalidRequest, reason="not_found", http=404, grpc="UNIMPLEMENTED"):
    """No such path."""


_NO_SERVER = "use `bertserve batch`, which needs no server"

LEFT = {
    "/v1/batches": _NO_SERVER,
    "/v1/files": _NO_SERVER,
    "/tei.v1.": "use Open Inference Protocol v2 over gRPC, or TEI's routes over HTTP",
    "/xds.service.orca.v3.": "balance by `leastconn` or least requests, which need nothing of the server",
}
"""What to do instead of a route or method that left, by the beginning of its path."""


def route_not_found(path: str, otherwise: str) -> RouteNotFound:
    """The error about a path without a route: what to do instead if it left, or `otherwise`."""
    left = (f"{start} left: {instead}" for start, instead in LEFT.items() if path.startswith(start))
    return RouteNotFound(next(left, otherwise))


class ModelNotFound(InvalidRequest, reason="model_not_found", http=404, grpc="NOT_FOUND"):
    """No model or version of that name is served."""


class ServiceNotFound(InvalidRequest, reason="service_not_found", http=404, grpc="NOT_FOUND"):
    """The health service was asked about an unknown service."""


class VersionRefused(InvalidRequest, reason="version_refused", http=400, grpc="FAILED_PRECONDITION"):
    """A requested version must not or cannot be served; the present one continues to serve."""


class Unauthenticated(InvalidRequest, reason="invalid_api_key", http=401, grpc="UNAUTHENTICATED"):
    """The server has API keys and the request has none of them; the reason is OpenAI's word for it."""


class Forbidden(InvalidRequest, reason="forbidden", http=403, grpc="PERMISSION_DENIED"):
    """A feature that the operator has not enabled."""


class WrongHost(InvalidRequest, reason="wrong_host", http=421, grpc="PERMISSION_DENIED"):
    """The header Host has a name that does not belong to this server."""


class Unsupported(InvalidRequest, reason="unsupported", http=501, grpc="UNIMPLEMENTED"):
    """An unsupported part of a protocol."""


class MethodNotAllowed(InvalidRequest, reason="method_not_allowed", http=405, grpc="UNIMPLEMENTED"):
    """The path exists for other methods, which `allowed` lists as the header Allow does."""

    def __init__(self, message: str, *, allowed: str = "") -> None:
        super().__init__(message)
        self.allowed = allowed


class SlowRequest(InvalidRequest, reason="slow_request", http=408, grpc="DEADLINE_EXCEEDED"):
    """Headers or body did not arrive in time."""


class BodyTooLarge(InvalidRequest, reason="body_too_large", http=413, grpc="RESOURCE_EXHAUSTED"):
    """More bytes than `body_limit_bytes`."""


class ClientGone(InvalidRequest, reason="client_gone", http=499, grpc="CANCELLED"):
    """The client disconnected before its answer; nobody sees the status, the metrics count it."""


class UnsupportedMediaType(InvalidRequest, reason="unsupported_media_type", http=415, grpc="UNIMPLEMENTED"):
    """A Content-Type or Content-Encoding that the route does not support."""


class HeadersTooLarge(InvalidRequest, reason="headers_too_large", http=431, grpc="RESOURCE_EXHAUSTED"):
    """More header bytes or lines than the limits."""


class Overloaded(BertserveError, reason="overloaded", http=429, grpc="RESOURCE_EXHAUSTED"):
    """Rejected before any work: the queue is full, or the answer would be late."""


class BulkOverloaded(Overloaded, reason="bulk_overloaded"):
    """The same for bulk work, which has its own queue and rejects no other requests."""


class DeadlineExceeded(BertserveError, reason="deadline_exceeded", http=504, grpc="DEADLINE_EXCEEDED"):
    """The deadline passed before there was an answer."""


class Unavailable(BertserveError, reason="unavailable", http=503, grpc="UNAVAILABLE"):
    """Temporarily unavailable: another replica, or this one a little later, will answer.

    Attributes:
        begun: Whether an engine may have computed some of the request.
    """

    def __init__(self, message: str, *, retry_after_s: float | None = None, begun: bool = False) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.begun = begun


class BuffersFull(Unavailable, reason="buffers_full", grpc="RESOURCE_EXHAUSTED"):
    """All connections together, or this one alone, would exceed their byte budget (`buffer_limit_mb`)."""

    def __init__(self, message: str = "the server's request buffers are full (--buffer-limit-mb); try again") -> None:
        super().__init__(message, retry_after_s=1.0)


class NotReady(Unavailable, reason="not_ready"):
    """Starting, warming up, restarting its engine or draining."""


class EngineLost(Unavailable, reason="engine_lost"):
    """The engine process ended while it held the request."""

    def __init__(self, message: str, *, retry_after_s: float | None = None, begun: bool = True) -> None:
        super().__init__(message, retry_after_s=retry_after_s, begun=begun)


class VersionNotLoaded(Unavailable):
    """A requested version could not be loaded now, for a temporary reason; the present one continues to serve."""


class InternalError(BertserveError):
    """A bug of the server; the log has the details, the client gets a generic sentence."""

    def __init__(self, message: str = "internal error; search the server's log for this request ID") -> None:
        super().__init__(message)


class EngineFault(InternalError, reason="engine_fault"):
    """The engine raised on this input and lives on, or the input crashed two engine processes.

    Attributes:
        news: Whether it is the first report of an input that crashed two.
    """

    def __init__(self, message: str, *, news: bool = False) -> None:
        super().__init__(message)
        self.news = news


class NonFiniteOutput(InternalError, reason="non_finite_output"):
    """The engine returned NaN or infinity; such numbers are never sent."""


def too_late(shortened: str) -> DeadlineExceeded:
    """The error of an admitted request; `shortened` is that of its `Permit`."""
    return DeadlineExceeded(f"the deadline passed before the answer was ready{shortened}")


class Limit(int):
    """The value of a limit, with the `flag` that raises it."""

    flag: str

    def __new__(cls, most: int, flag: str = "") -> Self:
        made = super().__new__(cls, most)
        made.flag = flag
        return made


def setting_of(most: int) -> str:
    """The end of a message about a limit: its setting, if there is one."""
    return f" ({most.flag})" if isinstance(most, Limit) else ""


def empty_input(field: str, index: int, count: int) -> EmptyInput:
    """The error for one of `count` inputs, in the words of text-embeddings-inference."""
    return EmptyInput(f"`{field}` cannot be empty" + (f" (input {index})" if count > 1 else ""), param=field)


def body_too_large(most: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body exceeds {most} bytes{setting_of(most)}")


def too_many_inputs(count: int, most: int) -> InvalidRequest:
    said = f"the request has {quote(count)} inputs; the maximum is {most}{setting_of(most)}"
    return InvalidRequest(said, param="input")


def escape(text: str) -> str:
    """A text as one line of harmless characters: unprintable ones are escaped as in JSON.

    These are line ends and control characters, including those of Unicode, marks that change the writing direction, and
    halves of surrogate pairs.
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else json.dumps(letter)[1:-1] for letter in text)


def quote(received: str | int) -> str:
    """A received name in quotes, or a received number, for a message: escaped, and cut to 64 characters.

    A value that may be somebody's text is not for a message at all.
    """
    if isinstance(received, int):
        text = str(received)
        return text if len(text) <= _MOST_QUOTED else f"{text[:_MOST_QUOTED]}..."
    text = escape(json.dumps(received[: _MOST_QUOTED + 1], ensure_ascii=False)[1:-1])
    return f'"{text}"' if len(text) <= _MOST_QUOTED else f'"{text[:_MOST_QUOTED]}..."'


def all_quoted(names: Sequence[str]) -> str:
    """Received names for a message: the first of them, and the number of the others."""
    others = len(names) - _MOST_NAMES
    shown = [quote(name) for name in names[:_MOST_NAMES]] or ["none"]
    return ", ".join([*shown, *([f"and {others} others"] if others > 0 else [])])


def reasons(root: type[BertserveError] = BertserveError) -> list[str]:
    """The reasons of an error and of its subclasses."""
    kinds = [root]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return sorted({kind.reason for kind in kinds})


class BundleError(Exception):
    """A bundle that must not or cannot be served; the message names it and says why."""


class EngineFailed(Exception):
    """An engine rejected its load, or `crashed` too often. A later start may succeed if it is `passing`."""

    def __init__(self, message: str, *, passing: bool = False, crashed: bool = False) -> None:
        super().__init__(message)
        self.passing = passing or crashed
        self.crashed = crashed


class CredentialsError(ValueError):
    """A file of keys or certificates that cannot be used; the message repeats nothing of its content."""


class StartupError(Exception):
    """The server cannot start; the message is the one line that the operator reads.

    Attributes:
        exit_code: 2 for invalid settings, 1 for an environment that does not fit them.
        as_json: Whether the settings ask for a JSON log, if they are invalid and nothing else knows.
    """

    def __init__(self, message: str, *, exit_code: int = 1, as_json: bool = False) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.as_json = as_json
