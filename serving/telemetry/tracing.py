"""Traces: which requests get one, and what their spans are (W3C Trace Context, OpenTelemetry's conventions).

A request is traced where its client says so in `traceparent`; where the client says nothing, with a probability.
What a trace needs is known when the request has ended, so nothing is done before that.
"""

from __future__ import annotations

import os
import random
import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from serving.records import RequestTrace

_TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_INVALID_VERSION = b"ff"
_FIRST_VERSION = b"00"
_SAMPLED = 1
_TRACE_ID_BYTES = 16
_TRACESTATE_BYTES = 512

Attribute = str | int | float


class Parent(NamedTuple):
    """What `traceparent` says.

    Attributes:
        trace_id: 16 bytes, not all zero.
        span_id: 8 bytes, not all zero.
        sampled: Whether the client wants the trace to be kept.
    """

    trace_id: bytes
    span_id: bytes
    sampled: bool


class Span(NamedTuple):
    """A part of a request's way.

    Attributes:
        name: What was done.
        begin: In seconds of the clock `time.perf_counter`.
        end: Likewise.
        attributes: What is known of it.
    """

    name: str
    begin: float
    end: float
    attributes: dict[str, Attribute]


class Traced(NamedTuple):
    """A request whose trace is kept.

    Attributes:
        trace: The request.
        trace_id: 16 bytes.
        parent_id: The client's span; empty where it has none.
        state: `tracestate`, handed on.
    """

    trace: RequestTrace
    trace_id: bytes
    parent_id: bytes
    state: str


class SpanCounts:
    """What has become of spans.

    Attributes:
        exported: Those that the collector has taken.
        dropped: Those that it has not, by why: `queue_full`, `export_failed`, or `rejected` by it.
    """

    def __init__(self) -> None:
        self.exported = 0
        self.dropped = {"queue_full": 0, "export_failed": 0, "rejected": 0}


def parent_of(header: bytes | None) -> Parent | None:
    """What a `traceparent` says; None where there is none or it is not valid.

    A version that is not known yet may have more parts behind those of the first one.
    """
    found = _TRACEPARENT.fullmatch(header) if header else None
    if found is None or found[1] == _INVALID_VERSION or (found[1] == _FIRST_VERSION and found[5]):
        return None
    trace_id, span_id = bytes.fromhex(found[2].decode()), bytes.fromhex(found[3].decode())
    if not any(trace_id) or not any(span_id):
        return None
    return Parent(trace_id, span_id, bool(int(found[4], 16) & _SAMPLED))


class Sampler:
    """Decides which requests are traced: as the client has decided, else by chance."""

    def __init__(self, share: float, keep: Callable[[Traced], None]) -> None:
        """Names who gets them.

        Args:
            share: Of the requests whose clients say nothing, between 0 and 1.
            keep: Takes what is traced.
        """
        self._share = share
        self._keep = keep

    def record(self, trace: RequestTrace) -> None:
        """Hands on a request that has ended, if it is traced."""
        parent = parent_of(trace.traceparent)
        if parent is None:
            if random.random() < self._share:  # noqa: S311  chance, not a secret
                self._keep(Traced(trace, os.urandom(_TRACE_ID_BYTES), b"", ""))
        elif parent.sampled:
            state = (trace.tracestate or b"").decode("latin-1")
            kept = state if len(state) <= _TRACESTATE_BYTES and state.isprintable() and state.isascii() else ""
            self._keep(Traced(trace, parent.trace_id, parent.span_id, kept))


def root(trace: RequestTrace) -> Span:
    """The request as a whole."""
    attributes: dict[str, Attribute] = {"bertserve.request_id": trace.request_id}
    if trace.protocol == "http":
        name = f"{trace.method} {trace.route}"
        attributes |= {
            "http.request.method": trace.method,
            "http.route": trace.route,
            "http.response.status_code": trace.status,
        }
    else:
        name = trace.route.removeprefix("/")
        service, _, method = name.rpartition("/")
        attributes |= {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method}
        attributes["rpc.response.status_code"] = trace.status
    if trace.reason != "ok":
        attributes["error.type"] = trace.reason
    if trace.timings is not None:
        attributes |= {
            "bertserve.model": trace.model,
            "bertserve.version": trace.version,
            "bertserve.texts": trace.texts,
            "bertserve.tokens": trace.tokens,
            "bertserve.truncated_tokens": trace.truncated_tokens,
        }
    return Span(name, trace.began, trace.ended, attributes)


def stages(trace: RequestTrace) -> Iterator[Span]:
    """A span for each stage that the request has gone through, in their order, none before the last one's end."""
    if trace.decoded:
        yield Span("receive", trace.began, trace.decoded, {})
    if (times := trace.timings) is None:
        return
    started = trace.queued + times.queue_us / 1e6
    yield Span("tokenize", max(trace.decoded, trace.queued - times.tokenize_us / 1e6), trace.queued, {})
    yield Span("queue", trace.queued, started, {})
    yield Span("engine", started, trace.computed, {"bertserve.compute_ms": round(times.compute_us / 1e3, 3)})
    yield Span("encode", trace.computed, trace.ended, {})
