"""An OpenTelemetry collector of the test's own: OTLP over HTTP, with the messages of `opentelemetry-proto`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from tests.support.external_servers import http_server
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Sequence
    from email.message import Message

    from opentelemetry.proto.trace.v1.trace_pb2 import Span


def attributes(holder: Any) -> dict[str, Any]:
    return {entry.key: getattr(entry.value, entry.value.WhichOneof("value")) for entry in holder.attributes}


class Collector:
    """Listens on a free port of this machine; use it in a `with` block.

    Attributes:
        endpoint: What `--otlp-endpoint` is told.
        requests: Every message so far.
        statuses: What the next messages are answered instead of being taken.
        rejects: Spans of each message that it says it has not taken.
    """

    def __init__(self, statuses: Sequence[int] = (), rejects: int = 0) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self.statuses = list(statuses)
        self.rejects = rejects
        self._http = http_server(self._answer)

    def __enter__(self) -> Self:
        self.endpoint = self._http.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._http.__exit__(*error)

    def _answer(self, path: str, headers: Message, body: bytes) -> tuple[int, dict[str, str], bytes]:
        if self.statuses:
            return self.statuses.pop(0), {}, b""
        assert path == "/v1/traces", path
        assert headers["Content-Type"] == "application/x-protobuf"
        self.requests.append(ExportTraceServiceRequest.FromString(body))
        response = ExportTraceServiceResponse()
        response.partial_success.rejected_spans = self.rejects
        return 200, {}, response.SerializeToString()

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for request in list(self.requests)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def trace(self, trace_id: str) -> list[Span]:
        identity = bytes.fromhex(trace_id)
        return wait_for(lambda: [span for span in self.spans if span.trace_id == identity], f"the trace {trace_id}", 30)
