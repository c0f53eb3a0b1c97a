"""The load generator, the simulator and the baseline beside a real server."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import signal
import threading
import time
from typing import TYPE_CHECKING

import pytest

from bertserve.loadtest.benchmarks.drive import Workload, drive, even
from bertserve.loadtest.capacity.simulate_cli import main as simulate
from bertserve.loadtest.cli import HELD, IMPOSSIBLE, MISSED, main
from bertserve.loadtest.generator.closed_loop import Lane, connect, one_by_one
from bertserve.loadtest.generator.messages import messages
from bertserve.loadtest.generator.probe import Probe
from bertserve.loadtest.report.sample import percentile
from tests.support.clients import get
from tests.support.open_loop import EVEN, RATE, SECONDS, measured, target_of
from tests.support.server import Server, free_port
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from bertserve.loadtest.report.result import Result
    from tests.support.versions import Shelf


STALL_MS = 50


@pytest.fixture(scope="module")
def narrow_server(models: Path) -> Iterator[Server]:
    """A server that is slow and lets few requests wait."""
    words = ("--engine", "fake", "--fake-ms", "100", "--max-batch-tokens", "32", "--max-queue-tokens", "64")
    with Server(models, *words) as server:
        yield server


def stall(server: Server) -> None:
    """Holds the server for a moment: its users see a pause, and nothing is lost."""
    os.kill(server.pid, signal.SIGSTOP)
    time.sleep(STALL_MS / 1e3)  # the length of the stall is what is measured
    os.kill(server.pid, signal.SIGCONT)


def test_a_stall_shows_in_the_open_loop_and_hides_in_the_closed_one(serve: Callable[..., Server]) -> None:
    """50 ms in which a server stands still are in the open loop's p99, and vanish from a closed loop's.

    Of 600 scheduled requests the stall meets 15, and each waits for the rest of it; a closed loop has one
    request under way and sends no other meanwhile.
    """
    server = serve("--engine", "fake")
    target = target_of(server, "http")
    planted: list[float] = []

    def plant(_: Result, passed_s: float) -> None:
        if not planted:
            planted.append(passed_s)
            stall(server)

    result = measured(target, on_progress=plant)
    assert planted
    assert result.latency.percentile_ms(99) > STALL_MS / 3

    requests = messages(target, "embed", ["a text of a few words"])
    with connect(*target.address()) as connection:
        lane = Lane(connection, target.wire(), lambda _: None)
        lane.exchange(requests[0])
        timer = threading.Timer(SECONDS / 2, stall, [server])
        timer.start()
        exchanges = one_by_one(lane, itertools.cycle(requests), time.perf_counter() + SECONDS)
        timer.join()
    times = sorted(1e3 * (done - sent) for sent, done in exchanges)
    assert times[-1] > 0.8 * STALL_MS
    # Beside the open loop's, not beside a time: whatever else slows this machine meets both.
    assert percentile(times, 99) < result.latency.percentile_ms(99)


@pytest.mark.parametrize(
    ("protocol", "reason"),
    [pytest.param("http", "429 Too Many Requests", marks=pytest.mark.slow), ("grpc", "RESOURCE_EXHAUSTED")],
)
def test_overload_is_counted_by_reason(narrow_server: Server, protocol: str, reason: str) -> None:
    """A server that sheds what it cannot carry shows as offered, answered and refused requests that add up."""
    result = measured(target_of(narrow_server, protocol), EVEN.lasting(1))
    assert result.offered == RATE
    assert result.faults[reason] > result.offered / 2
    assert len(result.latency) + result.failed == result.offered
    assert len(result.latency) > 0


@pytest.mark.parametrize(
    ("protocol", "reason"),
    [
        ("http", "504 Gateway Timeout"),
        pytest.param("v2", "504 Gateway Timeout", marks=pytest.mark.slow),
        pytest.param("grpc", "DEADLINE_EXCEEDED", marks=pytest.mark.slow),
    ],
)
def test_requests_carry_a_deadline(narrow_server: Server, protocol: str, reason: str) -> None:
    """Over every protocol the server reads it: what it cannot answer in time it refuses."""
    target = target_of(narrow_server, "grpc" if protocol == "grpc" else "http")
    result = measured(dataclasses.replace(target, protocol=protocol, timeout_ms=20), EVEN.lasting(0.5))
    assert result.faults[reason] > 0
    assert result.failed == result.offered


@pytest.mark.parametrize("protocol", ["http", pytest.param("grpc", marks=pytest.mark.slow)])
def test_a_run_has_the_server_s_own_stages(fake_server: Server, protocol: str) -> None:
    """Over both protocols every stage is told, and the compute stage is not the network's."""
    result = measured(target_of(fake_server, protocol), EVEN.lasting(0.5))
    assert result.failed == 0
    assert len(result.stages["compute"]) == result.offered
    assert result.generator.cpu_us > 0


