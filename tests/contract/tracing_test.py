"""Traces as an OpenTelemetry collector gets them, from requests over both wires."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import grpc
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.support.clients import Grpc, RawConnection, Tei, metric, post_json
from tests.support.collector import Collector, attributes
from tests.support.fronts import listed
from tests.support.server import FAKE, Server, free_port
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STAGES = ["receive", "tokenize", "queue", "engine", "encode"]
PRIVATE = "xylophone"
BODY = json.dumps({"inputs": ["a text", PRIVATE]}).encode()


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest.fixture(scope="module")
def server(models: Path, collector: Collector) -> Iterator[Server]:
    """A server that traces whom its clients want to be traced."""
    fault = json.loads((models / "minilm" / "1" / "tokenizer.json").read_bytes())["model"]["vocab"]["volcano"]
    options = ("--otlp-endpoint", collector.endpoint, "--trace-sample", "0", "--fake-faults", f"{fault}:raise")
    with Server(models, *FAKE, *options) as running:
        yield running


def parent(*, sampled: bool = True) -> tuple[str, str, str]:
    """A `traceparent`, its trace and its span."""
    trace_id, span_id = os.urandom(16).hex(), os.urandom(8).hex()
    return f"00-{trace_id}-{span_id}-0{int(sampled)}", trace_id, span_id


def check_stages(spans: list[Span], span_id: str) -> Span:
    """The root of a trace, whose stages lie in it one after another."""
    root, *stages = spans
    assert root.parent_span_id.hex() == span_id
    assert root.kind == Span.SPAN_KIND_SERVER
    assert [stage.name for stage in stages] == STAGES
    assert {stage.parent_span_id for stage in stages} == {root.span_id}
    assert len({span.span_id for span in spans}) == len(spans)
    at = root.start_time_unix_nano
    for stage in stages:
        assert at <= stage.start_time_unix_nano <= stage.end_time_unix_nano <= root.end_time_unix_nano, stage.name
        at = stage.end_time_unix_nano
    return root


def duration_ms(span: Span) -> float:
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e6


def test_a_request_over_http(server: Server, collector: Collector) -> None:
    """The client's trace goes on, with a span for each stage that is as long as the client is told."""
    header, trace_id, span_id = parent()
    headers = {"traceparent": header, "tracestate": "vendor=1,other=2", "X-Request-Id": "traced-1"}
    reply = post_json(server.http, "/embed", BODY, headers)
    spans = collector.trace(trace_id)
    root = check_stages(spans, span_id)
    assert root.name == "POST /embed"
    assert root.trace_state == "vendor=1,other=2"
    assert root.status.code == Status.STATUS_CODE_UNSET
    assert attributes(root) == {
        "http.request.method": "POST",
        "http.route": "/embed",
        "http.response.status_code": 200,
        "bertserve.request_id": "traced-1",
        "bertserve.model": "minilm",
        "bertserve.version": "1",
        "bertserve.texts": 2,
        "bertserve.tokens": int(reply.headers["x-compute-tokens"]),
        "bertserve.truncated_tokens": 0,
    }
    told = dict(part.split(";dur=") for part in reply.headers["server-timing"].split(", "))
    by_name = {span.name: span for span in spans}
    for stage in ("tokenize", "queue"):
        assert duration_ms(by_name[stage]) == pytest.approx(float(told[stage]), abs=2e-3)
    assert duration_ms(by_name["engine"]) >= attributes(by_name["engine"])["bertserve.compute_ms"]
    assert duration_ms(root) >= float(told["total"]) - 1e-3


def test_a_state_on_several_lines_is_one(server: Server, collector: Collector) -> None:
    """W3C's Trace Context, 3.3: they are joined in their order, over both wires; two parents are none."""
    header, trace_id, _ = parent()
    head = f"POST /embed HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: {len(BODY)}\r\n"
    lines = f"traceparent: {header}\r\ntracestate: a=1\r\nAccept: */*\r\nTraceState: b=2\r\nConnection: close\r\n\r\n"
    with RawConnection(server.http) as connection:
        connection.send((head + lines).encode() + BODY)
        assert connection.status() == 200
    assert collector.trace(trace_id)[0].trace_state.replace(" ", "") == "a=1,b=2"
    header, trace_id, _ = parent()
    with Grpc(server) as client:
        states = [("traceparent", header), ("tracestate", "a=1"), ("tracestate", "b=2")]
        client.infer(client.request(["a text"]), metadata=states)
    assert collector.trace(trace_id)[0].trace_state.replace(" ", "") == "a=1,b=2"


