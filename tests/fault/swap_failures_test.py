"""A version that is not served for a reason that passes may be tried again, and a load call outlives its caller."""

from __future__ import annotations

import os
import resource
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from serving.rollout.unserved import TRIES
from tests.support.clients import HttpConnection, RawConnection, get, metric, post_json
from tests.support.models import NAME
from tests.support.server import FAKE, Server
from tests.support.tasks import tiny_model, write_bundle
from tests.support.versions import (
    BODY,
    CONTROLLED,
    SWAPPED,
    WATCHED,
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
    from tests.support.clients import HttpReply

LOAD = f"/v2/repository/models/{NAME}/load"


@pytest.mark.long
def test_a_watching_server_tries_again(own_shelf: Shelf) -> None:
    """By itself, and nothing counts as refused; versions that are removed are forgotten."""
    with Server(own_shelf.root, *FAKE, *WATCHED) as watching:
        first = engines(watching)
        version = own_shelf.add()
        os.kill(candidate(watching, first), signal.SIGKILL)
        wait_served(watching, version)
        assert "ended while it was loading; tried again in 1 s (try 2 of" in watching.log
        assert (outcome(watching, "failed"), outcome(watching, "refused")) == (1, 0)
        unfinished = own_shelf.path(version + 1)
        unfinished.mkdir()
        wait_for(lambda: "incomplete" in index(watching).get(version + 1, ("", ""))[1], "an incomplete version")
        unfinished.rmdir()
        wait_for(lambda: version + 1 not in index(watching), "no word of it")


@pytest.mark.long
def test_what_is_tried_again_says_when(own_shelf: Shelf) -> None:
    with (
        Server(own_shelf.root, *FAKE, *CONTROLLED, "--watch-models-s", "3600") as running,
        ThreadPoolExecutor(1) as pool,
    ):
        first = engines(running)
        version = own_shelf.add()
        call = pool.submit(load, running)
        os.kill(candidate(running, first), signal.SIGKILL)
        assert call.result().headers["retry-after"] == "3600"
        state, reason = index(running)[version]
        assert state == "UNAVAILABLE"
        assert_reason(reason, rf"; tried again in 3[56]\d\d s \(try 2 of {TRIES}\)$")
        assert load(running).status == 200
        assert index(running)[version] == ("READY", "")


def limit_files(server: Server, more: int) -> tuple[int, int]:
    """Lets a server open only so many more files; returns the limits before."""
    used = len(list(Path(f"/proc/{server.pid}/fd").iterdir()))
    before = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (used + more, before[1]))
    return before


@pytest.mark.long
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


@pytest.mark.long
def test_a_watching_server_gives_up_in_the_end(own_shelf: Shelf) -> None:
    """After its last try a version counts as refused and waits for a change, which begins anew."""
    with Server(own_shelf.root, *FAKE, "--watch-models-s", "0.01") as watching:
        before = limit_files(watching, 2)
        version = own_shelf.add()
        wait_for(lambda: outcome(watching, "refused"), "the end of the tries", 30)
        assert outcome(watching, "failed") == TRIES - 1
        state, reason = index(watching)[version]
        assert state == "UNAVAILABLE"
        assert f"given up after {TRIES} tries" in reason
        assert served(watching) == 1
        (own_shelf.path(version) / "manifest.json").touch()
        wait_for(lambda: outcome(watching, "failed") > TRIES, "two tries more")
        resource.prlimit(watching.pid, resource.RLIMIT_NOFILE, before)
        wait_served(watching, version)


def test_a_load_call_outlives_its_caller(own_shelf: Shelf) -> None:
    """Its version serves, newer ones are passed over, the model is in service: all as if the caller had waited."""
    with Server(own_shelf.root, *FAKE, *CONTROLLED) as running:
        assert unload(running).status == 200
        wanted, newer = own_shelf.add(), own_shelf.add()
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
        wait_for(lambda: "passed over" in index(running).get(newer, ("", ""))[1], "the end of the call")
        assert index(running)[wanted] == ("READY", "")
        assert post_json(running.http, f"/v2/models/{NAME}/infer", BODY).status == 200


def test_a_load_call_is_answered_when_the_server_ends(own_shelf: Shelf) -> None:
    """With 503 and the reason, at once: its client is there, and the version cannot be loaded any more."""
    with Server(own_shelf.root, *FAKE, *CONTROLLED) as running, ThreadPoolExecutor(1) as pool:
        first = engines(running)
        own_shelf.add()
        call = pool.submit(load, running)
        os.kill(candidate(running, first), signal.SIGSTOP)
        assert get(running.http, "/status").json()["slot"] == {"state": "serving", "previous": None}
        assert running.stop() == 0
        assert call.result().status == 503
        assert call.result().json()["error"] == "the server ends before the version could be loaded"
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


@pytest.mark.long
def test_a_swap_that_began_before_another_was_rolled_back(tmp_path: Path) -> None:
    """What it would bring back has been given up with its engine: it is to be asked for once more."""
    for name in ("one", "two"):
        write_bundle(tmp_path, tiny_model("embed"), name)
    with Server(tmp_path, *FAKE, *CONTROLLED) as running, ThreadPoolExecutor(1) as pool:

        def load_newest(name: str) -> HttpReply:
            return post_json(running.http, f"/v2/repository/models/{name}/load", b"{}")

        first = engines(running)
        for name in ("one", "two"):
            write_bundle(tmp_path, tiny_model("embed"), name)
        assert load_newest("one").status == 200
        (second,) = engines(running) - first
        wait_for(lambda: "is drained after" in running.log, "the way back")
        call = pool.submit(load_newest, "two")
        third = candidate(running, {*first, second})
        os.kill(third, signal.SIGSTOP)
        os.kill(second, signal.SIGKILL)
        wait_for(lambda: metric(running, "bertserve_swaps_total", outcome="rolled_back") == 1, "the way back")
        os.kill(third, signal.SIGCONT)
        assert call.result().status == 503
        assert "other models changed" in call.result().json()["error"]
        assert [get(running.http, f"/v2/models/{name}").json()["versions"] for name in ("one", "two")] == [["1"], ["1"]]
        assert load_newest("two").status == 200
        assert [get(running.http, f"/v2/models/{name}").json()["versions"] for name in ("one", "two")] == [["1"], ["2"]]
