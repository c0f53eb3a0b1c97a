"""Front processes: what one takes with it when it is killed, and what is one for all of them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import ssl
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.asking import asking, failures, wait_for_more
from tests.support.certificates import Certificates
from tests.support.clients import HttpConnection, RawConnection, Refused, get, metric
from tests.support.credentials import FIRST, SECOND, bearer, write_keys
from tests.support.engines import stopped_engine
from tests.support.expected import fake_answers, token_ids
from tests.support.fronts import FRONTS, KINDS, LOST, Http, Steady, holder, listed, on_each_front, wait_up
from tests.support.http2 import RawHttp2
from tests.support.models import NAME
from tests.support.server import FAKE, Server, is_running
from tests.support.stopping import stop
from tests.support.versions import CONTROLLED, Readers, load, unload
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.fronts import Client
    from tests.support.versions import Shelf

CLIENTS = 4
"""Of each wire."""
STILL_S = 16.0
"""Longer than a front may be silent."""
METADATA = "/inference.GRPCInferenceService/ServerMetadata"
JSON = {"Content-Type": "application/json"}
SMALL = b'{"inputs": "small"}'


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[Server]:
    """A server with two fronts, a cache of answers and an access log."""
    options = ("--response-cache-mb", "8", "--access-log", "true", "--log-format", "json")
    with Server(models, *FAKE, *FRONTS, *options, wait_ready=False) as running:
        running.wait_state()
        wait_up(running)
        yield running


@pytest.fixture
def clients(server: Server) -> Iterator[list[Client]]:
    """A client of each front over each wire."""
    with contextlib.ExitStack() as stack:
        yield [client for kind in KINDS for client in on_each_front(server, kind, stack).values()]


def counters(server: Server) -> dict[tuple[str, str], float]:
    """Every sample that may not fall, by its name and labels."""
    families = text_string_to_metric_families(get(server.metrics, "/metrics").body.decode())
    return {
        (sample.name, str(sorted(sample.labels.items()))): sample.value
        for family in families
        if family.type in {"counter", "histogram"}
        for sample in family.samples
    }


def wait_idle(server: Server) -> None:
    """Waits until nothing is held of what clients had, neither in the core's books nor in the fronts'."""
    gauges = ("bertserve_admitted_tokens", "bertserve_connections")
    for gauge in gauges:
        wait_for(lambda gauge=gauge: metric(server, gauge) == 0, f"{gauge} of 0")
    wait_for(lambda: requests_in_flight(server) == 0, "no request")
    wait_for(lambda: not any(listed(server).values()), "fronts without connections")


def requests_in_flight(server: Server) -> int:
    return int(get(server.metrics, "/status").json()["queue"]["requests"])


def readiness(server: Server) -> int:
    return get(server.metrics, "/readyz").status


@pytest.mark.parametrize("kills", [pytest.param(5, id="few"), pytest.param(100, id="many", marks=pytest.mark.slow)])
def test_a_front_that_is_killed_takes_its_own_connections_with_it_and_nothing_else(models: Path, kills: int) -> None:
    """Connections of the others lose nothing, it is started again, and all is accounted for; both at once, too."""
    dice, killed = random.Random(1), set[int]()
    with (
        Server(models, *FAKE, *FRONTS, "--fake-ms", "2", "--max-connection-age-s", "0") as server,
        contextlib.ExitStack() as stack,
    ):
        steady = [Steady(server, KINDS[number % 2], number) for number in range(2 * CLIENTS)]
        wait_up(server)
        for client in steady:
            stack.callback(client.close)
        with asking(*(client.ask for client in steady)) as askers, asking(lambda: readiness(server)) as probes:
            before = counters(server)
            while len(killed) < kills:
                victims = dice.sample(sorted(listed(server)), dice.choice((1, 1, 1, 2)))
                for pid in victims:
                    os.kill(pid, signal.SIGKILL)
                killed.update(victims)
                wait_up(server, without=killed)
                wait_for_more(askers, 2)
                now = counters(server)
                assert {sample: value for sample, value in before.items() if now.get(sample, 0) < value} == {}
                before = now
        assert failures([*askers, *probes]) == []
        assert {status for probe in probes for status in probe.answers} == {200}
        assert {refused.status for asker in askers for refused in asker.refused} <= {LOST}
        for client, asker in zip(steady, askers, strict=True):
            known = [pid for pid in client.losses if pid is not None]
            assert set(known) <= killed
            assert len(set(known)) == len(known)
            assert client.holder not in killed
            vectors = [answer.vectors[0] for _, answer in asker.answers]
            np.testing.assert_allclose(vectors, fake_answers(models, [text for text, _ in asker.answers]), atol=1e-5)
        assert any(client.losses for client in steady)
        stack.close()
        wait_idle(server)
        assert metric(server, "bertserve_front_restarts_total") == len(killed)
        assert metric(server, "bertserve_fronts") == 2
        assert metric(server, "bertserve_front_resident_memory_bytes") > 20e6
        # An answer that was lost may have been counted; what a front counted in its last moments may be lost.
        answered, lost = (sum(len(getattr(asker, part)) for asker in askers) for part in ("answers", "refused"))
        assert answered // 2 < metric(server, "bertserve_requests_total", reason="ok") <= answered + lost
        assert "nhandled exception" not in server.log


def test_a_front_is_killed_with_requests_in_the_queue(models: Path) -> None:
    """What its clients asked is given up, what others asked is answered, and their connections end at once."""
    with Server(models, *FAKE, *FRONTS) as server, contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:
        clients = [(pid, client) for kind in KINDS for pid, client in on_each_front(server, kind, stack).items()]
        with stopped_engine(server):
            asked = [(pid, pool.submit(client.embed, ["a text"])) for pid, client in clients]
            wait_for(lambda: requests_in_flight(server) == len(asked), "all to be admitted")
            victim = next(iter(listed(server)))
            os.kill(victim, signal.SIGKILL)
            lost = [reply for pid, reply in asked if pid == victim]
            assert [isinstance(reply.exception(), ConnectionError) for reply in lost] == [True] * len(KINDS)
            wait_for(lambda: requests_in_flight(server) == len(KINDS), "those to be given up")
        for _, reply in asked:
            if reply not in lost:
                np.testing.assert_allclose(reply.result().vectors, fake_answers(models, ["a text"]), atol=1e-5)
        stack.close()
        wait_idle(server)


@pytest.mark.slow
def test_only_a_front_that_stands_still_by_itself_is_killed(models: Path) -> None:
    """Not if the core did, as when a container is paused: it has not read their reports yet."""
    with Server(models, *FAKE, *FRONTS) as server, contextlib.ExitStack() as stack:
        clients = on_each_front(server, Http, stack)
        stop(server.pid)
        time.sleep(STILL_S)
        server.signal(signal.SIGCONT)
        for client in clients.values():
            client.embed(["after a pause"])
        assert listed(server).keys() == clients.keys()
        victim = next(iter(clients))
        stop(victim)
        wait_for(lambda: not is_running(victim), "the end of the front", 2 * STILL_S)
        assert f"killing the front process {victim}: it has been silent" in server.log
        wait_up(server, without={victim})


def test_fronts_end_with_the_core(models: Path) -> None:
    """No process is left, and every client hears of it, whether or not something is under way."""
    with Server(models, *FAKE, *FRONTS) as server, contextlib.ExitStack() as stack:
        clients = [client for kind in KINDS for client in on_each_front(server, kind, stack).values()]
        processes = server.child_pids()
        assert listed(server).keys() <= set(processes)
        server.signal(signal.SIGKILL)
        assert server.wait() == -signal.SIGKILL
        wait_for(lambda: not any(map(is_running, processes)), "the end of all processes")
        for client in clients:
            with pytest.raises(ConnectionError):
                client.embed(["a text"])


def test_requests_on_every_front_are_finished_at_the_end(models: Path) -> None:
    """After SIGTERM what is under way is answered, then all processes end."""
    with Server(models, *FAKE, *FRONTS) as server, contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:
        clients = [client for kind in KINDS for client in on_each_front(server, kind, stack).values()]
        processes = server.child_pids()
        with stopped_engine(server):
            asked = [pool.submit(client.embed, [f"text {number}"]) for number, client in enumerate(clients)]
            wait_for(lambda: requests_in_flight(server) == len(asked), "all to be admitted")
            server.signal(signal.SIGTERM)
            server.wait_logged("state: draining")
        answers = [reply.result().vectors[0] for reply in asked]
        expected = fake_answers(models, [f"text {number}" for number in range(len(asked))])
        np.testing.assert_allclose(answers, expected, atol=1e-5)
        stack.close()
        assert server.wait() == 0
        assert not any(map(is_running, processes))


def test_a_front_that_hangs_does_not_keep_the_server_from_its_end(models: Path) -> None:
    """Neither one that has connections, nor one that is not up yet."""
    with Server(models, *FAKE, *FRONTS, "--drain-s", "1") as server, RawConnection(server.http):
        wait_up(server)
        begun = set(server.child_pids())
        holding = next(pid for pid, connections in listed(server).items() if connections)
        for pid in listed(server).keys() - {holding}:
            os.kill(pid, signal.SIGKILL)
        starting = wait_for(lambda: set(server.child_pids()) - begun, "the start of another")
        for pid in (holding, *starting):
            stop(pid)
        assert listed(server).keys() == {holding}
        assert server.stop() == 0
        assert not any(map(is_running, (holding, *starting)))


def test_a_limit_of_connections_is_one_for_all_fronts(models: Path) -> None:
    """The next one is rejected, whichever front has room; a place that comes free on any is taken."""
    with Server(models, *FAKE, *FRONTS, "--max-connections", "3") as server, contextlib.ExitStack() as stack:
        wait_up(server)
        begun = [stack.enter_context(RawConnection(server.http)) for _ in range(3)]
        for connection in begun:
            connection.send(b"POST /embed HTTP/1.1\r\nHost: x\r\n")
        wait_for(lambda: metric(server, "bertserve_connections", protocol="http") == 3, "three connections")
        assert sorted(listed(server).values()) == [1, 2]
        assert get(server.http, "/livez").status == 503
        with RawConnection(server.grpc) as refused:
            refused.read_to_end()
        assert metric(server, "bertserve_connections_refused_total", ports="clients", reason="full") == 2
        begun[0].socket.close()
        wait_for(lambda: metric(server, "bertserve_connections", protocol="http") == 2, "the end of one")
        assert get(server.http, "/livez").status == 200


def test_a_connection_that_a_front_has_no_descriptor_for_gives_its_place_back(models: Path) -> None:
    """The front's client is told by the end of the connection, and the front serves others as before."""
    with Server(models, *FAKE, *FRONTS) as server, contextlib.ExitStack() as stack:
        clients = on_each_front(server, Http, stack)
        held = listed(server)
        for pid in clients:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (1, 1))  # those that are open stay so
        for _ in range(4):
            assert stack.enter_context(RawConnection(server.http)).read_to_end() == b""
        wait_for(lambda: listed(server) == held, "the places to be given back")
        for client in clients.values():
            client.embed(["as before"])


