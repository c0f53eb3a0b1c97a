"""Rows 13 and 43 to 51 of the failure modes: clients that go away, and engines that fail, die, hang or answer NaN."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import numpy as np
import pytest

from bertserve.loadtest.generator.scenario import Phase, Scenario
from tests.support.asking import asking, failures, numbered_texts, wait_for_more
from tests.support.canary import sing
from tests.support.clients import BOTH, STATUS, Grpc, RawConnection, Refused, Tei, get, metric, post_json
from tests.support.engines import engine_of, kill_engine, stopped_engine
from tests.support.expected import fake_answers, tokenizer
from tests.support.open_loop import measured as open_loop
from tests.support.open_loop import target_of
from tests.support.poison import poisoned_bundle
from tests.support.server import FAKE, MEASURED, SLOW_ENGINES, Server, elapsed, is_running, measured
from tests.support.stopping import stop
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.support.clients import Transport
    from tests.support.versions import Shelf

FAULTS = {"banana": "nan", "elephant": "raise", "volcano": "exit", "glacier": "hang"}
"""Words of one token each that warm-up never runs, and what they provoke."""

READY_AGAIN_S = 5.0
"""The promise for a CPU; the server's own starts on a busy machine are what the tests wait for in the end."""

both = pytest.mark.parametrize("transport", BOTH, ids=lambda kind: kind.name)


def fake_faults(models: Path) -> str:
    """The option that gives each word its fault."""
    ids = {word: tokenizer(models).encode(word).ids[1] for word in FAULTS}
    return ",".join(f"{ids[word]}:{fault}" for word, fault in FAULTS.items())


def faulty(models: Path, *options: str) -> Server:
    """A server with a fake engine that fails on some words."""
    return Server(models, *FAKE, "--fake-faults", fake_faults(models), *options)


@pytest.fixture
def faulty_server(models: Path) -> Iterator[Server]:
    """One that soon takes a batch for a hang, for one test: an engine is given up at its third crash."""
    with faulty(models, "--engine-hang-s", "2") as server:
        yield server


@pytest.fixture(scope="module")
def patient_server(models: Path) -> Iterator[Server]:
    """One whose engine may be stopped for a while, however busy the machine is."""
    with faulty(models) as server:
        yield server


def batches(server: Server) -> int:
    return int(metric(server, "bertserve_batch_size_count"))


def batched_texts(server: Server) -> int:
    return int(metric(server, "bertserve_batch_size_sum"))


def outcomes(transport: type[Transport], server: Server, texts: Sequence[str]) -> list[np.ndarray | Refused]:
    """Sends each text as a request of its own, all at once, and collects vectors and refusals."""

    def ask(text: str) -> np.ndarray | Refused:
        with transport(server) as client:
            try:
                return client.embed([text]).vectors[0]
            except Refused as refused:
                return refused

    with ThreadPoolExecutor(len(texts)) as pool:
        return list(pool.map(ask, texts))


@contextlib.contextmanager
def busy(server: Server) -> Iterator[None]:
    """Holds a server's only lane with one batch while the block runs."""
    wait_for(lambda: idle(server), "an idle server")
    before = batches(server)
    with ThreadPoolExecutor(1) as pool, stopped_engine(server):
        pool.submit(post_json, server.http, "/embed", b'{"inputs": "the first in the queue"}')
        wait_for(lambda: batches(server) > before, "the first batch")
        yield


def idle(server: Server) -> bool:
    return metric(server, "bertserve_admitted_tokens") == 0 == metric(server, "bertserve_queue_texts")


def http_request_bytes(text: str) -> bytes:
    body = json.dumps({"inputs": text}).encode()
    return b"POST /embed HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (
        len(body),
        body,
    )


def test_row_13_http_client_vanishes_while_queued(patient_server: Server) -> None:
    """A closed connection takes its request out of the queue: the engine never sees it and its permit is free."""
    before = batched_texts(patient_server)
    with busy(patient_server):
        connections = [RawConnection(patient_server.http) for _ in range(5)]
        for connection in connections:
            connection.send(http_request_bytes("abandoned"))
        wait_for(lambda: metric(patient_server, "bertserve_queue_texts") == 5, "five queued texts")
        for connection in connections:
            connection.socket.close()
        wait_for(lambda: metric(patient_server, "bertserve_queue_texts") == 0, "an empty queue")
    wait_for(lambda: idle(patient_server), "an idle server")
    assert batched_texts(patient_server) == before + 1


