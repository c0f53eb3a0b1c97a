"""Spans of requests by OpenTelemetry's SDK, made after the reply from the times of its `RequestTrace`.

A request is traced if its `traceparent` says so; without one, with a probability. Spans wait in a bounded queue for a
thread that sends them to a collector (OTLP over HTTP). If the collector is slow or fails, spans are lost and counted;
requests never wait for it.

This module needs the libraries of the extra `tracing`, and is imported only if a collector is set.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from typing import TYPE_CHECKING

import requests
from google.protobuf.message import DecodeError
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import Tracer

    from bertserve.serving.inference.requests import RequestTrace
    from bertserve.serving.telemetry.requests import SpanCounts

log = logging.getLogger("bertserve.traces")

MAX_SPANS = 12_288
"""Maximum spans that wait to be sent: those of 2048 answered requests."""

_BATCH = 126
"""Spans in one message; encoding them blocks the event loop for a few milliseconds."""

_INTERVAL_MS = 250.0
_TIMEOUT_S = 10.0
"""Limit for a message, including retries."""

_PATH = "/v1/traces"
_SERVER_FAULT = 500

_propagator = TraceContextTextMapPropagator()

Attribute = str | int | float


class SpanSender:
    def __init__(
        self, endpoint: str, version: str, share: float, counts: SpanCounts, most_spans: int = MAX_SPANS
    ) -> None:
        """Starts the thread.

        `endpoint` is the collector's, as `http://host:4318`; `share` the sampled part of requests without
        `traceparent`, 0 to 1. Spans beyond `most_spans` that wait are dropped.
        """
        # The SDK reports each failed attempt; the exporter below reports the result once.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._exporter = _Exporter(endpoint.rstrip("/") + _PATH, counts)
        self._processor = _Processor(self._exporter, counts, most_spans)
        resource = {
            "service.name": "bertserve",
            "service.version": version,
            "service.instance.id": str(uuid.uuid4()),
        }
        provider = TracerProvider(ParentBased(TraceIdRatioBased(share)), Resource(resource), shutdown_on_exit=False)
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("bertserve", version)

    def record(self, trace: RequestTrace) -> None:
        make_spans(self._tracer, trace)

    def close(self, limit_s: float) -> None:
        """Sends waiting spans, within the limit, and ends the thread."""
        closing = threading.Thread(target=self._processor.shutdown, daemon=True)
        closing.start()
        closing.join(limit_s)
        self._exporter.shutdown()


class _Processor(BatchSpanProcessor):
    """The SDK's queue and thread. A span that finds no room is dropped and counted; waiting ones are kept."""

    def __init__(self, exporter: _Exporter, counts: SpanCounts, most_spans: int) -> None:
        super().__init__(exporter, most_spans, _INTERVAL_MS, min(_BATCH, most_spans))
        self._counts = counts
        self._most_spans = most_spans

    def on_end(self, span: ReadableSpan) -> None:
        if self._counts.waiting >= self._most_spans:
            self._counts.dropped["queue_full"] += 1
        else:
            self._counts.made += 1
            super().on_end(span)


class _Exporter(OTLPSpanExporter):
    """The SDK's exporter, which also counts the results."""

    def __init__(self, url: str, counts: SpanCounts) -> None:
        session = requests.Session()
        session.trust_env = False
        session.hooks["response"].append(lambda reply, **_: self._replies.append(reply))
        super().__init__(url, timeout=_TIMEOUT_S, session=session)
        self._counts = counts
        self._replies: list[requests.Response] = []
        self._closed = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        counts = self._counts
        self._replies.clear()
        result = super().export(spans)
        reply = self._replies[-1] if self._replies else None
        if result is SpanExportResult.SUCCESS:
            counts.dropped["rejected"] += _rejected(reply)
        else:
            counts.dropped["export_failed"] += len(spans)
            why = "cannot reach the collector" if reply is None else f"the collector answered {reply.status_code}"
            log.warning("cannot send traces: %s", why)
        counts.taken += len(spans)
        return result

    def shutdown(self) -> None:
        if not self._closed:
            self._closed = True
            super().shutdown()  # type: ignore[no-untyped-call]


def _rejected(reply: requests.Response | None) -> int:
    """Number of spans that a collector rejected."""
    try:
        return (
            0 if reply is None else ExportTraceServiceResponse.FromString(reply.content).partial_success.rejected_spans
        )
    except DecodeError:
        return 0


def make_spans(tracer: Tracer, trace: RequestTrace) -> None:
    """The span of a request with a child for each stage, as the tracer samples it."""
    offset_ns = time.time_ns() - time.perf_counter_ns()

    def ns(at: float) -> int:
        return round(at * 1e9) + offset_ns

    headers = {"traceparent": trace.traceparent, "tracestate": trace.tracestate}
    carrier = {name: value.decode("latin-1") for name, value in headers.items() if value}
    name, attributes = _describe(trace)
    root = tracer.start_span(
        name, _propagator.extract(carrier), SpanKind.SERVER, attributes, start_time=ns(trace.began)
    )
    if not root.is_recording():
        return
    if trace.error_status >= _SERVER_FAULT:
        root.set_status(Status(StatusCode.ERROR, trace.reason))
    root.end(ns(trace.ended))
    inside = set_span_in_context(root)
    for stage, begin, end, about in _stages(trace):
        tracer.start_span(stage, inside, SpanKind.INTERNAL, about, start_time=ns(begin)).end(ns(max(begin, end)))


def _describe(trace: RequestTrace) -> tuple[str, dict[str, Attribute]]:
    """The name and attributes of a request's span, by OpenTelemetry's conventions."""
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
    return name, attributes


def _stages(trace: RequestTrace) -> Iterator[tuple[str, float, float, dict[str, Attribute]]]:
    """Name, begin, end and attributes of each stage, in order and without overlap."""
    if trace.decoded:
        yield "receive", trace.began, trace.decoded, {}
    if (times := trace.timings) is None:
        return
    started = trace.queued + times.queue_us / 1e6
    yield "tokenize", max(trace.decoded, trace.queued - times.tokenize_us / 1e6), trace.queued, {}
    yield "queue", trace.queued, started, {}
    yield "engine", started, trace.computed, {"bertserve.compute_ms": round(times.compute_us / 1e3, 3)}
    yield "encode", trace.computed, trace.ended, {}