def test_an_idle_connection_of_any_front_gives_way(models: Path) -> None:
    """The one that has been idle longest, although another front has fewer."""
    with (
        Server(models, *FAKE, *FRONTS, "--max-connections", "3") as server,
        contextlib.ExitStack() as stack,
    ):
        wait_up(server)
        first, *others = (stack.enter_context(HttpConnection(server.http)) for _ in range(3))
        for connection in (first, *others):
            assert connection.call("GET", "/livez").status == 200

        def has_place() -> bool:
            assert [connection.call("GET", "/livez").status for connection in others] == [200, 200]
            return get(server.http, "/livez").status == 200

        wait_for(has_place, "the place of the first")
        assert metric(server, "bertserve_connections_displaced_total", ports="clients") >= 1
        with pytest.raises(ConnectionError):
            first.call("GET", "/livez")


def test_a_change_of_the_keys_reaches_every_front(models: Path, tmp_path: Path) -> None:
    """Also connections that are open: the new key is good on each of them, and the old one is not."""
    file = write_keys(tmp_path / "keys", FIRST)
    with Server(models, *FAKE, *FRONTS, "--api-keys-file", str(file)) as server, contextlib.ExitStack() as stack:
        wait_up(server)
        http = [stack.enter_context(HttpConnection(server.http)) for _ in range(4)]
        grpc = [stack.enter_context(RawHttp2(server.grpc)) for _ in range(4)]
        streams = iter(range(1, 1000, 2))

        def taken(key: str) -> set[bool]:
            """Whether the connections take a key: a value for each that some of them say."""
            statuses = [connection.call("GET", "/info", headers=bearer(key)).status for connection in http]
            stream, codes = next(streams), []
            for connection in grpc:
                connection.call(stream, b"", METADATA, authorization=f"Bearer {key}")
                codes.append(connection.reply(stream).status)
            return {status == 200 for status in statuses} | {code == 0 for code in codes}

        assert taken(FIRST) == {True}
        assert list(listed(server).values()) == [4, 4]
        assert taken(SECOND) == {False}
        write_keys(file, SECOND)
        wait_for(lambda: taken(SECOND) == {True}, "the new key on every connection")
        assert taken(FIRST) == {False}


