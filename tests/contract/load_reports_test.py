"""What balancers are told of a replica's load: ORCA's reports over HTTP and gRPC, and the endpoint picker's metrics."""

from __future__ import annotations

import json
from base64 import b64decode
from typing import TYPE_CHECKING

import grpc
import pytest
import yaml
from google.protobuf import descriptor_pb2, descriptor_pool, duration_pb2, json_format, message_factory

from tests.support.clients import Grpc, metric, open_channel, post_json
from tests.support.http2 import RawHttp2
from tests.support.models import ROOT
from tests.support.server import FAKE, Server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BODY = b'{"inputs": "a text"}'
FIGURES = {"application_utilization", "rps_fractional"}
NAMED = {"predicted_wait_s", "queued_texts", "requests"}
STREAM = "/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics"
PUBLISHED = {"rps_fractional": 6, "eps": 7, "named_metrics": 8, "application_utilization": 9}
"""Fields and numbers of `xds.data.orca.v3.OrcaLoadReport`."""


def _published() -> type:
    """The message as it is published, made without the server's own definition of it."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="published_orca.proto", package="published", syntax="proto3")
    report = file.message_type.add(name="Report")
    entry = report.nested_type.add(name="NamedMetricsEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    entry.field.add(name="value", number=2, type=field.TYPE_DOUBLE, label=field.LABEL_OPTIONAL)
    for name, number in PUBLISHED.items():
        made = report.field.add(name=name, number=number, type=field.TYPE_DOUBLE, label=field.LABEL_OPTIONAL)
        if name == "named_metrics":
            made.type, made.label = field.TYPE_MESSAGE, field.LABEL_REPEATED
            made.type_name = ".published.Report.NamedMetricsEntry"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("published.Report"))


Report = _published()


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[Server]:
    """A server that reports to all, and computes one text at a time."""
    with Server(models, *FAKE, "--load-reports", "always") as running:
        yield running


def header(server: Server, form: str) -> str | None:
    reply = post_json(server.http, "/embed", BODY, headers={"endpoint-load-metrics-format": form})
    assert reply.status == 200
    return reply.headers.get("endpoint-load-metrics")


def test_a_request_gets_the_form_it_asks_for(fake_server: Server) -> None:
    """The three of ORCA's proposal, with the same figures; nothing where nobody asks, or for another form."""
    text, found, binary = (str(header(fake_server, form)) for form in ("TEXT", "json", "BIN"))
    kind, _, pairs = text.partition(" ")
    figures = dict(pair.split("=") for pair in pairs.split(", "))
    assert kind == "TEXT"
    assert figures.keys() == FIGURES | {f"named_metrics.{name}" for name in NAMED}
    assert 0 <= float(figures["application_utilization"]) <= 1
    kind, _, document = found.partition(" ")
    report = json.loads(document)
    assert json_format.Parse(document, Report()).named_metrics.keys() == NAMED
    assert (kind, report.keys(), report["named_metrics"].keys()) == ("JSON", FIGURES | {"named_metrics"}, NAMED)
    kind, _, encoded = binary.partition(" ")
    assert kind == "BIN"
    assert set(Report.FromString(b64decode(encoded)).named_metrics) == NAMED
    assert header(fake_server, "XML") is None
    assert "endpoint-load-metrics" not in post_json(fake_server.http, "/embed", BODY).headers
    refused = post_json(fake_server.http, "/embed", b"{}", headers={"endpoint-load-metrics-format": "TEXT"})
    assert (refused.status, refused.headers["endpoint-load-metrics"][:5]) == (422, "TEXT ")


def trailers(server: Server, message: bytes | None = None, **asked: str) -> dict[str, str]:
    """Those of a call with this metadata; gRPC's own client keeps reports to itself."""
    with Grpc(server) as client, RawHttp2(server.grpc) as raw:
        raw.call(1, client.request(["a text"]).SerializeToString() if message is None else message, **asked)
        return raw.reply(1).fields


def test_a_call_gets_a_trailer_where_it_is_asked_for(fake_server: Server) -> None:
    """Beside the stage times, or an error's. Of base64 Envoy takes that alone whose length is a multiple of four."""
    found = trailers(fake_server, endpoint_load_metrics_format="BIN")
    encoded = found["endpoint-load-metrics-bin"]
    assert len(encoded) % 4 == 0
    assert set(Report.FromString(b64decode(encoded, validate=True)).named_metrics) == NAMED
    assert found["grpc-status"] == "0"
    assert "bertserve-total-us" in found
    assert "endpoint-load-metrics-bin" not in trailers(fake_server)
    refused = trailers(fake_server, b"\xff", endpoint_load_metrics_format="BIN")
    assert (refused["grpc-status"] != "0", "endpoint-load-metrics-bin" in refused) == (True, True)


def test_all_get_reports_where_the_settings_say_so(server: Server) -> None:
    """Balancers do not ask. They get JSON: Envoy reads another TEXT than the proposal's."""
    kind, _, document = post_json(server.http, "/embed", BODY).headers["endpoint-load-metrics"].partition(" ")
    assert kind == "JSON"
    assert json_format.Parse(document, Report()).named_metrics.keys() == NAMED
    assert "endpoint-load-metrics-bin" in trailers(server)
    with Grpc(server) as client:
        assert len(client.embed(["a text"]).vectors) == 1


def test_reports_out_of_band(fake_server: Server) -> None:
    """One at once, and then at the interval that was asked for; one below zero is refused."""

    def asked(interval: duration_pb2.Duration) -> bytes:
        inner = interval.SerializeToString()
        return b"\x0a" + bytes([len(inner)]) + inner

    with open_channel(fake_server.grpc) as channel:
        stream = channel.unary_stream(STREAM)(asked(duration_pb2.Duration(nanos=100_000_000)), timeout=20)
        reports = [Report.FromString(next(stream)) for _ in range(3)]
        stream.cancel()
        assert all(set(report.named_metrics) == NAMED for report in reports)
        with pytest.raises(grpc.RpcError) as refused:
            next(channel.unary_stream(STREAM)(asked(duration_pb2.Duration(seconds=-1)), timeout=20))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_the_endpoint_picker_reads_what_the_server_has(fake_server: Server) -> None:
    """Every metric of the values for Gateway API's chart is a gauge of the running server; ports and labels fit."""
    values = yaml.safe_load((ROOT / "deploy/kubernetes/inferencepool.values.yaml").read_text())
    names = [name for flag, name in values["inferenceExtension"]["flags"].items() if flag.endswith("-metric") and name]
    assert len(names) == 3
    assert all(metric(fake_server, name) >= 0 for name in names)
    pool = values["inferencePool"]
    deployment = yaml.safe_load((ROOT / "deploy/kubernetes/base/deployment.yaml").read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert [port["number"] for port in pool["targetPorts"]] == [ports["http"]]
    labels = deployment["spec"]["template"]["metadata"].get("labels") or deployment["spec"]["selector"]["matchLabels"]
    assert pool["modelServers"]["matchLabels"].items() <= labels.items()