def test_texts_have_the_lengths_that_were_asked_for(fake_server: Server) -> None:
    """Without the tokenizer at hand the server's own count makes texts of every length."""
    lengths = (8, 32, 128, 250)
    with Probe(target_of(fake_server, "http")) as probe:
        kinds = probe.kinds(dataclasses.replace(EVEN, lengths=dict.fromkeys(lengths, 1.0)), None)
        for tokens, kind in zip(lengths, kinds, strict=True):
            counts = [probe.tokens("embed", text) for text in kind.texts]
            assert max(abs(count - tokens) for count in counts) <= 1
            assert len(set(kind.texts)) > len(kind.texts) / 2


def test_a_load_that_cannot_be_sent_is_one_clear_line(
    fake_server: Server, serve: Callable[..., Server], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Exit code 2 before any load: nobody listens, no model does the task, or the server is in its lame duck."""
    tags = tmp_path / "tags.toml"
    tags.write_text("lengths = { 8 = 1 }\ntasks = { tag = 1 }\n[[phases]]\nseconds = 1\nfrom = 1\nto = 1\n")
    nobody = f"127.0.0.1:{free_port()}"
    ending = serve("--engine", "fake", "--lame-duck-s", "60")
    ending.signal(signal.SIGTERM)
    ending.wait_logged("state: draining")
    for words, sentence in (
        (["--target", nobody], f"cannot connect to {nobody}"),
        (["--target", fake_server.http, "--scenario", str(tags)], "returned 4"),
        (["--target", ending.http, "--duration", "0.5"], "it is stopping or restarting"),
    ):
        assert main([*words, "--out", str(tmp_path)]) == IMPOSSIBLE
        said = capsys.readouterr().err
        assert sentence in said
        assert said.count("\n") == 1
    ending.signal(signal.SIGTERM)


@pytest.mark.parametrize(
    ("slo", "code"), [pytest.param("p99=10s,errors=0%", HELD, marks=pytest.mark.slow), ("p50=1us", MISSED)]
)
def test_the_exit_code_is_the_verdict(fake_server: Server, tmp_path: Path, slo: str, code: int) -> None:
    """A held objective ends in 0, a missed one in 1, and both leave their report."""
    words = ["--target", fake_server.http, "--duration", "0.5", "--slo", slo, "--out", str(tmp_path)]
    assert main(words) == code
    assert (">missed</strong>" in (tmp_path / "report.html").read_text(encoding="utf-8")) == (code == MISSED)
    values = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert all(verdict["held"] for verdict in values["slo"]) == (code == HELD)


def test_a_search_says_what_it_will_do_and_what_it_asked(
    fake_server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs and minutes before it begins; with what it found, how long the texts were and what computed them."""
    texts = tmp_path / "texts.txt"
    texts.write_text("hello\nhello world and more\n", encoding="utf-8")
    words = ["--target", fake_server.http, "--texts", str(texts), "--rate", "1", "--duration", "0.3"]
    assert main([*words, "--find-capacity", "--slo", "max=1us", "--out", str(tmp_path / "out")]) == MISSED
    told = capsys.readouterr()
    assert told.err.startswith("searching from 1/s with runs of 0.3 s, up to 3 at a rate: usually ")
    assert "texts: texts.txt (weight 1, 3 to 6 tokens in 2 of 2 texts)" in told.out
    assert re.search(r"^engine: fake", told.out, re.MULTILINE)
    assert "shape: " in told.out


def test_a_server_that_dies_is_counted_not_fatal(serve: Callable[..., Server]) -> None:
    """Requests to a server that is killed in the middle fail with a reason, and the run ends with its figures."""
    server = serve("--engine", "fake")

    def kill(_: Result, __: float) -> None:
        if server.process.poll() is None:
            server.process.kill()

    result = measured(target_of(server, "http"), on_progress=kill)
    assert result.offered == RATE * SECONDS
    assert len(result.latency) > 0
    assert result.failed > 0
    assert all("connect" in reason for reason in result.faults)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "--target is missing"),
        (["--target", "ftp://host"], "must look like http://host:port or grpc://host:port"),
        (["--target", "http://host:1", "--ca", "ca.pem"], "use https://host:1"),
        (["--target", "https://host:1", "--key", "key.pem"], "needs --cert FILE"),
        (["--target", "host:1", "--task", "rerank", "--protocol", "openai"], "openai does not support the task rerank"),
        (["--target", "http://host:port"], "--target http://host:port"),
        (["--target", "http://host:1", "--protocol", "grpc"], "gRPC has its own port"),
        (["--target", "host:1", "--scenario", "stedy"], "did you mean steady?"),
        (["--target", "host:1", "--rate", "0"], "--rate must be above 0"),
        (["--target", "host:1", "--duration", "nan"], "--duration must be above 0"),
        (["--target", "host:1", "--timeout-ms", "-1"], "--timeout-ms must be 0"),
        (["--target", "host:1", "--slo", "p99"], "the limit must be in us, ms or s"),
        (["--target", "host:1", "--find-capacity"], "--find-capacity needs --slo"),
        (["--compare", "a.json", "b.json"], "a.json: No such file or directory"),
    ],
)
def test_what_makes_no_sense_is_one_clear_line(
    capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    """A command that cannot be carried out ends in 2 and says in one line why."""
    assert main(words) == IMPOSSIBLE
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1


WORKLOAD = Workload.of(["a text of a few words", "a b c d e f g"], [8, 8])
SLOW = ("--engine", "fake", "--fake-ms", "20", "--threads", "1", "--precision", "fp32")


def test_a_server_tells_what_a_simulation_needs(
    serve: Callable[..., Server], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`/status` is a table of costs: a text takes at least the 20 ms that this engine takes for a batch."""
    status = get(serve(*SLOW).metrics, "/status").json()
    path = tmp_path / "status.json"
    path.write_text(json.dumps(status))
    assert simulate(["--cost", str(path), "--tokens", "8", "--rate", "10", "--duration", "20", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["p50_ms"] >= 20
    assert found["answered_per_s"] == pytest.approx(found["offered_per_s"])


def test_a_node_keeps_what_a_simulation_needs(
    serve: Callable[..., Server], own_shelf: Shelf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So is the file in the node's cache, once a server with a real engine has measured."""
    node = tmp_path / "node"
    serve("--precision", "fp32", "--engine", "ort-cpu", "--cache-dir", str(node), repository=own_shelf.root)
    [path] = wait_for(lambda: list(node.glob("[!.]*/[0-9]*/[0-9]*/costs.*.json")), "the costs in the cache")
    assert simulate(["--cost", str(path), "--tokens", "8-100", "--rate", "5", "--duration", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["p50_ms"] > 0


def test_the_very_requests_of_a_run_are_simulated(
    serve: Callable[..., Server], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was sent and what is replayed are the same requests; all are answered in both."""
    server, costs, kept = serve(*SLOW), tmp_path / "status.json", tmp_path / "requests.json"
    requests = drive(target_of(server, "http"), WORKLOAD, even(2.0), 20.0, 3)
    assert requests.answered.all()
    costs.write_text(json.dumps(get(server.metrics, "/status").json()))
    kept.write_text(json.dumps([[at, 8] for at in sorted(requests.intended.tolist())]))
    assert simulate(["--cost", str(costs), "--replay", str(kept), "--duration", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fates"] == {"answered": len(requests.intended)}
    assert told["p50_ms"] >= 20
    assert told["compute_ms"] >= 20
