"""Another version of a model in place of the one that serves: nothing is lost or mixed."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from tests.support.certificates import open_channel
from tests.support.clients import Grpc, HttpConnection, OpenAiFloat, RawConnection, Tei, V2Json, get, metric, post_json
from tests.support.engines import engine_of
from tests.support.models import NAME
from tests.support.poison import FP32, edit_manifest, sign, too_large
from tests.support.server import FAKE, Server, is_running, measured
from tests.support.stopping import is_stopped
from tests.support.versions import (
    BODY,
    CONTROLLED,
    SWAPPED,
    Readers,
    Shelf,
    assert_reason,
    candidate,
    engines,
    index,
    load,
    outcome,
    served,
    unload,
    wait_served,
)
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


ORT = ("--engine", "ort-cpu", "--precision", "fp32", "--default-timeout-ms", "30000")
CLIENTS = (Tei, V2Json, Grpc, Grpc)


@pytest.fixture(scope="module")
def shelf(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    """The repository of the shared server; each test adds versions."""
    return Shelf(models, tmp_path_factory.mktemp("shelf"))


@pytest.fixture(scope="module")
def server(shelf: Shelf) -> Iterator[Server]:
    """A server that loads versions when it is asked to, with a real engine."""
    with Server(shelf.root, *ORT, *measured(shelf.root), *CONTROLLED) as running:
        yield running


@pytest.mark.parametrize("swaps", [2, pytest.param(40, marks=pytest.mark.slow)])
def test_swaps_under_load_lose_nothing_and_mix_nothing(server: Server, shelf: Shelf, swaps: int) -> None:
    """Each request is answered by one version whole; what is sent after the load call's reply, by the new one."""
    times: list[tuple[float, float, int]] = []
    before = served(server)
    with Readers(server, shelf, *CLIENTS, OpenAiFloat) as readers:
        for _ in range(swaps):
            version = shelf.add()
            started = time.monotonic()
            assert load(server).status == 200
            times.append((started, time.monotonic(), version))
            readers.wait_for_more()
    readers.assert_nothing_was_lost()
    for started, ended, version in times:
        assert all(before <= one.version < version for one in readers.asked if one.ended < started)
        assert all(one.version >= version for one in readers.asked if one.started > ended)
    assert {version for _, _, version in times} <= {one.version for one in readers.asked}
    wait_for(lambda: len(engines(server)) == 1, "the end of the engines before")
    assert metric(server, "bertserve_model_version", model=NAME) == version


def test_a_version_that_appears_waits_for_a_request(server: Server, shelf: Shelf) -> None:
    """What is there at the start is served until a request loads another; the newest, if it names none."""
    before = served(server)
    newer = shelf.add()
    newest = shelf.add()
    assert served(server) == before
    assert load(server).status == 200
    assert served(server) == newest > newer


def flip(place: Path) -> None:
    data = bytearray((place / FP32).read_bytes())
    data[len(data) // 2] ^= 1
    (place / FP32).write_bytes(data)


def cut(place: Path) -> None:
    (place / FP32).write_bytes((place / FP32).read_bytes()[:-7])


OTHER_TASK = {"task": "classify", "labels": {"names": ["a", "b", "c", "d"]}, "embedding": None}


def other_task(place: Path) -> None:
    edit_manifest(place, lambda manifest: manifest.update(OTHER_TASK))
    edit_manifest(place, lambda manifest: manifest["outputs"][0].update(name="logits"))


def nonsense(place: Path) -> None:
    """Puts bytes in the model's place that are no graph, with the right digests."""
    (place / FP32).write_bytes(b"\x08\x08" * 999)
    sign(place)


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "a byte changed": (flip, "does not match its SHA-256"),
    "a file cut": (cut, "bytes, but the manifest says"),
    "a file missing": (lambda place: (place / "tokenizer.json").unlink(), "tokenizer.json is listed .* but missing"),
    "a file too many": (lambda place: (place / "extra").write_bytes(b"x"), "'extra' is not listed"),
    "no manifest": (lambda place: (place / "manifest.json").unlink(), "manifest.json is missing"),
    "another version's manifest": (
        lambda place: edit_manifest(place, lambda manifest: manifest.update(version=1)),
        "manifest.json: ",
    ),
    "no graph": (nonsense, FP32),
    "another task": (other_task, "task"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", BROKEN)
def test_a_version_that_fails_verification_never_serves(server: Server, shelf: Shelf, name: str) -> None:
    """The call, the index, the log and a counter say so, with the reason and no path; what serves serves on."""
    spoil, reason = BROKEN[name]
    before, refused = served(server), metric(server, "bertserve_swaps_total", outcome="refused")
    with Readers(server, shelf, Tei, Grpc) as readers:
        version = shelf.add(spoil)
        reply = load(server)
        readers.wait_for_more()
    readers.assert_nothing_was_lost()
    assert {one.version for one in readers.asked} == {before} == {served(server)}
    assert reply.status == 400
    said = reply.json()["error"]
    assert_reason(said, reason)
    state, told = index(server)[version]
    assert state == "UNAVAILABLE"
    assert_reason(told, reason)
    assert str(shelf.root) not in said + told
    server.wait_logged(f"version {version} rejected")
    assert metric(server, "bertserve_swaps_total", outcome="refused") == refused + 1
    shutil.rmtree(shelf.path(version))


def test_a_version_whose_warm_up_fails_never_serves(server: Server, shelf: Shelf) -> None:
    """Everything about it is in order but its answers, which are not finite; over gRPC, FAILED_PRECONDITION."""
    before = served(server)
    version = shelf.add(number=float("nan"))
    with open_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name=NAME), timeout=60)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "NaN or infinity" in refused.value.details()
    assert "NaN or infinity" in index(server)[version][1]
    assert served(server) == before
    shutil.rmtree(shelf.path(version))
    assert version not in index(server)  # what is not there needs no reason


