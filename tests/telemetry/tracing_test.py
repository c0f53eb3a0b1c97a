"""Which requests are traced, and what becomes of their spans where nobody takes them."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from bertserve.serving.inference.requests import RequestTrace
from bertserve.serving.telemetry.requests import SpanCounts
from bertserve.serving.telemetry.tracing import SpanSender, make_spans
from tests.support.collector import Collector
from tests.support.server import free_port
from tests.support.waiting import wait_for

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def ended(traceparent: bytes = b"", tracestate: str = "") -> RequestTrace:
    at = time.perf_counter()
    trace = RequestTrace("http", "POST", "/embed", "id", at, ended=at + 1e-3, status=200)
    trace.traceparent, trace.tracestate = traceparent, tracestate.encode()
    return trace


def wanted(flags: str = "01") -> bytes:
    return f"00-{TRACE}-{SPAN}-{flags}".encode()


def spans(request: RequestTrace, share: float = 0.0) -> tuple[ReadableSpan, ...]:
    memory = InMemorySpanExporter()
    provider = TracerProvider(ParentBased(TraceIdRatioBased(share)), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    make_spans(provider.get_tracer("test"), request)
    return memory.get_finished_spans()


@pytest.mark.parametrize(("flags", "sampled"), [("00", False), ("01", True), ("02", False), ("ff", True)])
def test_the_client_decides_first(flags: str, sampled: bool) -> None:  # noqa: FBT001  a row of the table
    """Its flag counts in both directions, whatever the share is, and its trace goes on."""
    for share in (0.0, 1.0):
        made = spans(ended(wanted(flags)), share)
        assert len(made) == sampled
        for span in made:
            assert span.context is not None
            assert span.parent is not None
            assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, SPAN)


@given(
    st.one_of(
        st.binary(max_size=80),
        st.from_regex(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-.{0,9})?", fullmatch=True),
        st.from_regex(rb"0[01]-0{31}[01]-0{15}[01]-0[01]", fullmatch=True),
    )
)
def test_whatever_else_comes_ends_nothing(header: bytes) -> None:
    """What is no `traceparent` is as good as none: the share decides."""
    assert len(spans(ended(header), share=1)) <= 1
    if not header.strip().startswith(b"0"):
        assert len(spans(ended(header), share=0)) <= (len(header) >= 55)


@pytest.mark.parametrize(("state", "kept"), [("a=1,b=2", "a=1,b=2"), ("a=\n", ""), ("a=ü", "")])
def test_a_tracestate_is_handed_on_if_it_can_be(state: str, kept: str) -> None:
    (span,) = spans(ended(wanted(), state))
    assert span.context is not None
    assert span.context.trace_state.to_header() == kept


def test_what_waits_is_bounded() -> None:
    """Without a collector: what finds no room is counted, and whoever brings it does not wait."""
    counts = SpanCounts()
    sender = SpanSender(f"http://127.0.0.1:{free_port()}", "1", 0.0, counts, most_spans=10)
    for _ in range(600):
        sender.record(ended(wanted()))
    assert counts.dropped["queue_full"] >= 600 - 3 * 10
    assert counts.waiting <= 10
    started = time.monotonic()
    sender.close(0.1)
    assert time.monotonic() - started < 30


def test_what_waits_is_sent_at_the_end() -> None:
    counts = SpanCounts()
    with Collector() as collector:
        sender = SpanSender(collector.endpoint, "1", 0.0, counts)
        for _ in range(600):
            sender.record(ended(wanted()))
        sender.close(10)
        assert len(collector.spans) == 600
        assert {len(request.resource_spans[0].scope_spans[0].spans) <= 256 for request in collector.requests} == {True}


def test_a_collector_that_closes_its_connections_is_reached_again() -> None:
    """As many do after a while without a message."""
    counts = SpanCounts()
    with Collector() as collector:
        sender = SpanSender(collector.endpoint, "1", 0.0, counts)
        sender.record(ended(wanted()))
        wait_for(lambda: counts.taken == 1, "the first")
        sender._exporter._client._transport._session.close()
        sender.record(ended(wanted()))
        wait_for(lambda: counts.taken == 2, "the second")
        sender.close(10)
        assert len(collector.spans) == 2
    assert counts.dropped == {"queue_full": 0, "export_failed": 0, "rejected": 0}