def test_a_new_certificate_is_shown_by_every_front(models: Path, tmp_path: Path) -> None:
    """On both ports."""
    certificates, others = Certificates(tmp_path / "before"), Certificates(tmp_path / "after")
    before, after = (ssl.PEM_cert_to_DER_cert(each.cert.read_text(encoding="ascii")) for each in (certificates, others))
    anyone = ssl.create_default_context()
    anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE
    anyone.set_alpn_protocols(["http/1.1", "h2"])
    with Server(models, *FAKE, *FRONTS, tls=certificates) as server:
        wait_up(server)

        def shown() -> set[bytes | None]:
            """The certificates that connections see, of which each front has some of each port."""
            with contextlib.ExitStack() as stack:
                seen = set()
                for address in [str(server.http)] * 2 + [str(server.grpc)] * 2:
                    opened = stack.enter_context(anyone.wrap_socket(RawConnection(address).socket))
                    seen.add(opened.getpeercert(binary_form=True))
                assert min(listed(server).values()) >= 2
                return seen

        assert shown() == {before}
        certificates.replace_by(others)
        wait_for(lambda: shown() == {after}, "the new certificate alone")


def test_what_is_counted_is_counted_for_all_fronts(server: Server, clients: list[Client]) -> None:
    """Metrics, `/status` and v2's statistics say the same, whichever process is asked for them."""
    addresses = [server.metrics, *[server.http] * 4]

    def counts() -> dict[str, set[Any]]:
        """Each count, as those who are asked tell it."""
        with contextlib.ExitStack() as stack:  # all held, so that each front is asked
            asked = [stack.enter_context(HttpConnection(address)) for address in addresses]
            statuses = [connection.call("GET", "/status").json()["totals"] for connection in asked]
            scrapes = [connection.call("GET", "/metrics").body.decode().splitlines() for connection in asked]
            models = [connection.call("GET", f"/v2/models/{NAME}/stats").json() for connection in asked[1:]]
        stages = [model["model_stats"][0]["inference_stats"] for model in models]
        samples = [dict(line.rsplit(" ", 1) for line in lines if line[0] != "#") for lines in scrapes]
        ok = 'bertserve_requests_total{{model="{}",protocol="{}",reason="ok"}}'
        return {
            "requests": {status["requests"] for status in statuses},
            "texts": {status["texts"] for status in statuses},
            "http": {float(sample[ok.format(NAME, "http")]) for sample in samples},
            "grpc": {float(sample[ok.format(NAME, "grpc")]) for sample in samples},
            "success": {stage["success"]["count"] for stage in stages},
            "computed": {stage["compute_infer"]["count"] for stage in stages},
        }

    before = counts()
    requests, texts = 0, 0
    for number in range(10):
        for place, client in enumerate(clients):
            client.embed([f"counted {place} {number} {text}" for text in range(1 + number % 3)])
            requests, texts = requests + 1, texts + 1 + number % 3
    added = {"requests": requests, "texts": texts, "success": requests, "computed": requests}
    expected = added | {"http": requests / 2, "grpc": requests / 2}
    assert {name: len(values) for name, values in before.items()} == dict.fromkeys(expected, 1)
    total = {name: {values.pop() + expected[name]} for name, values in before.items()}
    wait_for(lambda: counts() == total, f"{total} and not {counts()}")


