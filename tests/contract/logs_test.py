"""The log of a running server: as JSON, with ids, without users' texts, bounded, and lost without harm (row 60)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.certificates import Certificates
from tests.support.clients import BOTH, Grpc, RawConnection, Refused, Tei, get, metric, post_json
from tests.support.engines import kill_engine
from tests.support.server import FAKE, Server, is_running
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.clients import Transport


PRIVATE = "xylophone"


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[Server]:
    """A server with a log of JSON and an access log, whose engine fails on a word."""
    options = ("--log-format", "json", "--access-log", "true", "--fake-faults", f"{_token(models)}:raise")
    with Server(models, *FAKE, *options, wait_ready=False) as running:
        running.wait_state()
        yield running


def _token(models: Path) -> int:
    vocabulary = json.loads((models / "minilm" / "1" / "tokenizer.json").read_bytes())["model"]["vocab"]
    return int(vocabulary["volcano"])


def lines(server: Server, **wanted: object) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in server.log.splitlines()]
    return [line for line in found if wanted.items() <= line.items()]


def wait_line(server: Server, **wanted: object) -> dict[str, Any]:
    """The only line that has these members, once it is there."""
    wait_for(lambda: lines(server, **wanted), f"a line with {wanted}")
    (line,) = lines(server, **wanted)
    return line


def test_every_line_is_json(server: Server) -> None:
    """The engine's too, and nothing else is written; where the server listens is told in a line as well."""
    server.wait_logged("ready: ")
    ready = next(line for line in lines(server, logger="bertserve") if line["message"].startswith("ready"))
    assert ready["http"] == f"http://{server.http}"
    assert ready["grpc"] == server.grpc
    assert ready["metrics"] == f"http://{server.metrics}/metrics"
    (model,) = ready["models"]
    assert model == {"name": "minilm", "version": "1", "precision": "fp32", "proven": True}
    assert (ready["state"], ready["engine"], ready["hardware"][1:]) == ("ready", "fake", " threads")
    assert [line["state"] for line in lines(server, logger="bertserve") if line["message"].startswith("state: ")] == [
        "warming",
        "ready",
    ]
    assert lines(server, logger="bertserve.engine")
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines(server))


def test_an_address_in_json_is_one_without_words(models: Path, tmp_path: Path) -> None:
    """A program dials it, over TLS too."""
    with Server(models, *FAKE, "--log-format", "json", tls=Certificates(tmp_path / "tls"), wait_ready=False) as server:
        server.wait_logged("ready: ")
        ready = next(line for line in lines(server) if line["message"].startswith("ready"))
    assert re.fullmatch(r"127\.0\.0\.1:\d+", ready["grpc"])
    assert ready["http"].startswith("https://127.0.0.1:")


def test_a_refused_request_is_logged_under_its_id(server: Server) -> None:
    """With the reason, and what the client was told."""
    reply = post_json(server.http, "/embed", b'{"inputs": 5}', {"X-Request-Id": "refused-1"})
    assert reply.status == 422
    line = wait_line(server, request_id="refused-1", logger="bertserve.requests")
    assert (line["level"], line["reason"], line["status"]) == ("info", "invalid_request", 422)


def test_a_refused_call_is_logged_under_its_id(server: Server) -> None:
    """On gRPC the client reads it in the trailing metadata."""
    with Grpc(server) as client, pytest.raises(Refused) as refused:
        client.embed(["x " * 100_000], truncate=False)
    line = wait_line(server, request_id=refused.value.headers["x-request-id"], logger="bertserve.requests")
    assert line["reason"] == "invalid_request"


def test_a_failure_of_the_engine_is_a_warning(server: Server) -> None:
    """Of the request; what failed in the engine process stands beside it."""
    post_json(server.http, "/embed", b'{"inputs": "a volcano"}', {"X-Request-Id": "failed-1"})
    line = wait_line(server, request_id="failed-1", logger="bertserve.requests")
    assert (line["level"], line["reason"], line["status"]) == ("warning", "engine_fault", 500)
    assert lines(server, logger="bertserve.engine", level="error")


