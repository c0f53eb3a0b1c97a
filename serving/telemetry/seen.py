"""What is known of one request while it is followed, for its line in the access log and for its trace.

Requests are followed only where one of the two is switched on; else none of this is made or asked for.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from serving.errors import BertserveError
    from serving.records import Outcome, Timings

_SERVER_FAULT = 500


class Seen(msgspec.Struct):
    """One request; times in seconds of the clock `time.perf_counter`, 0 for what did not happen.

    Attributes:
        protocol: How it came.
        method: HTTP's method; `POST` for gRPC.
        route: What was asked for, with the names of a path's parts in place of what a client wrote there; `?` for
            what is none of ours.
        request_id: What it is called in replies and logs.
        began: When it was complete.
        bytes_in: Of its body or message.
        traceparent: W3C's header, as it came.
        tracestate: Likewise.
        decoded: When what it asks was known.
        queued: When its texts were queued.
        computed: When the last of them was computed.
        queue_us: Longest wait of its texts for an engine.
        ended: When its reply was made.
        bytes_out: Of the reply's body.
        status: HTTP's, or the name of gRPC's.
        reason: `ok`, or why it got an error.
        fault: Whether the server is to blame for that.
        model: The model that answered, as all that follows only where there was an answer.
        version: Its version.
        texts: So many were answered.
        tokens: Computed.
        truncated_tokens: Cut off.
        timings: As the client sees them; None where there was no answer.
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
    queue_us: float = 0.0
    ended: float = 0.0
    bytes_out: int = 0
    status: int | str = 0
    reason: str = "ok"
    fault: bool = False
    model: str = ""
    version: str = ""
    texts: int = 0
    tokens: int = 0
    truncated_tokens: int = 0
    timings: Timings | None = None

    def answered(self, outcome: Outcome[Any]) -> None:
        """Notes what an answer is, without holding it."""
        self.model, self.version = outcome.model, outcome.version
        self.texts, self.tokens, self.truncated_tokens = len(outcome.answer), outcome.tokens, outcome.truncated_tokens
        self.timings = outcome.timings

    def failed(self, error: BertserveError) -> None:
        """Notes an error, without holding it: its traceback holds the whole request."""
        self.reason, self.fault = error.reason, error.http_status >= _SERVER_FAULT
        if self.protocol == "grpc":
            self.status = error.grpc_code


CURRENT: ContextVar[Seen | None] = ContextVar("seen", default=None)
"""The request that the running task works for; None where it is not followed."""
