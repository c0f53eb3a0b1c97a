"""What `/metrics` shows is what `docs/metrics.md` lists, to a real Prometheus too."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from serving.telemetry import catalogue
from tests.support.clients import BOTH, Grpc, RawConnection, Refused, Tei, V2Json, get, metric, post_json
from tests.support.prometheus import Prometheus, needs_prometheus, promtool
from tests.support.server import Server
from tests.support.stopping import stop
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.clients import Transport

CATALOGUE = {metric.name: metric for metric in (*catalogue.SERVER, *catalogue.TRITON, *catalogue.PROCESS)}
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
    """What only grows ends in `_total`, times are seconds, sizes bytes; Triton's names are Triton's."""
    for name, entry in CATALOGUE.items():
        if not name.startswith("nv_"):
            assert name.endswith("_total") == (entry.kind == "counter"), name
            assert not re.search("_(us|ms|ns|kb|mb|percent)(_|$)", name), name


@needs_prometheus
def test_promtool_finds_nothing_to_improve(server: Server) -> None:
    """Neither in the format nor in our names."""
    ours = exposition(server).partition("# HELP nv_")[0]
    done = promtool("check", "metrics", given=ours)
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
        assert served == {("minilm", "http"), ("minilm", "grpc"), ("minilm", "batch")}
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


def test_tritons_names_agree_with_the_statistics(server: Server) -> None:
    """The numbers of `/v2/models/minilm/stats`; failures count on v2 alone, as they do there."""
    with V2Json(server) as client, pytest.raises(Refused):
        client.embed(["x " * 100_000], truncate=False)
    (stats,) = get(server.http, "/v2/models/minilm/stats").json()["model_stats"]
    times = stats["inference_stats"]
    shown = {
        name.removeprefix("nv_inference_"): metric(server, name, model="minilm", version="1")
        for name in CATALOGUE
        if name.startswith("nv_")
    }
    assert shown == {
        "request_success": times["success"]["count"],
        "request_failure": times["fail"]["count"],
        "count": stats["inference_count"],
        "exec_count": stats["execution_count"],
        "request_duration_us": times["success"]["ns"] // 1000,
        "queue_duration_us": times["queue"]["ns"] // 1000,
        "compute_input_duration_us": times["compute_input"]["ns"] // 1000,
        "compute_infer_duration_us": times["compute_infer"]["ns"] // 1000,
        "compute_output_duration_us": times["compute_output"]["ns"] // 1000,
        "pending_request_count": 0,
    }
    assert shown["request_success"] >= SENT
    assert shown["request_failure"] == 1


def test_what_waits_is_predicted_and_pending(models: Path) -> None:
    """While an engine is busy: requests that wait, for Triton's dashboards, and how long a new one would."""
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
        assert metric(busy, "nv_inference_pending_request_count", model="minilm", version="1") == 2
        assert 0 < metric(busy, "bertserve_queue_work_seconds") <= metric(busy, "bertserve_predicted_wait_seconds")
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