def test_a_call_over_grpc(server: Server, collector: Collector) -> None:
    """The context comes in the metadata, its list perhaps in several fields."""
    header, trace_id, span_id = parent()
    states = [("tracestate", "vendor=1"), ("tracestate", "other=2")]
    with Grpc(server) as client:
        client.infer(client.request(["a text"]), metadata=[("traceparent", header), *states])
    root = check_stages(collector.trace(trace_id), span_id)
    assert root.name == "inference.GRPCInferenceService/ModelInfer"
    assert root.trace_state == "vendor=1,other=2"
    found = attributes(root)
    assert (found["rpc.system"], found["rpc.response.status_code"]) == ("grpc", "OK")
    assert (found["rpc.service"], found["rpc.method"]) == ("inference.GRPCInferenceService", "ModelInfer")


def test_each_message_of_a_stream_is_a_span(server: Server, collector: Collector) -> None:
    """All in the stream's trace; a stream itself has no end that anybody waits for."""
    header, trace_id, span_id = parent()
    with Grpc(server) as client:
        stream = client.channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            request_serializer=lambda message: message.SerializeToString(),
        )
        messages = iter([client.request([text]) for text in ("one", "two", "three")])
        assert len(list(stream(messages, metadata=[("traceparent", header)]))) == 3
    wait_for(lambda: len(collector.trace(trace_id)) == 3 * (1 + len(STAGES)), "three requests' spans")
    roots = [span for span in collector.trace(trace_id) if span.parent_span_id.hex() == span_id]
    assert {root.name for root in roots} == {"inference.GRPCInferenceService/ModelStreamInfer"}
    assert len(roots) == 3


def test_what_the_client_does_not_want_is_not_traced(server: Server, collector: Collector) -> None:
    """Neither with the flag off, nor without a valid context where the share is 0."""
    before = len(collector.spans)
    unwanted, trace_id, _ = parent(sampled=False)
    zero = "00-" + "0" * 32 + "-" + "1" * 16 + "-01"
    for header in (unwanted, zero, "garbage", "ff" + parent()[0][2:], parent()[0] + "-more", ""):
        assert post_json(server.http, "/embed", BODY, {"traceparent": header}).status == 200
    last, wanted_id, _ = parent()
    post_json(server.http, "/embed", BODY, {"traceparent": last})
    collector.trace(wanted_id)
    assert len(collector.spans) == before + 1 + len(STAGES)
    assert not [span for span in collector.spans if span.trace_id.hex() == trace_id]


def test_a_later_version_of_the_header_is_understood(server: Server, collector: Collector) -> None:
    """By its first parts, as the recommendation wants it."""
    header, trace_id, span_id = parent()
    post_json(server.http, "/embed", BODY, {"traceparent": f"42{header[2:]}-and-more"})
    check_stages(collector.trace(trace_id), span_id)


def test_a_fault_is_an_error(server: Server, collector: Collector) -> None:
    """The server's is one; what a client did wrong has its kind alone, and neither has stages that were not run."""
    header, trace_id, _ = parent()
    post_json(server.http, "/embed", b'{"inputs": "a volcano"}', {"traceparent": header})
    root, *stages = collector.trace(trace_id)
    assert root.status.code == Status.STATUS_CODE_ERROR
    assert attributes(root)["error.type"] == "engine_fault"
    assert [stage.name for stage in stages] == ["receive"]
    header, trace_id, _ = parent()
    post_json(server.http, "/embed", b'{"inputs": 5}', {"traceparent": header})
    (root,) = collector.trace(trace_id)
    assert root.status.code == Status.STATUS_CODE_UNSET
    assert attributes(root)["error.type"] == "invalid_request"
    assert attributes(root)["http.response.status_code"] == 422


def test_a_failed_call_is_an_error(server: Server, collector: Collector) -> None:
    """With gRPC's own status."""
    header, trace_id, _ = parent()
    with Grpc(server) as client, pytest.raises(grpc.RpcError):
        client.infer(client.request(["a volcano"]), metadata=[("traceparent", header)])
    root = collector.trace(trace_id)[0]
    assert root.status.code == Status.STATUS_CODE_ERROR
    assert attributes(root)["rpc.response.status_code"] == "INTERNAL"


