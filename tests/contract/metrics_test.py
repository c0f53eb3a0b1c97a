"""The metrics port: the metrics that `docs/reference/metrics.md` lists, probes, `/status`, what balancers are told."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from bertserve.serving.telemetry import catalogue
from tests.support.clients import (
    BOTH,
    Grpc,
    RawConnection,
    Refused,
    Tei,
    V2Json,
    get,
    grpc_raw,
    http_call,
    metric,
    post_json,
)
from tests.support.http2 import RawHttp2
from tests.support.prometheus import Prometheus, needs_prometheus, promtool
from tests.support.server import Server, elapsed
from tests.support.stopping import stop
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.clients import Transport


CATALOGUE = {metric.name: metric for metric in (*catalogue.SERVER, *catalogue.PROCESS)}
SENT = 7
REQUESTS = "bertserve_requests"


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[Server]:
    """A server that has answered some requests and refused one."""
    with Server(models, "--engine", "fake", "--precision", "fp32") as running:
        with Tei(running) as client:
            for _ in range(SENT):
                client.embed(["a text"])
        post_json(running.http, "/embed", b'{"inputs": 5}')
        wait_for(lambda: metric(running, "bertserve_requests_total", reason="ok") == SENT, "the last to be counted")
        yield running


@pytest.fixture(scope="module")
def scraper(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with Prometheus(tmp_path_factory.mktemp("prometheus"), [server.metrics]) as running:
        yield running


def exposition(server: Server) -> str:
    return get(server.metrics, "/metrics").body.decode()


def test_exactly_the_documented_metrics_are_there(server: Server) -> None:
    """Every name with its type and its labels, and no other."""
    found = {
        family.name: (family.type, {frozenset(sample.labels) - {"le"} for sample in family.samples})
        for family in text_string_to_metric_families(exposition(server))
    }
    assert found == {
        name.removesuffix("_total"): (metric.kind, {frozenset(metric.labels)}) for name, metric in CATALOGUE.items()
    }


def test_names_and_units_are_those_of_prometheus() -> None:
    """What only grows ends in `_total`, times are seconds, sizes bytes."""
    for name, entry in CATALOGUE.items():
        assert name.endswith("_total") == (entry.kind == "counter"), name
        assert not re.search("_(us|ms|ns|kb|mb|percent)(_|$)", name), name


@needs_prometheus
def test_promtool_finds_nothing_to_improve(server: Server) -> None:
    """Neither in the format nor in our names."""
    done = promtool("check", "metrics", given=exposition(server))
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr


def traffic(server: Server) -> dict[tuple[str, ...], float]:
    """The requests of each model, protocol and reason, as Prometheus's own parser reads them."""
    (family,) = (found for found in text_string_to_metric_families(exposition(server)) if found.name == REQUESTS)
    return {
        (sample.labels["model"], sample.labels["protocol"], sample.labels["reason"]): sample.value
        for sample in family.samples
    }


def test_requests_count_by_model_and_protocol(models: Path) -> None:
    """From zero, so that the first error has a rate; without a model where none was chosen."""
    with Server(models, "--engine", "fake", "--precision", "fp32") as running:
        before = traffic(running)
        assert set(before.values()) == {0}
        served = {(model, protocol) for model, protocol, reason in before if reason == "ok" and model}
        assert served == {("minilm", "http"), ("minilm", "grpc")}
        for transport, calls in ((V2Json, 2), (Grpc, 3)):
            with transport(running) as client:
                for _ in range(calls):
                    client.embed(["a text"])
                with pytest.raises(Refused):
                    client.embed(["x " * 100_000], truncate=False)
        post_json(running.http, "/models/made-up/embed", b'{"inputs": "a"}')
        post_json(running.http, "/embed", b'{"inputs": "a"}', {"X-Request-Timeout-Ms": "0.001"})
        wait_for(lambda: metric(running, "bertserve_requests_total", reason="deadline_exceeded") == 1, "the last")
        changed = {source: value for source, value in traffic(running).items() if value}
        shown = exposition(running)
    assert changed == {
        ("minilm", "http", "ok"): 2,
        ("minilm", "grpc", "ok"): 3,
        ("minilm", "http", "invalid_request"): 1,
        ("minilm", "grpc", "invalid_request"): 1,
        ("minilm", "http", "deadline_exceeded"): 1,
        ("", "http", "model_not_found"): 1,
    }
    assert set(changed) - set(before) <= {("minilm", protocol, "invalid_request") for protocol in ("http", "grpc")}
    for protocol, answers in (("http", 2), ("grpc", 3)):
        assert f'bertserve_request_seconds_count{{model="minilm",protocol="{protocol}"}} {answers}.0' in shown