def test_row_13_grpc_call_is_cancelled_while_queued(patient_server: Server) -> None:
    """The same of a cancelled gRPC call, which ends with CANCELLED."""
    before = batched_texts(patient_server)
    with Grpc(patient_server) as client, busy(patient_server):
        calls = [client.infer.future(client.request(["abandoned"])) for _ in range(5)]
        wait_for(lambda: metric(patient_server, "bertserve_queue_texts") == 5, "five queued texts")
        for call in calls:
            call.cancel()
        wait_for(lambda: metric(patient_server, "bertserve_queue_texts") == 0, "an empty queue")
    wait_for(lambda: idle(patient_server), "an idle server")
    assert [call.code() for call in calls] == [grpc.StatusCode.CANCELLED] * 5
    assert batched_texts(patient_server) == before + 1


def test_row_13_neighbours_of_a_vanished_client(patient_server: Server, models: Path) -> None:
    """Those who wait beside a client that vanishes get their answers."""
    texts = [f"patient {number}" for number in range(4)]
    with ThreadPoolExecutor(1) as pool, busy(patient_server), RawConnection(patient_server.http) as leaver:
        leaver.send(http_request_bytes("abandoned"))
        found = pool.submit(outcomes, Tei, patient_server, texts)
        wait_for(lambda: metric(patient_server, "bertserve_queue_texts") == 5, "five queued texts")
        leaver.socket.close()
    np.testing.assert_allclose(found.result(), fake_answers(models, texts), atol=1e-5)


def test_row_14_client_vanishes_while_computing(patient_server: Server) -> None:
    """What is computed for a client that has gone is thrown away without a line in the log."""
    wait_for(lambda: idle(patient_server), "an idle server")
    before, lines = batches(patient_server), patient_server.log
    with stopped_engine(patient_server):
        with RawConnection(patient_server.http) as connection:
            connection.send(http_request_bytes("abandoned"))
            wait_for(lambda: batches(patient_server) > before, "its batch")
        wait_for(lambda: metric(patient_server, "bertserve_admitted_tokens") == 0, "the permit to be free")
    wait_for(lambda: idle(patient_server), "an idle server")
    assert patient_server.log == lines


@pytest.fixture(scope="module")
def full_server(models: Path) -> Iterator[Server]:
    """One that has room for a single request."""
    with Server(models, *FAKE, "--max-queue-tokens", "16") as server:
        yield server


@both
def test_row_35_queue_full(full_server: Server, transport: type[Transport]) -> None:
    """When as many tokens are in flight as may be, the next request is refused at once and told when to come again."""
    with busy(full_server), transport(full_server) as client:
        with pytest.raises(Refused) as refused:
            client.embed(["one more text than there is room for"])
        with pytest.raises(Refused) as hopeless:
            client.embed(["word " * 60])
    assert refused.value.status == STATUS["overloaded"][client.family]
    assert refused.value.headers.get("retry-after") or refused.value.headers["retry-after-ms"]
    assert hopeless.value.status == STATUS["invalid"][client.family], "it would never fit"
    assert metric(full_server, "bertserve_admitted_tokens") == 0


@both
def test_row_37_deadline_passes_in_the_queue(patient_server: Server, transport: type[Transport]) -> None:
    """A request whose deadline passes while it waits is answered so, and never computed."""
    wait_for(lambda: idle(patient_server), "an idle server")
    before = batched_texts(patient_server)
    with busy(patient_server), transport(patient_server) as client, pytest.raises(Refused) as refused:
        client.embed(["too late"], timeout_ms=50)
    assert refused.value.status == STATUS["too late"][client.family]
    wait_for(lambda: idle(patient_server), "an idle server")
    assert batched_texts(patient_server) == before + 1