@pytest.mark.parametrize("transport", BOTH, ids=lambda kind: kind.name)
def test_the_access_log_tells_of_each_request(server: Server, transport: type[Transport]) -> None:
    """What was asked, what came of it, where the time went, how large it was."""
    protocol = "grpc" if transport is Grpc else "http"
    with transport(server) as client:
        client.embed(["a text", "another"])
    line = wait_line(server, logger="bertserve.access", protocol=protocol, texts=2)
    assert line["route"] == ("/inference.GRPCInferenceService/ModelInfer" if transport is Grpc else "/embed")
    assert line["status"] == ("OK" if transport is Grpc else 200)
    assert (line["reason"], line["model"], line["texts"], line["tokens"]) == ("ok", "minilm", 2, 7)
    assert 0 < line["tokenize_ms"] + line["queue_ms"] + line["compute_ms"] <= line["total_ms"]
    assert line["bytes_in"] > 0
    assert transport is Grpc or line["bytes_out"] > 1000


def test_the_access_log_tells_of_refused_requests(server: Server) -> None:
    """With their status; of a path that is not ours nothing is repeated."""
    post_json(server.http, f"/{PRIVATE}", b"{}", {"X-Request-Id": "strange-1"})
    line = wait_line(server, request_id="strange-1", logger="bertserve.access")
    assert (line["status"], line["reason"], line["route"]) == (404, "not_found", "?")
    post_json(server.http, f"/v2/models/{PRIVATE}/infer", b"{}", {"X-Request-Id": "strange-2"})
    line = wait_line(server, request_id="strange-2", logger="bertserve.access")
    assert line["route"] == "/v2/models/{model}/infer"


def test_probes_are_not_in_the_access_log(server: Server) -> None:
    """Nobody asked for a line a second."""
    before = len(lines(server, logger="bertserve.access"))
    get(server.metrics, "/readyz")
    with Tei(server) as client:
        client.embed(["a text"])
    wait_for(lambda: len(lines(server, logger="bertserve.access")) > before, "the line of the text")
    assert len(lines(server, logger="bertserve.access")) == before + 1


def test_no_text_of_a_users_is_logged(server: Server) -> None:
    """Neither of what is answered nor of what is refused, whatever is wrong with it."""
    bodies: list[bytes] = [
        json.dumps({"inputs": PRIVATE}).encode(),
        json.dumps({"inputs": f"{PRIVATE} volcano"}).encode(),
        json.dumps({PRIVATE: PRIVATE}).encode(),
        json.dumps({"inputs": "x", "input": "x", PRIVATE: 1}).encode(),  # named in X-Ignored-Fields
        json.dumps({"inputs": [PRIVATE, 5]}).encode(),
        json.dumps({"inputs": PRIVATE * 10_000, "truncate": False}).encode(),
        json.dumps({"inputs": "x", "prompt_name": PRIVATE}).encode(),
        f'{{"inputs": "{PRIVATE}'.encode(),
    ]
    for index, body in enumerate(bodies):
        for path in ("/embed", "/v1/embeddings", "/v2/models/minilm/infer", f"/models/{PRIVATE}/embed", f"/{PRIVATE}"):
            headers = {"X-Request-Id": f"s-{index}", "X-Request-Timeout-Ms": PRIVATE if index == 1 else "9000"}
            post_json(server.http, path, body, headers)
    with Grpc(server) as client:
        client.embed([PRIVATE])
        with pytest.raises(Refused):
            client.embed([f"{PRIVATE} volcano"])
        with pytest.raises(Refused):
            client.embed([PRIVATE * 10_000], truncate=False)
    post_json(server.http, "/embed", b'{"inputs": "the last"}', {"X-Request-Id": "last-1"})
    wait_line(server, request_id="last-1", logger="bertserve.access")
    assert len(lines(server, logger="bertserve.access")) > 35
    assert PRIVATE not in server.log


def test_refusals_are_no_storm(models: Path) -> None:
    """Of many of one reason some are logged; the metrics count every refusal."""
    with Server(models, *FAKE) as server:
        for _ in range(300):
            post_json(server.http, "/embed", b'{"inputs": 5}')
        assert metric(server, "bertserve_requests_total", reason="invalid_request") == 300
        assert server.log.count("request rejected") < 200
        assert metric(server, "bertserve_log_lines_lost_total") == 0


