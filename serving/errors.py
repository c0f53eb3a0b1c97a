"""The error tree and its table: every failure a client can see, with its status on each wire.

    BertserveError
    ├── InvalidRequest ── MalformedRequest, EmptyInput, WrongTask, ModelNotNamed, RouteNotFound, MethodNotAllowed,
    │                     UnsupportedMediaType, BodyTooLarge, HeadersTooLarge, SlowRequest, ModelNotFound,
    │                     ServiceNotFound, VersionRefused, Unauthenticated, Forbidden, Unsupported, ClientGone
    ├── Overloaded
    ├── DeadlineExceeded
    ├── Unavailable ── NotReady, EngineLost, VersionNotLoaded
    └── InternalError ── EngineFault, NonFiniteOutput

A class carries its `reason`, HTTP status, gRPC code and whether trying again can help. A message is made
from a template that names the field, the limit and the size received; it never repeats received text.
The mapping follows google.rpc.Code where that has a counterpart.
"""

from __future__ import annotations

import math
from typing import ClassVar


class BertserveError(Exception):
    """A failure with an answer: the message goes to the client as it stands."""

    reason: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    grpc_code: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, retry_after_s: float | None = None, jitter: float = 0.0) -> None:
        """Makes the failure.

        Args:
            message: For the client.
            retry_after_s: When trying again is worth it; None where nobody knows.
            jitter: Between 0 and 1, how much later within the same time again this client should come, so that
                those who were refused together do not come back together.
        """
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s
        self._jitter = jitter

    @property
    def retry_after_ms(self) -> int | None:
        """`retry_after_s` with its jitter, in milliseconds."""
        return None if self.retry_after_s is None else math.ceil(self.retry_after_s * (1 + self._jitter) * 1e3)


class InvalidRequest(BertserveError):
    """The request was understood and breaks the schema or a limit."""

    reason = "invalid_request"
    http_status = 422
    grpc_code = "INVALID_ARGUMENT"


class MalformedRequest(InvalidRequest):
    """The bytes could not be parsed."""

    reason = "malformed_request"
    http_status = 400


class EmptyInput(InvalidRequest):
    """A list of inputs without an element."""

    reason = "empty_input"


class WrongTask(InvalidRequest):
    """The model exists and does something else."""

    reason = "wrong_task"
    http_status = 400


class ModelNotNamed(InvalidRequest):
    """Several models could answer, none of them is the default, and the request names none."""

    reason = "model_not_named"
    http_status = 400


class RouteNotFound(InvalidRequest):
    """No such path."""

    reason = "not_found"
    http_status = 404
    grpc_code = "UNIMPLEMENTED"


class ModelNotFound(InvalidRequest):
    """No model or version of that name is served."""

    reason = "model_not_found"
    http_status = 404
    grpc_code = "NOT_FOUND"


class ServiceNotFound(InvalidRequest):
    """The health service was asked about a service that is not offered."""

    reason = "service_not_found"
    http_status = 404
    grpc_code = "NOT_FOUND"


class VersionRefused(InvalidRequest):
    """A version was asked for that must not or cannot be served; what is there serves on."""

    reason = "version_refused"
    http_status = 400
    grpc_code = "FAILED_PRECONDITION"


class Unauthenticated(InvalidRequest):
    """The server has API keys and the request brings none of them; the reason is the word that OpenAI has for it."""

    reason = "invalid_api_key"
    http_status = 401
    grpc_code = "UNAUTHENTICATED"


class Forbidden(InvalidRequest):
    """What the operator has not switched on."""

    reason = "forbidden"
    http_status = 403
    grpc_code = "PERMISSION_DENIED"


class Unsupported(InvalidRequest):
    """A part of a protocol that this server leaves out."""

    reason = "unsupported"
    http_status = 501
    grpc_code = "UNIMPLEMENTED"


class MethodNotAllowed(InvalidRequest):
    """The path exists for other methods, which `allowed` names as the header Allow does."""

    reason = "method_not_allowed"
    http_status = 405
    grpc_code = "UNIMPLEMENTED"

    def __init__(self, message: str, *, allowed: str = "") -> None:
        super().__init__(message)
        self.allowed = allowed


class SlowRequest(InvalidRequest):
    """Headers or body did not arrive in time."""

    reason = "slow_request"
    http_status = 408
    grpc_code = "DEADLINE_EXCEEDED"


class BodyTooLarge(InvalidRequest):
    """More bytes than `body_limit_bytes`."""

    reason = "body_too_large"
    http_status = 413
    grpc_code = "RESOURCE_EXHAUSTED"


class ClientGone(InvalidRequest):
    """The client left before its answer; nobody sees the status, the metrics count it."""

    reason = "client_gone"
    http_status = 499
    grpc_code = "CANCELLED"


class UnsupportedMediaType(InvalidRequest):
    """A Content-Type or Content-Encoding that the route does not read."""

    reason = "unsupported_media_type"
    http_status = 415
    grpc_code = "UNIMPLEMENTED"


class HeadersTooLarge(InvalidRequest):
    """More header bytes or lines than the limits."""

    reason = "headers_too_large"
    http_status = 431
    grpc_code = "RESOURCE_EXHAUSTED"


class Overloaded(BertserveError):
    """Refused before any work: the queue holds as much as it may."""

    reason = "overloaded"
    http_status = 429
    grpc_code = "RESOURCE_EXHAUSTED"
    retryable = True


class DeadlineExceeded(BertserveError):
    """The deadline passed before an answer was there."""

    reason = "deadline_exceeded"
    http_status = 504
    grpc_code = "DEADLINE_EXCEEDED"
    retryable = True


class Unavailable(BertserveError):
    """Not now: another replica, or this one a little later, will answer."""

    reason = "unavailable"
    http_status = 503
    grpc_code = "UNAVAILABLE"
    retryable = True


class NotReady(Unavailable):
    """Starting, warming up, restarting its engine or draining."""

    reason = "not_ready"


class EngineLost(Unavailable):
    """The engine process ended while it held the request."""

    reason = "engine_lost"


class VersionNotLoaded(Unavailable):
    """A version was asked for and could not be loaded now, for a reason that passes; what is there serves on."""


class InternalError(BertserveError):
    """Our bug; the log has the details, the client gets a bare sentence."""

    reason = "internal"


class EngineFault(InternalError):
    """The engine raised on this input and lives on."""

    reason = "engine_fault"


class NonFiniteOutput(InternalError):
    """The engine answered NaN or infinity; such numbers are never sent."""

    reason = "non_finite_output"


class BundleError(Exception):
    """A bundle that must not or cannot be served; the message names it and says why."""


class EngineFailed(Exception):
    """An engine refused what it was to load; starting it again would not help.

    Attributes:
        passing: Whether it would another time: what it lacked was memory.
    """

    def __init__(self, message: str, *, passing: bool = False) -> None:
        super().__init__(message)
        self.passing = passing


class StartupError(Exception):
    """The server cannot start; the message is the one line that the operator reads.

    Attributes:
        exit_code: 2 for settings that are wrong, 1 for a world that does not fit them.
    """

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def reasons() -> list[str]:
    """The reason of every class of the tree, in alphabetical order."""
    kinds: list[type[BertserveError]] = [BertserveError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return sorted({kind.reason for kind in kinds})