def test_the_way_back_is_a_load_request(server: Server, shelf: Shelf) -> None:
    """It names the version before, which is loaded and replaces the newer one; nothing is lost."""
    before = served(server)
    version = shelf.add()
    with Readers(server, shelf, *CLIENTS) as readers:
        for wanted in (version, before):
            assert load(server, wanted).status == 200
            ended = time.monotonic()
            readers.wait_for_more()
            assert {one.version for one in readers.asked if one.started > ended} == {wanted}
    readers.assert_nothing_was_lost()
    assert version not in index(server)


def test_a_new_engine_that_ends_is_started_again(own_shelf: Shelf) -> None:
    """Requests that were in it fail with 503, later ones wait, and the version serves on."""
    with Server(own_shelf.root, *ORT, *measured(own_shelf.root), *CONTROLLED) as running:
        first = engines(running)
        version = own_shelf.add()
        assert load(running).status == 200
        with Readers(running, own_shelf, *CLIENTS) as readers:
            (second,) = engines(running) - first
            os.kill(second, signal.SIGKILL)
            readers.wait_for_more()
        readers.assert_each_answer_was_right()
        assert len(readers.refused) <= len(CLIENTS)
        assert {error.status for error in readers.refused} <= {503, "UNAVAILABLE"}
        assert {one.version for one in readers.asked} == {version}
        assert not engines(running) & {*first, second}
        assert index(running)[version] == ("READY", "")


@pytest.mark.slow
def test_requests_of_the_old_version_are_drained(own_shelf: Shelf) -> None:
    """What was queued for the version before is answered by it, and the next swap waits for that."""
    with (
        Server(own_shelf.root, *FAKE, *CONTROLLED, "--fake-ms", "100", "--max-batch-tokens", "16") as slow,
        ThreadPoolExecutor(8) as pool,
    ):
        body = b'{"inputs": "server server server server server server"}'
        queued = [pool.submit(post_json, slow.http, "/embed", body) for _ in range(8)]
        wait_for(lambda: get(slow.http, "/status").json()["queue"]["requests"] >= 4, "a queue")
        for _ in range(2):
            version = own_shelf.add()
            assert load(slow).status == 200
            assert served(slow) == version
            queued += [pool.submit(post_json, slow.http, "/embed", body) for _ in range(4)]
        assert [request.result().status for request in queued] == [200] * 16
        assert len({request.result().body for request in queued}) == 2  # two ways to read the text
        assert "drained in" in slow.log


@pytest.mark.slow
def test_several_who_ask_at_once(server: Server, shelf: Shelf) -> None:
    """Swaps follow one another, and who asks for what is served already is answered at once."""
    versions = [shelf.add(), shelf.add()]
    with Readers(server, shelf, Tei, Grpc) as readers, ThreadPoolExecutor(6) as pool:
        replies = list(pool.map(lambda version: load(server, version), versions * 3))
    readers.assert_nothing_was_lost()
    assert [reply.status for reply in replies] == [200] * 6
    assert served(server) in versions
    assert load(server).status == 200
    assert served(server) == versions[-1]