def test_a_version_serves_on_every_front_before_the_reply_of_its_load(own_shelf: Shelf) -> None:
    """What is sent after the reply is answered by the new version, or not at all once it is unloaded."""
    engine = ("--engine", "ort-cpu", "--precision", "fp32")
    with Server(own_shelf.root, *engine, *FRONTS, *CONTROLLED) as server, contextlib.ExitStack() as stack:
        clients = [client for kind in KINDS for client in on_each_front(server, kind, stack).values()]
        with Readers(server, own_shelf, *KINDS, *KINDS) as readers:
            assert min(listed(server).values()) >= 4
            for _ in range(3):
                version = own_shelf.add()
                assert load(server).status == 200
                answers = [client.embed(["server request"]) for client in clients]
                assert {own_shelf.version_of(["server request"], answer.vectors) for answer in answers} == {version}
                readers.wait_for_more()
        readers.assert_nothing_was_lost()
        assert sorted({one.version for one in readers.asked}) == [1, 2, 3, 4]
        assert unload(server).status == 200
        for client in clients:
            with pytest.raises(Refused):
                client.embed(["server request"])
        assert load(server).status == 200
        for client in clients:
            client.embed(["server request"])


def test_an_answer_is_kept_for_all_fronts(clients: list[Client], models: Path) -> None:
    """Whichever front asked first, over whichever wire, the others are given the same."""
    for number, first in enumerate(clients):
        text = f"kept {number}"
        answers = [client.embed([text]) for client in (first, *clients)]
        hits = [answer.headers.get("x-cache") or answer.headers.get("bertserve-cache") for answer in answers]
        assert hits == [None, *["hit"] * len(clients)]
        for answer in answers:
            np.testing.assert_allclose(answer.vectors, fake_answers(models, [text]), atol=1e-5)