@both
@pytest.mark.parametrize("word", ["banana", "elephant"])
def test_row_43_one_bad_item_in_a_batch(
    patient_server: Server, models: Path, transport: type[Transport], word: str
) -> None:
    """A text on which the engine fails, or answers NaN, fails its own request and none of its batch's others."""
    texts = [f"good text number {number}" for number in range(7)]
    texts.insert(3, f"a {word} in between")
    started = batches(patient_server)
    with ThreadPoolExecutor(1) as pool, busy(patient_server):
        found = pool.submit(outcomes, transport, patient_server, texts)
        wait_for(lambda: metric(patient_server, "bertserve_queue_texts") == len(texts), "all texts in the queue")
    results = found.result()
    bad = results.pop(3)
    del texts[3]
    assert isinstance(bad, Refused)
    assert bad.status == STATUS["internal"][transport.family]
    np.testing.assert_allclose(results, fake_answers(models, texts), atol=1e-5)
    assert started + 2 <= batches(patient_server) <= started + 2 + 8, "they shared one batch, then ran alone at most"


@both
def test_row_43_one_bad_text_fails_its_whole_request(patient_server: Server, transport: type[Transport]) -> None:
    """A request with several texts has one outcome: an error, if one of them fails."""
    with transport(patient_server) as client, pytest.raises(Refused) as refused:
        client.embed(["good", "an elephant", "good"])
    assert refused.value.status == STATUS["internal"][client.family]
    assert "elephant" not in refused.value.text


def test_row_44_engine_raises(patient_server: Server, models: Path) -> None:
    """An engine that raises stays: same process, ready, and the next request is answered."""
    engine = patient_server.engine_pid()
    assert isinstance(outcomes(Tei, patient_server, ["elephant"])[0], Refused)
    assert get(patient_server.http, "/readyz").status == 200
    assert patient_server.engine_pid() == engine
    sing(patient_server, models)


def ready(server: Server) -> bool:
    return get(server.metrics, "/readyz").status == 200


def wait_replaced(server: Server, engine: int | None) -> None:
    """Waits until another process than `engine` serves."""
    wait_for(lambda: server.engine_pid() not in {None, engine} and ready(server), "a new engine", 4 * READY_AGAIN_S)


def test_row_45_engine_killed_under_load(
    serve: Callable[..., Server], models: Path, record_property: Callable[[str, object], None]
) -> None:
    """When the engine is killed, every request under way, or that comes meanwhile, is answered by the next one."""
    server = serve(*FAKE, "--fake-ms", "20", "--default-timeout-ms", "60000")
    engine = engine_of(server)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(BOTH[number % 2](server)) for number in range(6)]
        askers = stack.enter_context(asking(*map(numbered_texts, clients, range(6))))
        os.kill(engine, signal.SIGKILL)
        killed = time.monotonic()
        wait_replaced(server, engine)
        record_property("ready_again_s", elapsed(killed))
        wait_for_more(askers, 2)
    assert failures(askers) == []
    assert [refused for asker in askers for refused in asker.refused] == []
    answers = dict(answer for asker in askers for answer in asker.answers)
    vectors = [answer.vectors[0] for answer in answers.values()]
    np.testing.assert_allclose(vectors, fake_answers(models, list(answers)), atol=1e-5)
    assert metric(server, "bertserve_engine_restarts_total") == 1


def test_row_45_engine_killed_at_a_rate(serve: Callable[..., Server]) -> None:
    """At 100 requests a second with a deadline of 2 s none is told to try again; only what was too late is told so."""
    server = serve(*FAKE, "--fake-ms", "2")
    engine = engine_of(server)
    steady = Scenario("killed", "", (Phase(4.0, 1, 1),), {8: 1.0}, rate=100.0, arrivals="constant")
    kill = threading.Timer(2.0, os.kill, (engine, signal.SIGKILL))
    kill.start()
    result = open_loop(target_of(server, "http"), steady)
    kill.join()
    assert server.engine_pid() != engine
    assert metric(server, "bertserve_requests_total", reason="ok") > 200
    for reason in ("not_ready", "engine_lost", "engine_fault"):
        assert metric(server, "bertserve_requests_total", reason=reason) == 0
    assert set(result.faults) <= {"deadline_exceeded", "504"}