@pytest.mark.parametrize(
    ("version", "status", "words"),
    [(99, 404, "has no version 99"), ("01", 400, "a version number"), ([1], 400, "a version number")],
)
def test_a_version_that_there_is_not(server: Server, version: object, status: int, words: str) -> None:
    """It is looked for among the numbers that there are, and never becomes a path."""
    reply = load(server, version)
    assert reply.status == status
    assert words in reply.json()["error"]


def test_an_engine_that_is_killed_while_it_warms_up_says_nothing_of_its_version(server: Server, shelf: Shelf) -> None:
    """The call may be repeated, over HTTP and gRPC; what serves does not notice, and nothing is refused."""
    before, failed, refused = served(server), outcome(server, "failed"), outcome(server, "refused")
    version = shelf.add()
    with Readers(server, shelf, *CLIENTS) as readers, ThreadPoolExecutor(1) as pool, open_channel(server.grpc) as wire:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(wire)
        running = engines(server)
        call = pool.submit(load, server)
        os.kill(candidate(server, running), signal.SIGKILL)
        reply = call.result()
        assert reply.status == 503
        assert int(reply.headers["retry-after"]) >= 1
        assert "exited while loading" in reply.json()["error"]
        assert index(server)[version][1].endswith("exited while loading")
        second = stub.RepositoryModelLoad.future(pb.RepositoryModelLoadRequest(model_name=NAME), timeout=60)
        os.kill(candidate(server, running), signal.SIGKILL)
        assert second.code() is grpc.StatusCode.UNAVAILABLE
        readers.wait_for_more()
    readers.assert_nothing_was_lost()
    assert {one.version for one in readers.asked} == {before}
    assert (outcome(server, "failed"), outcome(server, "refused")) == (failed + 2, refused)
    assert load(server).status == 200
    assert index(server)[version] == ("READY", "")


def test_memory_that_is_short_says_nothing_of_a_version(server: Server, shelf: Shelf) -> None:
    """The engine is refused memory and says so: the call may be repeated when there is more."""
    refused = outcome(server, "refused")
    shelf.add(too_large)
    reply = load(server)
    assert reply.status == 503
    assert reply.json()["error"].endswith("out of memory")
    assert outcome(server, "refused") == refused


@pytest.mark.slow
def test_an_engine_that_dies_while_another_warms_up_comes_back_first(own_shelf: Shelf) -> None:
    """The swap waits until requests are served again, and then goes on."""
    with Server(own_shelf.root, *ORT, *measured(own_shelf.root), *CONTROLLED) as running, ThreadPoolExecutor(1) as pool:
        first = engine_of(running)
        version = own_shelf.add()
        call = pool.submit(load, running)
        candidate(running, {first})
        os.kill(first, signal.SIGKILL)
        assert call.result().status == 200
        assert served(running) == version
        with Readers(running, own_shelf, *CLIENTS) as readers:
            pass
        readers.assert_nothing_was_lost()
        assert {one.version for one in readers.asked} == {version}


@pytest.fixture
def warming(own_shelf: Shelf) -> Iterator[tuple[Server, int, int]]:
    """A server whose engine is busy for long and whose next version has begun to come up; with both engines' ids."""
    options = (*FAKE, *CONTROLLED, "--fake-faults", f"{own_shelf.token(SWAPPED[0])}:hang")
    with Server(own_shelf.root, *options, "--drain-s", "0.5") as busy, ThreadPoolExecutor(2) as pool:
        first = busy.engine_pid() or 0
        pool.submit(post_json, busy.http, "/embed", f'{{"inputs": "{SWAPPED[0]}"}}'.encode())
        wait_for(lambda: get(busy.http, "/status").json()["queue"]["requests"], "a request")
        own_shelf.add()
        pool.submit(load, busy)
        yield busy, first, candidate(busy, {first})
        busy.process.kill()


@pytest.mark.slow
def test_the_engine_that_warms_up_is_paused_while_the_other_works(warming: tuple[Server, int, int]) -> None:
    """And has a turn now and then whatever happens, so that it comes to an end."""
    server, _, second = warming
    wait_for(lambda: is_stopped(second), "a pause")
    wait_for(lambda: not is_stopped(second), "a turn")
    wait_served(server, 2)
    wait_for(lambda: not is_stopped(second), "the end of the pauses")