def test_no_request_makes_a_series(server: Server) -> None:
    """Names, ids and paths that clients make up become no labels: what is scraped stays as large as it was."""
    before = len(exposition(server).splitlines())
    for index in range(30):
        post_json(server.http, f"/path/{index}", b"{}", {"X-Request-Id": f"id-{index}"})
        post_json(server.http, f"/models/name-{index}/embed", b'{"inputs": "a"}')
        post_json(server.http, f"/v2/models/name-{index}/versions/{index}/infer", b'{"inputs": []}')
        post_json(server.http, "/v1/embeddings", b'{"input": "a", "model": "name-%d"}' % index)
    assert len(exposition(server).splitlines()) == before


def test_one_model_is_proven_and_shown(server: Server) -> None:
    """Its form, its proof, the engine and the build."""
    text = exposition(server)
    assert 'bertserve_model_info{model="minilm",precision="fp32",task="embed",version="1"} 1.0' in text
    assert metric(server, "bertserve_model_unproven", model="minilm", version="1") == 0
    assert 'bertserve_model_unproven{model="minilm",version="1"} 0.0' in text
    assert 'bertserve_engine_info{engine="fake",version="none"} 1.0' in text
    assert metric(server, "bertserve_engine_process_resident_memory_bytes") > 1e6
    assert metric(server, "process_resident_memory_bytes") > 1e6


@pytest.mark.parametrize("transport", BOTH, ids=lambda kind: kind.name)
def test_connections_are_counted(server: Server, transport: type[Transport]) -> None:
    """By protocol, while they are open."""
    protocol = "grpc" if transport.family == "grpc" else "http"
    wait_for(lambda: metric(server, "bertserve_connections", protocol=protocol) == 0, "no connection")
    with transport(server) as client:
        client.embed(["a text"])
        assert metric(server, "bertserve_connections", protocol=protocol) == 1
    wait_for(lambda: metric(server, "bertserve_connections", protocol=protocol) == 0, "its end")


def test_what_waits_is_predicted(models: Path) -> None:
    """While an engine is busy: how long a new request would wait."""
    request = (
        b"POST /embed HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nContent-Length: 20\r\n\r\n"
        b'{"inputs": "a text"}'
    )
    options = ("--engine", "fake", "--precision", "fp32", "--threads", "1")
    with Server(models, *options) as busy, contextlib.ExitStack() as connections:
        engine = busy.engine_pid()
        assert engine is not None
        stop(engine)
        for _ in range(3):
            connections.enter_context(RawConnection(busy.http)).send(request)
        wait_for(lambda: metric(busy, "bertserve_queue_texts") == 2, "two that wait")
        assert metric(busy, "bertserve_predicted_wait_seconds") > 0
        assert metric(busy, "bertserve_admitted_tokens") == 12
        os.kill(engine, signal.SIGCONT)
        wait_for(lambda: metric(busy, "bertserve_requests_total", reason="ok") == 3, "the answers")
        assert metric(busy, "bertserve_predicted_wait_seconds") == 0


@needs_prometheus
def test_prometheus_reads_every_metric(server: Server, scraper: Prometheus) -> None:
    """It knows each by its type, and keeps samples of each with its labels."""
    assert server.process.poll() is None
    (target,) = scraper.targets()
    assert target["lastError"] == ""
    metadata = scraper.ask("metadata")
    for name, entry in CATALOGUE.items():
        assert [known["type"] for known in metadata[name]] == [entry.kind], name
        kept = scraper.ask("series", **{"match[]": name + ("_count" if entry.kind == "histogram" else "")})
        assert kept, name
        # An empty label is to Prometheus as none.
        assert set().union(*kept) - {"__name__", "job", "instance"} == set(entry.labels)