@pytest.mark.slow
def test_row_45_engine_killed_int8(serve: Callable[..., Server]) -> None:
    """The real engine is ready again within 5 s of a kill, and answers as before."""
    server = serve("--precision", "int8", *MEASURED)
    with Tei(server) as client:
        before = client.embed(["the same before and after"]).vectors
        engine = kill_engine(server)
        killed = time.monotonic()
        wait_replaced(server, engine)
        assert elapsed(killed) < 2 * READY_AGAIN_S
        np.testing.assert_array_equal(client.embed(["the same before and after"]).vectors, before)


def test_row_45_requests_while_the_engine_restarts(serve: Callable[..., Server], models: Path) -> None:
    """Meanwhile the server lives and is not ready, and requests wait for the engine."""
    server = serve(*FAKE, env=SLOW_ENGINES, cold=True)
    engine = kill_engine(server)
    again = wait_for(lambda: next(iter(set(server.engine_pids()) - {engine}), None), "another engine process")
    os.kill(again, signal.SIGSTOP)
    wait_for(lambda: not ready(server), "readiness to fall")
    assert get(server.metrics, "/livez").status == 200
    with ThreadPoolExecutor(2) as pool, Tei(server) as tei, Grpc(server) as call:
        waiting = [pool.submit(client.embed, ["later"], timeout_ms=60_000) for client in (tei, call)]
        wait_for(lambda: metric(server, "bertserve_queue_texts") == len(waiting), "both in the queue")
        os.kill(again, signal.SIGCONT)
        vectors = [reply.result().vectors[0] for reply in waiting]
    np.testing.assert_allclose(vectors, fake_answers(models, ["later"] * 2), atol=1e-5)
    assert ready(server)


def test_row_45_a_deadline_before_the_next_engine(serve: Callable[..., Server]) -> None:
    """What cannot wait for as long as a start takes is refused at once, and told that nothing was computed."""
    server = serve(*FAKE, env=SLOW_ENGINES, cold=True)
    engine = engine_of(server)
    with Grpc(server) as client:
        client.embed(["connected"])
        os.kill(engine, signal.SIGKILL)
        wait_for(lambda: not ready(server), "readiness to fall")
        http = post_json(server.http, "/embed", b'{"inputs": "now?"}', {"X-Request-Timeout-Ms": "20"})
        with pytest.raises(Refused) as refused:
            client.embed(["now?"], timeout_ms=20)
    assert (http.status, http.headers["x-computed"]) == (503, "none")
    assert int(http.headers["retry-after"]) >= 1
    assert (refused.value.status, refused.value.headers["bertserve-computed"]) == ("UNAVAILABLE", "none")
    refusals = {
        reason: metric(server, "bertserve_refusals_total", reason=reason) for reason in ("not_ready", "predicted_late")
    }
    assert refusals == {"not_ready": 2, "predicted_late": 0}


@both
def test_row_45_engine_dies_of_a_text(serve: Callable[..., Server], models: Path, transport: type[Transport]) -> None:
    """A text that ends the engine twice is refused from then on and logged by its request's id; all others go on."""
    server = serve(*FAKE, "--fake-faults", fake_faults(models), "--default-timeout-ms", "60000")
    texts = [f"good text number {number}" for number in range(7)]
    with ThreadPoolExecutor(1) as pool, busy(server):
        found = pool.submit(outcomes, transport, server, [*texts, "a volcano"])
        wait_for(lambda: metric(server, "bertserve_queue_texts") == 8, "all texts in the queue")
    *results, bad = found.result()
    np.testing.assert_allclose(results, fake_answers(models, texts), atol=1e-5)
    (again,) = outcomes(transport, server, ["a volcano"])
    assert isinstance(bad, Refused)
    assert isinstance(again, Refused)
    assert bad.status == again.status == STATUS["internal"][transport.family]
    assert metric(server, "bertserve_engine_restarts_total") == 2
    sing(server, models)
    (line,) = [line for line in server.log.splitlines() if "crashed two engine processes" in line]
    assert f"request_id={bad.headers['x-request-id']}" in line
    assert "volcano" not in server.log