@pytest.mark.slow
def test_row_59_no_engine_outlives_the_server_during_a_swap(warming: tuple[Server, int, int]) -> None:
    """Not even one that is stopped when the server is killed."""
    server, *pids = warming
    wait_for(lambda: is_stopped(pids[1]), "a pause")
    server.signal(signal.SIGKILL)
    wait_for(lambda: not any(map(is_running, pids)), "the end of both engines")


@pytest.mark.slow
def test_row_58_sigterm_during_a_swap(warming: tuple[Server, int, int]) -> None:
    """The version that was to come is given up, and the exit code is 0."""
    server, *pids = warming
    assert server.stop() == 0
    wait_for(lambda: not any(map(is_running, pids)), "the end of both engines")


LOAD = f"/v2/repository/models/{NAME}/load"


def limit_files(server: Server, more: int) -> tuple[int, int]:
    """Lets a server open only so many more files; returns the limits before."""
    used = len(list(Path(f"/proc/{server.pid}/fd").iterdir()))
    before = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (used + more, before[1]))
    return before


@pytest.mark.slow
def test_file_descriptors_that_run_out_say_nothing_of_a_version(own_shelf: Shelf) -> None:
    """They are the server's own trouble: the call may be repeated, and the reason names no file."""
    with Server(own_shelf.root, *FAKE, *CONTROLLED) as server, HttpConnection(server.http) as connection:
        version = own_shelf.add()
        assert connection.call("GET", "/livez").status == 200
        before = limit_files(server, 2)
        try:
            reply = connection.call("POST", LOAD)
        finally:
            resource.prlimit(server.pid, resource.RLIMIT_NOFILE, before)
        assert reply.status == 503
        assert reply.json()["error"].endswith("Too many open files")
        assert connection.call("POST", LOAD).status == 200
        assert served(server) == version


def test_a_load_call_outlives_its_caller(own_shelf: Shelf) -> None:
    """Its version serves, and the model is in service: all as if the caller had waited."""
    with Server(own_shelf.root, *FAKE, *CONTROLLED) as running:
        assert unload(running).status == 200
        wanted = own_shelf.add()
        first = engines(running)
        with RawConnection(running.http) as caller:
            body = b'{"parameters": {"version": "%d"}}' % wanted
            caller.send(
                b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (LOAD.encode(), len(body)) + body
            )
            second = candidate(running, first)
            os.kill(second, signal.SIGSTOP)
        wait_for(lambda: metric(running, "bertserve_requests_total", reason="client_gone") == 1, "the caller's end")
        os.kill(second, signal.SIGCONT)
        wait_for(lambda: index(running).get(wanted) == ("READY", ""), "the end of the call")
        assert post_json(running.http, f"/v2/models/{NAME}/infer", BODY).status == 200


def test_a_load_call_is_answered_when_the_server_ends(own_shelf: Shelf) -> None:
    """With 503 and the reason, at once: its client is there, and the version cannot be loaded any more."""
    with Server(own_shelf.root, *FAKE, *CONTROLLED) as running, ThreadPoolExecutor(1) as pool:
        first = engines(running)
        own_shelf.add()
        call = pool.submit(load, running)
        os.kill(candidate(running, first), signal.SIGSTOP)
        assert get(running.http, "/status").json()["slot"] == {"state": "serving"}
        assert running.stop() == 0
        assert call.result().status == 503
        assert call.result().json()["error"] == "the server is shutting down"
        assert "client_gone" not in running.log


def test_an_engine_that_ends_while_it_is_drained_takes_its_requests_with_it(own_shelf: Shelf) -> None:
    """They fail with 503; those of the version that serves do not notice, and the next swap need not wait."""
    options = (*FAKE, *CONTROLLED, "--fake-faults", f"{own_shelf.token(SWAPPED[0])}:hang")
    with Server(own_shelf.root, *options) as running, ThreadPoolExecutor(1) as pool:
        (first,) = engines(running)
        held = pool.submit(post_json, running.http, "/embed", f'{{"inputs": "{SWAPPED[0]}"}}'.encode())
        wait_for(lambda: get(running.http, "/status").json()["queue"]["requests"], "a request that holds version 1")
        version = own_shelf.add()
        assert load(running).status == 200
        os.kill(first, signal.SIGKILL)
        assert held.result().status == 503
        assert served(running) == version
        assert post_json(running.http, f"/v2/models/{NAME}/infer", BODY).status == 200
        assert load(running, own_shelf.add()).status == 200
