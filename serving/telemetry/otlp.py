"""Sends traces to an OpenTelemetry collector: OTLP over HTTP, protobuf, from a thread of its own.

What waits is bounded. A collector that is slow, refuses or is not there costs spans, which are counted; requests
never wait for it. The thread lets go of the interpreter after each request's spans, so that the event loop is not
kept from it for the 5 ms of a thread that computes.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import threading
import time
import uuid
from collections import deque
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service
from opentelemetry.proto.common.v1 import common_pb2 as common
from opentelemetry.proto.resource.v1 import resource_pb2 as resource
from opentelemetry.proto.trace.v1 import trace_pb2 as pb

from serving.telemetry.tracing import root, stages

if TYPE_CHECKING:
    from collections.abc import Mapping

    from serving.telemetry.tracing import Attribute, Span, SpanCounts, Traced

log = logging.getLogger("bertserve.traces")

MOST_REQUESTS = 2048
"""Traced requests that wait to be sent."""

_BATCH = 256
"""Of them in one message."""

_INTERVAL_S = 0.25
_TIMEOUT_S = 5.0
_PAUSES_S = (0.25, 1.0, 5.0)
"""Before each further attempt."""

_SPANS = 6
"""Of a request that was answered; counted for requests that find no room."""

_OK = 200
_TRY_AGAIN = frozenset({429, 502, 503, 504})
_PATH = "/v1/traces"
_SPAN_ID_BYTES = 8
_SERVER_FAULT = 500


class Exporter:
    """Queues traced requests and sends their spans."""

    def __init__(self, endpoint: str, version: str, counts: SpanCounts, most_requests: int = MOST_REQUESTS) -> None:
        """Starts the thread.

        Args:
            endpoint: Of the collector, `http://host:4318`; `/v1/traces` is added.
            version: Of this server.
            counts: What has become of spans; counted on.
            most_requests: Traced requests that wait; further ones are dropped.
        """
        self._counts = counts
        self._url = urlsplit(endpoint)
        self._resource = resource.Resource(
            attributes=_attributes(
                {
                    "service.name": "bertserve",
                    "service.version": version,
                    "service.instance.id": str(uuid.uuid4()),
                }
            )
        )
        self._scope = common.InstrumentationScope(name="bertserve", version=version)
        self._most_requests = most_requests
        self._queue: deque[Traced] = deque()
        self._wanted = threading.Event()
        self._stopping = threading.Event()
        self._connection: http.client.HTTPConnection | None = None
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def keep(self, traced: Traced) -> None:
        """Queues a request, unless too many wait."""
        if len(self._queue) >= self._most_requests:
            self._counts.dropped["queue_full"] += _SPANS
            return
        self._queue.append(traced)
        if len(self._queue) == _BATCH:
            self._wanted.set()

    def close(self, limit_s: float) -> None:
        """Sends what is queued, once and within the limit, and ends the thread."""
        self._stopping.set()
        self._wanted.set()
        self._thread.join(limit_s)

    def _run(self) -> None:
        while not (self._stopping.is_set() and not self._queue):
            self._wanted.wait(_INTERVAL_S)
            self._wanted.clear()
            while self._queue:
                message, spans = self._message()
                self._send(message, spans)
        if self._connection is not None:
            self._connection.close()

    def _message(self) -> tuple[bytes, int]:
        """The spans of a batch of requests, and how many they are."""
        offset_ns = time.time_ns() - time.perf_counter_ns()
        spans: list[pb.Span] = []
        with contextlib.suppress(IndexError):  # there are no more
            for _ in range(_BATCH):
                spans += _spans(self._queue.popleft(), offset_ns)
                time.sleep(0)
        scope = pb.ScopeSpans(scope=self._scope, spans=spans)
        whole = service.ExportTraceServiceRequest(
            resource_spans=[pb.ResourceSpans(resource=self._resource, scope_spans=[scope])]
        )
        return whole.SerializeToString(), len(spans)

    def _send(self, message: bytes, spans: int) -> None:
        for pause_s in (*_PAUSES_S, None):
            why, again = self._post(message, spans)
            if not why:
                return
            if not again or pause_s is None or self._stopping.wait(pause_s):
                break
        self._counts.dropped["export_failed"] += spans
        log.warning("traces could not be sent: %s", why)

    def _post(self, message: bytes, spans: int) -> tuple[str, bool]:
        """Sends a message; what went wrong, if anything did, and whether it is worth another attempt."""
        connection = self._connection or self._connect()
        try:
            path = self._url.path.rstrip("/") + _PATH
            connection.request("POST", path, message, {"Content-Type": "application/x-protobuf"})
            reply = connection.getresponse()
            content = reply.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            self._connection = None
            return f"{type(error).__name__}", True
        self._connection = connection
        if reply.status != _OK:
            return f"the collector answered {reply.status}", reply.status in _TRY_AGAIN
        rejected = _rejected(content)
        self._counts.dropped["rejected"] += rejected
        self._counts.exported += spans - rejected
        return "", False

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        return kind(self._url.hostname or "", self._url.port, timeout=_TIMEOUT_S)


def _rejected(content: bytes) -> int:
    """How many spans a collector refused of those that it was sent."""
    try:
        return service.ExportTraceServiceResponse.FromString(content).partial_success.rejected_spans
    except DecodeError:
        return 0


def _spans(traced: Traced, offset_ns: int) -> list[pb.Span]:
    """A request as its messages; the first is the whole of it, and parent of the others."""
    trace = traced.trace
    whole = _span(traced, root(trace), traced.parent_id, offset_ns)
    whole.kind = pb.Span.SPAN_KIND_SERVER
    if trace.error_status >= _SERVER_FAULT:
        whole.status.code = pb.Status.STATUS_CODE_ERROR
        whole.status.message = trace.reason
    return [whole, *[_span(traced, stage, whole.span_id, offset_ns) for stage in stages(trace)]]


def _span(traced: Traced, span: Span, parent_id: bytes, offset_ns: int) -> pb.Span:
    return pb.Span(
        trace_id=traced.trace_id,
        span_id=os.urandom(_SPAN_ID_BYTES),
        trace_state=traced.state,
        parent_span_id=parent_id,
        name=span.name,
        kind=pb.Span.SPAN_KIND_INTERNAL,
        start_time_unix_nano=round(span.begin * 1e9) + offset_ns,
        end_time_unix_nano=round(max(span.begin, span.end) * 1e9) + offset_ns,
        attributes=_attributes(span.attributes),
    )


def _attributes(known: Mapping[str, Attribute]) -> list[common.KeyValue]:
    return [common.KeyValue(key=name, value=_value(value)) for name, value in known.items()]


def _value(value: Attribute) -> common.AnyValue:
    if isinstance(value, str):
        return common.AnyValue(string_value=value)
    return common.AnyValue(int_value=value) if isinstance(value, int) else common.AnyValue(double_value=value)