@pytest.mark.sampled(1)
@both
def test_row_46_engine_hangs(faulty_server: Server, models: Path, transport: type[Transport]) -> None:
    """A text whose batch does not end is too late, or ends a second engine; the engine is replaced."""
    engine = faulty_server.engine_pid()
    (outcome,) = outcomes(transport, faulty_server, [f"a glacier by {transport.name}"])
    assert isinstance(outcome, Refused)
    assert outcome.status in {STATUS["internal"][transport.family], STATUS["too late"][transport.family]}
    wait_replaced(faulty_server, engine)
    sing(faulty_server, models)


def test_row_46_engine_is_stopped(faulty_server: Server, models: Path) -> None:
    """An engine process that is stopped from outside is noticed as well, killed and replaced: the next one answers."""
    engine = engine_of(faulty_server)
    stop(engine)
    with Tei(faulty_server) as client:
        vectors = client.embed(["hello?"], timeout_ms=60_000).vectors
    np.testing.assert_allclose(vectors, fake_answers(models, ["hello?"]), atol=1e-5)
    wait_replaced(faulty_server, engine)
    sing(faulty_server, models)


def test_row_49_crash_loop(serve: Callable[..., Server], models: Path) -> None:
    """An engine that keeps dying ends the server: exit code 1 and one line that says why."""
    options = (*FAKE, "--fake-faults", fake_faults(models))
    server = serve(*options, "--default-timeout-ms", "60000")
    assert isinstance(outcomes(Tei, server, ["volcano"])[0], Refused)
    wait_for(lambda: ready(server), "the third engine")
    kill_engine(server)
    assert server.wait() == 1
    assert "died 3 times" in server.log.splitlines()[-1]


def test_row_51_non_finite_output(serve: Callable[..., Server], models: Path, tmp_path: Path) -> None:
    """A real model that answers NaN to a text: that request gets 500 / INTERNAL, never the numbers; others go on."""
    poisoned_bundle(models, tmp_path, word="banana")
    server = serve("--precision", "fp32", *measured(tmp_path), repository=tmp_path)
    for transport in BOTH:
        bad, good = outcomes(transport, server, ["a banana", "an apple"])
        assert isinstance(bad, Refused)
        assert bad.status == STATUS["internal"][transport.family]
        assert isinstance(good, np.ndarray)
        assert np.isfinite(good).all()
    assert metric(server, "bertserve_requests_total", reason="non_finite_output") == 2
    assert metric(server, "bertserve_non_finite_outputs_total") == 2


@pytest.mark.parametrize("cores", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_lanes_that_carry_load_are_less_urgent(serve: Callable[..., Server], own_shelf: Shelf, cores: int) -> None:
    """Narrow lanes give way to the server; without any the whole engine does."""
    options = measured(own_shelf.root, "--precision", "fp32", "--threads", str(cores))
    server = serve(*options, repository=own_shelf.root)
    assert isinstance(outcomes(Tei, server, ["hello?"])[0], np.ndarray)
    engine = server.engine_pid()
    threads = [int(thread.name) for thread in Path(f"/proc/{engine}/task").iterdir()]
    urgent = os.getpriority(os.PRIO_PROCESS, server.pid)
    found = [os.getpriority(os.PRIO_PROCESS, thread) for thread in threads]
    less = found.count(min(urgent + 10, 19))
    assert less == (len(threads) if cores == 1 else cores)
    assert found.count(urgent) == len(threads) - less


@pytest.mark.slow
def test_an_engine_that_hangs_while_it_is_started_again_ends_the_server(models: Path) -> None:
    """It is warming and alive for as long as a start may take; then one line says why, and it exits for another one."""
    with faulty(models, "--engine-start-s", "8") as server:
        first = kill_engine(server)
        second = wait_for(lambda: next(iter(set(server.engine_pids()) - {first}), None), "another engine process")
        os.kill(second, signal.SIGSTOP)
        wait_for(lambda: get(server.metrics, "/readyz").status == 503, "the state warming")
        assert get(server.metrics, "/livez").status == 200
        assert server.wait() == 1
        assert "bertserve serve: the engine was not ready within 8 s" in server.log
        assert not is_running(second)