@needs_prometheus
def test_prometheus_computes_with_them(server: Server, scraper: Prometheus) -> None:
    """Counts are what was sent, and a quantile of the histogram lies where the time of the answers does."""
    answered = metric(server, "bertserve_requests_total", reason="ok")
    expression = 'sum by (reason) (bertserve_requests_total{reason="ok"})'
    wait_for(lambda: scraper.query(expression) == {("ok",): answered}, "the scrape of the last count")
    mean = scraper.query("sum(bertserve_request_seconds_sum) / sum(bertserve_request_seconds_count)")
    (median,) = scraper.query("histogram_quantile(0.5, sum by (le) (bertserve_request_seconds_bucket))").values()
    assert 5e-5 < median < 60
    assert median < 10 * next(iter(mean.values()))


CHECK = "/grpc.health.v1.Health/Check"
SERVING = health_pb2.HealthCheckResponse(status="SERVING").SerializeToString()


def test_both_protocols_are_answered(fake_server: Server) -> None:
    """Prometheus and kubelets' HTTP probes beside their gRPC probes; the clients' ports answer these as well."""
    for address in (fake_server.http, fake_server.metrics):
        assert {get(address, path).status for path in ("/livez", "/readyz", "/metrics")} == {200}
    assert get(fake_server.http, "/v2/health/ready").status == 200
    for address in (fake_server.grpc, fake_server.metrics):
        assert grpc_raw(address, CHECK, b"") == SERVING


def test_first_bytes_one_by_one(fake_server: Server) -> None:
    """However the network cuts the beginning."""
    with RawConnection(fake_server.metrics) as connection:
        for byte in b"GET /livez HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n":
            connection.send(bytes([byte]))
        assert connection.status() == 200
    with RawHttp2(fake_server.metrics) as connection:
        connection.call(1, b"", CHECK)
        assert connection.reply(1).status == 0


@pytest.mark.parametrize("begun", [b"", b"P", b"PRI", b"PRI * HTTP/2.0\r\n", b"G", b"GET /livez"])
def test_a_connection_that_says_too_little_ends(fake_server: Server, begun: bytes) -> None:
    """After the time that headers have."""
    started = time.monotonic()
    with RawConnection(fake_server.metrics, timeout_s=8) as connection:
        connection.send(begun)
        connection.read_to_end()
    assert elapsed(started) < 8


def test_other_bytes_are_refused(fake_server: Server) -> None:
    """What is neither gets 400 or the end of the connection."""
    for data, status in ((b"PRESIDENT / HTTP/1.1\r\n\r\n", 400), (b"\x16\x03\x01\x02", 400), (b"PRI / HTTP/1.1", 0)):
        with RawConnection(fake_server.metrics) as connection:
            connection.send(data)
            assert connection.status() == status


@pytest.mark.parametrize("call", ["/inference.GRPCInferenceService/ModelInfer", "/grpc.health.v1.Health/Other"])
def test_only_health_is_there(fake_server: Server, call: str) -> None:
    """Nothing infers on this port, over neither protocol."""
    with pytest.raises(Refused) as refused:
        grpc_raw(fake_server.metrics, call, b"")
    assert refused.value.status == "UNIMPLEMENTED"
    assert post_json(fake_server.metrics, "/embed", b'{"inputs": "x"}').status == 404


def test_nothing_large_is_read(fake_server: Server) -> None:
    """4 KiB are more than any question here has."""
    assert post_json(fake_server.metrics, "/metrics", b" " * 5000).status == 413
    with pytest.raises(Refused) as refused:
        grpc_raw(fake_server.metrics, CHECK, b" " * 5000)
    assert refused.value.status == "RESOURCE_EXHAUSTED"


def test_health_follows_the_server_on_both_ports(serve: Callable[..., Server]) -> None:
    """A watcher hears of the drain, on either port; the process ends well with both connections open."""
    server = serve("--engine", "fake", "--lame-duck-s", "1")
    with ThreadPoolExecutor() as pool:

        def watch(address: str) -> tuple[list[int], str]:
            with grpc.insecure_channel(address) as channel:
                told = []
                try:
                    for reply in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
                        told.append(reply.status)
                        if len(told) == 1:
                            started.append(address)
                except grpc.RpcError as error:
                    return told, error.code().name
                return told, "OK"

        started: list[str] = []
        watchers = [pool.submit(watch, address) for address in (server.grpc, server.metrics)]
        wait_for(lambda: len(started) == 2, "both to be told the first time")
        server.signal(signal.SIGTERM)
        serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        for watcher in watchers:
            assert watcher.result(20) == ([serving, not_serving], "UNAVAILABLE")
    assert server.wait() == 0