def test_a_text_that_all_fronts_ask_for_is_computed_once(server: Server, clients: list[Client], models: Path) -> None:
    """Those that come while it is computed wait for the same row."""

    def counted() -> dict[str, float]:
        return {kind: metric(server, "bertserve_cache_texts_total", result=kind) for kind in ("miss", "shared", "hit")}

    before, text = counted(), "asked by all"
    with ThreadPoolExecutor() as pool:
        with stopped_engine(server):
            asked = [pool.submit(client.embed, [text]) for client in clients]
            tokens = len(asked) * len(token_ids(models, text))
            wait_for(lambda: metric(server, "bertserve_admitted_tokens") == tokens, "all to be admitted")
        for reply in asked:
            np.testing.assert_allclose(reply.result().vectors, fake_answers(models, [text]), atol=1e-5)
    after = counted()
    assert {kind: after[kind] - before[kind] for kind in after} == {"miss": 1, "shared": len(clients) - 1, "hit": 0}


def test_ids_differ_and_each_request_has_one_line(server: Server, clients: list[Client]) -> None:
    """Ids that the server makes are not made twice; lines of processes that write at once stay whole."""

    def logged() -> list[str]:
        lines = [json.loads(line) for line in server.log.splitlines()]
        return [line["request_id"] for line in lines if line["logger"] == "bertserve.access"]

    def ask(client: Client) -> set[str | None]:
        return {client.embed([f"line {number}"]).headers.get("x-request-id") for number in range(50)}

    before = wait_for(logged, "lines of the first requests")
    with ThreadPoolExecutor() as pool:
        told = set().union(*pool.map(ask, clients)) - {None}  # over gRPC it is told with an error
    expected = len(before) + 50 * len(clients)
    wait_for(lambda: len(logged()) >= expected, "a line for each")
    ids = logged()
    assert len(set(ids)) == len(ids) == expected
    assert len(told) == 50 * sum(isinstance(client, Http) for client in clients)
    assert told <= set(ids)


def test_a_client_s_id_is_kept(server: Server, clients: list[Client]) -> None:
    """On every front, over both wires."""
    for number, client in enumerate(clients):
        own = f"own-{number}"
        if isinstance(client, Http):
            headers = {"X-Request-Id": own, **JSON}
            assert client._connection.call("POST", "/embed", SMALL, headers).headers["x-request-id"] == own
        else:
            client.connection.call(1001, b"", METADATA, x_request_id=own)
            assert client.connection.reply(1001).status == 0
        wait_for(lambda own=own: f'"request_id":"{own}"' in server.log, "its line")


def test_connections_are_spread_evenly(server: Server) -> None:
    """Each goes to the front with the fewest; what the kernel tells agrees with `/status`."""
    wait_idle(server)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(KINDS[number % 2](server)) for number in range(8)]
        for client in clients:
            client.embed(["spread"])
        held = Counter(holder(server, client) for client in clients)
        assert held == listed(server) == dict.fromkeys(held, 4)
        assert server.pid not in held
    wait_idle(server)


def test_one_process_lists_no_fronts(serve: Callable[..., Server]) -> None:
    """It has no child but the engine's process."""
    server = serve(*FAKE, "--front-processes", "1")
    assert get(server.metrics, "/status").json()["fronts"] is None
    assert server.child_pids() == server.engine_pids()
    assert metric(server, "bertserve_fronts") == 0