def test_there_is_no_access_log_by_default(models: Path) -> None:
    """Answered requests leave no line."""
    with Server(models, *FAKE) as server:
        before = server.log
        with Tei(server) as client:
            client.embed(["a text"])
        post_json(server.http, "/embed", b'{"inputs": 5}', {"X-Request-Id": "refused-2"})
        server.wait_logged("refused-2")
        added = server.log.removeprefix(before).splitlines()
        assert len(added) == 1


SENT = 30


def serve_some(server: Server) -> None:
    """Answers, and refusals that each want a line in the log."""
    with Tei(server) as client:
        for _ in range(SENT):
            client.embed(["a text"])
    for _ in range(SENT):
        assert post_json(server.http, "/embed", b'{"inputs": 5}').status == 422


def lost(server: Server) -> float:
    return metric(server, "bertserve_log_lines_lost_total")


@contextlib.contextmanager
def writing_to(models: Path, output: int, *options: str) -> Iterator[Server]:
    """A server that is ready and whose output goes there."""
    with Server(models, *FAKE, *options, wait_ready=False, output=output) as server:
        server.wait_state()
        yield server


@pytest.mark.parametrize("form", ["text", pytest.param("json", marks=pytest.mark.slow)])
def test_row_60_the_log_pipe_is_closed(models: Path, form: str) -> None:
    """Every request is answered, the lines are counted as lost, and the end is a good one."""
    reader, writer = os.pipe()
    with writing_to(models, writer, "--log-format", form, "--access-log", "true") as server:
        os.close(writer)
        os.close(reader)
        serve_some(server)
        wait_for(lambda: lost(server) >= 2 * SENT, "the lost lines to be counted")
        assert server.stop() == 0


@pytest.mark.slow
def test_row_60_the_disk_is_full(models: Path) -> None:
    """From the start: the announcement and every line are lost, and nothing else."""
    full = os.open("/dev/full", os.O_WRONLY)
    with writing_to(models, full, "--access-log", "true") as server:
        os.close(full)
        serve_some(server)
        wait_for(lambda: lost(server) >= 2 * SENT, "the lost lines to be counted")
        assert server.stop() == 0


def test_row_60_nobody_reads_the_log(models: Path) -> None:
    """A pipe that is full and stays so: what is written waits, what is served does not."""
    reader, writer = os.pipe()
    try:
        with writing_to(models, writer, "--access-log", "true") as server:
            os.close(writer)
            with Tei(server) as client:
                for _ in range(600):  # more lines than a pipe holds
                    client.embed(["a text"])
            assert metric(server, "bertserve_requests_total", reason="ok") >= 599
            assert server.stop() == 0
    finally:
        os.close(reader)


@pytest.mark.slow
def test_row_60_an_engine_dies_while_the_log_is_lost(models: Path) -> None:
    """The engine process writes there too: a new one starts and is ready."""
    full = os.open("/dev/full", os.O_WRONLY)
    with writing_to(models, full) as server:
        os.close(full)
        engine = kill_engine(server)
        wait_for(lambda: not is_running(engine), "its end")
        wait_for(lambda: metric(server, "bertserve_engine_restarts_total") == 1, "it to be noticed")
        server.wait_state()
        serve_some(server)
        assert server.stop() == 0


def test_row_60_descriptors_run_out(models: Path) -> None:
    """Who is connected is served on; others are served again as soon as descriptors are free."""
    with Server(models, *FAKE) as server, Tei(server) as connected:
        connected.embed(["a text"])
        used = len(list(Path(f"/proc/{server.pid}/fd").iterdir()))
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (used + 20, used + 20))
        with contextlib.ExitStack() as crowd:
            for _ in range(60):
                with contextlib.suppress(OSError):
                    crowd.enter_context(RawConnection(server.http))
            for _ in range(SENT):
                connected.embed(["a text"])
        wait_for(lambda: _answers(server), "a new connection to be served")
        serve_some(server)
        assert len(server.log.splitlines()) < 100
        assert server.stop() == 0


def _answers(server: Server) -> bool:
    try:
        return get(server.http, "/readyz").status == 200
    except OSError:
        return False
