"""Which requests are traced, and what becomes of their spans where nobody takes them."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.records import RequestTrace
from serving.telemetry.otlp import Exporter
from serving.telemetry.tracing import Parent, Sampler, SpanCounts, Traced, parent_of
from tests.support.collector import Collector
from tests.support.server import free_port
from tests.support.waiting import wait_for

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
VALID = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?", re.DOTALL)


def seen(traceparent: str = "", tracestate: str = "") -> RequestTrace:
    """A request that has ended."""
    at = time.perf_counter()
    found = RequestTrace("http", "POST", "/embed", "id", at, ended=at + 1e-3, status=200)
    found.traceparent, found.tracestate = traceparent.encode(), tracestate.encode()
    return found


def kept(request: RequestTrace, share: float = 0.0) -> list[Traced]:
    """What is traced of it."""
    found: list[Traced] = []
    Sampler(share, found.append).record(request)
    return found


@pytest.mark.parametrize(("flags", "sampled"), [("00", False), ("01", True), ("02", False), ("ff", True)])
def test_a_traceparent_is_read(flags: str, sampled: bool) -> None:  # noqa: FBT001  a row of the table
    """The recommendation's own example, with its flags."""
    expected = Parent(bytes.fromhex(TRACE), bytes.fromhex(SPAN), sampled)
    assert parent_of(f"00-{TRACE}-{SPAN}-{flags}".encode()) == expected


@given(
    st.one_of(
        st.binary(max_size=80),
        st.from_regex(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-.{0,9})?", fullmatch=True),
        st.from_regex(rb"0[01]-0{31}[01]-0{15}[01]-0[01]", fullmatch=True),
    )
)
def test_whatever_else_comes_is_no_parent(header: bytes) -> None:
    """Nothing is raised, and what is read is what the recommendation calls valid."""
    valid = VALID.fullmatch(header.decode("latin-1"))
    if valid and not (header.startswith(b"00") and len(header) > 55):
        assert parent_of(header) is not None or b"\n" in header
    else:
        assert parent_of(header) is None


def test_the_client_decides_first() -> None:
    """Its flag counts in both directions, whatever the share is."""
    (traced,) = kept(seen(f"00-{TRACE}-{SPAN}-01", "a=1"), share=0)
    assert (traced.trace_id.hex(), traced.parent_id.hex(), traced.state) == (TRACE, SPAN, "a=1")
    assert not kept(seen(f"00-{TRACE}-{SPAN}-00"), share=1)


def test_the_share_decides_for_the_others() -> None:
    """All or none at its ends."""
    assert not kept(seen(), share=0)
    (traced,) = kept(seen(), share=1)
    assert (len(traced.trace_id), traced.parent_id) == (16, b"")


@pytest.mark.parametrize("state", ["x" * 513, "a=\n", "a=ü"])
def test_a_tracestate_that_cannot_be_handed_on_is_left_out(state: str) -> None:
    """The trace itself goes on."""
    (traced,) = kept(seen(f"00-{TRACE}-{SPAN}-01", state))
    assert traced.state == ""


def test_what_waits_is_bounded() -> None:
    """Without a collector: what finds no room is counted, and whoever brings it does not wait."""
    counts = SpanCounts()
    exporter = Exporter(f"http://127.0.0.1:{free_port()}", "1", counts, most_requests=10)
    (traced,) = kept(seen(f"00-{TRACE}-{SPAN}-01"))
    for _ in range(600):
        exporter.keep(traced)
    assert counts.dropped["queue_full"] >= 6 * (600 - 2 * 256)
    assert len(exporter._queue) <= 10
    exporter.close(0)


def test_what_waits_is_sent_at_the_end() -> None:
    """Also what came just before it."""
    counts = SpanCounts()
    with Collector() as collector:
        exporter = Exporter(collector.endpoint, "1", counts)
        (traced,) = kept(seen(f"00-{TRACE}-{SPAN}-01"))
        for _ in range(600):
            exporter.keep(traced)
        exporter.close(10)
        assert len(collector.spans) == counts.exported == 600
        assert {len(request.resource_spans[0].scope_spans[0].spans) <= 256 for request in collector.requests} == {True}


def test_a_collector_that_closes_its_connections_is_reached_again() -> None:
    """As many do after a while without a message."""
    counts = SpanCounts()
    (traced,) = kept(seen(f"00-{TRACE}-{SPAN}-01"))
    with Collector() as collector:
        exporter = Exporter(collector.endpoint, "1", counts)
        exporter.keep(traced)
        wait_for(lambda: collector.spans, "the first")
        connection = wait_for(lambda: exporter._connection, "the reply to it")
        assert connection is not None
        assert connection.sock is not None
        connection.sock.close()
        exporter.keep(traced)
        wait_for(lambda: len(collector.spans) == 2, "the second")
        exporter.close(10)
    assert counts.dropped == {"queue_full": 0, "export_failed": 0, "rejected": 0}
