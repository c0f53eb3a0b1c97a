"""An OpenTelemetry collector of the test's own: the service of `opentelemetry-proto`, behind OTLP's HTTP endpoint."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceServicer

from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opentelemetry.proto.trace.v1.trace_pb2 import Span


def attributes(holder: Any) -> dict[str, Any]:
    return {entry.key: getattr(entry.value, entry.value.WhichOneof("value")) for entry in holder.attributes}


class Collector(TraceServiceServicer):
    """Listens on a free port of this machine; use it in a `with` block.

    Attributes:
        endpoint: What `--otlp-endpoint` is told.
        requests: Every message so far.
        statuses: What the next messages are answered instead of being taken.
        rejects: Spans of each message that it says it has not taken.
    """

    def __init__(self, statuses: Sequence[int] = (), rejects: int = 0) -> None:
        """Opens the port.

        Args:
            statuses: See the attribute.
            rejects: See the attribute.
        """
        self.requests: list[ExportTraceServiceRequest] = []
        self.statuses = list(statuses)
        self.rejects = rejects
        collector = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if collector.statuses:
                    self._reply(collector.statuses.pop(0), b"")
                    return
                assert self.path == "/v1/traces", self.path
                assert self.headers["Content-Type"] == "application/x-protobuf"
                answer = collector.Export(ExportTraceServiceRequest.FromString(body), None)
                self._reply(200, answer.SerializeToString())

            def _reply(self, status: int, content: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                """Says nothing."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,))
        self.endpoint = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def Export(  # noqa: N802  the service's name
        self, request: ExportTraceServiceRequest, context: object
    ) -> ExportTraceServiceResponse:
        del context
        self.requests.append(request)
        response = ExportTraceServiceResponse()
        response.partial_success.rejected_spans = self.rejects
        return response

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
        """The spans of a trace, once its root is there."""
        identity = bytes.fromhex(trace_id)
        return wait_for(lambda: [span for span in self.spans if span.trace_id == identity], f"the trace {trace_id}", 30)