def test_the_status_tells_state_engine_queue_and_costs(fake_server: Server) -> None:
    """On both ports, with every cell of the cost table: what was measured and what is predicted now."""
    with Tei(fake_server) as client:
        client.embed(["a text"])
    wait_for(lambda: get(fake_server.metrics, "/status").json()["batches"]["count"] > 0, "a batch")
    for address in (fake_server.http, fake_server.metrics):
        status = get(address, "/status").json()
        assert status["state"] == "ready"
        assert status["engine"]["name"] == "fake"
        assert status["engine"]["lanes"][0] == "wide"
        assert status["queue"] == {"requests": 0, "texts": 0, "tokens": 0, "work_ms": 0.0}
        assert status["admission"]["tokens"] == 0
        (model,) = status["models"]
        wide = [cell for cell in model["costs"]["table"] if cell["kind"] == "wide" and cell["texts"] == 1]
        assert [cell["tokens"] for cell in wide] == [8, 16, 32, 64, 128, 256]
        assert all(cell["predicted_us"] >= 0 for cell in wide)


def test_the_status_tells_rates_latencies_and_models(tasks_server: Server) -> None:
    """Of the last minute and since the start, and what each model's bundle says of it."""
    before = get(tasks_server.http, "/status").json()["totals"]
    for _ in range(3):
        assert post_json(tasks_server.http, "/embed", b'{"inputs": ["a", "b"]}').status == 200
    assert post_json(tasks_server.http, "/embed", b"{").status == 400

    def counted() -> dict[str, Any] | None:
        status: dict[str, Any] = get(tasks_server.http, "/status").json()
        return status if status["totals"]["requests"] - before["requests"] == 3 else None

    status = wait_for(counted, "three requests")
    totals, recent = status["totals"], status["recent"]
    assert totals["texts"] - before["texts"] == 6
    assert totals["errors"]["malformed_request"] == before["errors"].get("malformed_request", 0) + 1
    assert 0 < recent["seconds"] <= totals["seconds"] + 1
    assert recent["texts_per_s"] >= recent["requests_per_s"] > 0
    for stage in ("tokenize", "queue", "compute", "request"):
        latency = recent["latency"][stage]
        assert 0 <= latency["p50_ms"] <= latency["p90_ms"] <= latency["p99_ms"]
    assert recent["latency"]["request"]["p50_ms"] > 0
    models = {model["name"]: model for model in status["models"]}
    assert {model["task"] for model in models.values()} == set(models)
    embed = models["embed"]
    assert (embed["in_service"], embed["batch_invariant"], embed["max_length"]) == (True, True, 64)
    assert embed["parity"]["cosine_mean"] == 1.0
    assert embed["accuracy"] == []


def test_the_status_is_told_without_costs(fake_server: Server) -> None:
    """To who prefers that; all else is the same."""
    whole = get(fake_server.http, "/status").json()
    reply = http_call(fake_server.http, "GET", "/status", headers={"Prefer": "return=minimal"})
    assert reply.headers["preference-applied"] == "return=minimal"
    (model,) = whole["models"]
    assert model["costs"]["table"]
    assert reply.json()["models"] == [{**model, "costs": None}]
    assert reply.json().keys() == whole.keys()


def test_costs_are_measured_once_for_a_node(tasks_repository: Path, tmp_path: Path) -> None:
    """The second start finds them in the cache, and predicts with the very same numbers."""
    shutil.copytree(tasks_repository / "embed", tmp_path / "models" / "embed")
    tables = []
    for words in ("costs measured", "costs from the cache"):
        with Server(tmp_path / "models", "--cache-dir", str(tmp_path / "cache")) as server:
            server.wait_logged(words)
            wait_for(lambda: list(tmp_path.rglob("costs.*.json")), "the file")
            (model,) = get(server.http, "/status").json()["models"]
            tables.append([(cell["tokens"], cell["texts"], cell["measured_us"]) for cell in model["costs"]["table"]])
    assert tables[0] == tables[1]