def test_no_text_of_a_users_is_in_a_span(server: Server, collector: Collector) -> None:
    """Nor in a path or a name that a client made up."""
    traces = []
    for path in ("/embed", f"/{PRIVATE}", f"/models/{PRIVATE}/embed"):
        for body in (BODY, json.dumps({PRIVATE: 1}).encode()):
            header, trace_id, _ = parent()
            post_json(server.http, path, body, {"traceparent": header})
            traces.append(trace_id)
    assert all(map(collector.trace, traces))
    assert all(PRIVATE.encode() not in request.SerializeToString() for request in collector.requests)


def test_the_server_says_who_it_is(server: Server, collector: Collector) -> None:
    """The resource names service, version and process; no span is lost."""
    header, trace_id, _ = parent()
    post_json(server.http, "/embed", BODY, {"traceparent": header})
    collector.trace(trace_id)
    resources = [attributes(found.resource) for request in collector.requests for found in request.resource_spans]
    assert {found["service.name"] for found in resources} == {"bertserve"}
    assert 1 <= len({found["service.instance.id"] for found in resources}) <= 1 + len(listed(server))
    assert dropped(server) == {"queue_full": 0, "export_failed": 0, "rejected": 0}


def dropped(server: Server) -> dict[str, float]:
    name = "bertserve_trace_spans_dropped_total"
    return {reason: metric(server, name, reason=reason) for reason in ("queue_full", "export_failed", "rejected")}


def test_a_share_of_the_others_is_traced(models: Path) -> None:
    """With ids of our own; at the end what was not sent yet is sent."""
    with Collector() as collector:
        with Server(models, *FAKE, "--otlp-endpoint", collector.endpoint, "--trace-sample", "0.5") as server:
            with Tei(server) as client:
                for _ in range(200):
                    client.embed(["a text"])
            assert server.stop() == 0
        roots = [span for span in collector.spans if span.kind == Span.SPAN_KIND_SERVER]
        assert 60 < len(roots) < 140
        assert len({root.trace_id for root in roots}) == len(roots)
        assert {root.parent_span_id for root in roots} == {b""}


def test_a_collector_that_comes_back_gets_what_waited(models: Path) -> None:
    """One that is busy is asked again; what it rejects is counted."""
    with (
        Collector(statuses=[503, 429], rejects=1) as collector,
        Server(models, *FAKE, "--otlp-endpoint", collector.endpoint, "--trace-sample", "1") as server,
    ):
        post_json(server.http, "/embed", BODY)
        wait_for(lambda: collector.spans, "the third attempt", 20)
        wait_for(lambda: dropped(server)["rejected"] == 1, "the rejected span to be counted")
        assert len(collector.spans) == 1 + len(STAGES)


def test_a_collector_that_refuses_costs_spans(models: Path) -> None:
    """Not requests; it is not asked again, and a line of the log says it."""
    with (
        Collector(statuses=[400] * 100) as collector,
        Server(models, *FAKE, "--otlp-endpoint", collector.endpoint, "--trace-sample", "1") as server,
    ):
        assert post_json(server.http, "/embed", BODY).status == 200
        wait_for(lambda: dropped(server)["export_failed"] == 1 + len(STAGES), "the loss to be counted", 20)
        server.wait_logged("cannot send traces: the collector answered 400")
        assert len(collector.statuses) == 99


def test_without_a_collector_requests_are_served(models: Path) -> None:
    """And the end is not held up."""
    endpoint = f"http://127.0.0.1:{free_port()}"
    with Server(models, *FAKE, "--otlp-endpoint", endpoint, "--trace-sample", "1") as server:
        with Tei(server) as client:
            for _ in range(20):
                client.embed(["a"])
        assert server.stop() == 0


def test_off_means_off(models: Path) -> None:
    """Without a collector nothing of it is even imported, and no thread waits."""
    with Server(models, *FAKE, env={"PYTHONPROFILEIMPORTTIME": "1"}) as server:
        assert post_json(server.http, "/embed", BODY, {"traceparent": parent()[0]}).status == 200
        assert "bertserve.serving.inference.pipeline" in server.log
        assert "opentelemetry.sdk" not in server.log
        assert "opentelemetry.proto" not in server.log
        assert "bertserve.serving.telemetry.tracing" not in server.log


def test_a_bad_endpoint_is_an_error_of_the_settings(models: Path) -> None:
    """Before anything starts."""
    for wrong in ("collector:4317", "grpc://collector:4317", "http://"):
        with pytest.raises(AssertionError, match="otlp-endpoint"):
            Server(models, "--otlp-endpoint", wrong).__enter__()
