"""MLPerf's LoadGen against a real server with the fake engine. Costs about 15 s of CPU."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import socketserver
import threading
from queue import SimpleQueue
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from loadtest.errors import BenchError
from loadtest.generator.child import Child
from loadtest.generator.messages import Target
from loadtest.mlperf import system
from loadtest.mlperf.__main__ import IMPOSSIBLE, MISSED, PASSED, main
from loadtest.mlperf.library import Conversation, Library
from loadtest.mlperf.scenarios import SCENARIOS
from tests.support.server import FAKE, Server, free_port
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mlperf_loadgen") is None, reason="mlcommons-loadgen is not installed"
)
TEXTS = 50
LOGS = ("mlperf_log_summary.txt", "mlperf_log_detail.txt")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    file = tmp_path / "texts.txt"
    file.write_text("".join(f"Text number {index}.\n" for index in range(TEXTS)))
    return file


@pytest.mark.parametrize(
    "scenario",
    # Offline is asked below too, and of a server that hangs up all but the offline one.
    [pytest.param(name, marks=[pytest.mark.long] * (name in {"multi-stream", "offline"})) for name in SCENARIOS],
)
def test_every_scenario_runs_in_both_modes(
    fake_server: Server, tmp_path: Path, texts: Path, capsys: pytest.CaptureFixture[str], scenario: str
) -> None:
    """LoadGen's verdict is the exit code; its settings and logs lie in a folder for each mode."""
    url = f"http://{fake_server.http}"
    words = ["--target", url, "--reference", url, "--mode", "both", "--scenario", scenario, "--data", str(texts)]
    short = ["--seconds", "0.4", "--rate", "1500", "--p99-ms", "10000", "--out", str(tmp_path)]
    (tmp_path / scenario / "accuracy").mkdir(parents=True)
    (tmp_path / scenario / "accuracy" / "old.txt").touch()
    code = main([*words, *short])
    said = capsys.readouterr().out
    name = SCENARIOS[scenario].name
    assert code == (PASSED if f"{name}, performance: VALID" in said else MISSED)
    assert f"{name}, accuracy: PASSED, mean cosine 1.0000" in said
    assert "0.4 s; not compliant: MLPerf requires at least 600 s" in said
    for mode in ("performance", "accuracy"):
        folder = tmp_path / scenario / mode
        assert {*LOGS, "user.conf"} <= {file.name for file in folder.iterdir() if file.stat().st_size}
        assert f"bert.{name}.min_duration = 400" in (folder / "user.conf").read_text()
        assert not (folder / "old.txt").exists()
    logged = json.loads((tmp_path / scenario / "accuracy" / "mlperf_log_accuracy.json").read_text())
    assert {one["qsl_idx"] for one in logged} == {*range(TEXTS)}


def test_a_cache_of_answers_is_not_compliant(
    models: Path, tmp_path: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """MLPerf forbids it: it is named wherever it is found."""
    with Server(models, *FAKE, "--response-cache-mb", "8") as server:
        words = ["--target", f"http://{server.http}", "--scenario", "offline", "--data", str(texts)]
        main([*words, "--seconds", "0.4", "--out", str(tmp_path)])
    assert "; not compliant: the response cache is on, and MLPerf forbids it" in capsys.readouterr().out


@contextlib.contextmanager
def listening(handler: type[socketserver.BaseRequestHandler]) -> Iterator[int]:
    """The port of a server that handles each connection in a thread."""

    class Listener(socketserver.ThreadingTCPServer):
        request_queue_size = 512

    with Listener(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


class HangUp(socketserver.BaseRequestHandler):
    """Closes every connection at its first request."""

    def handle(self) -> None:
        self.request.recv(1)


@pytest.mark.parametrize("scenario", ["multi-stream", "server"])
def test_a_failed_request_voids_the_run(tmp_path: Path, texts: Path, scenario: str) -> None:
    """LoadGen comes to its end, and no verdict is taken from it."""
    conf = tmp_path / "user.conf"
    conf.write_text(f"*.{SCENARIOS[scenario].name}.min_duration = 100\n*.Server.target_qps = 500\n")
    asked = {"task": "embed", "data": str(texts), "scenario": scenario, "mode": "performance"}
    with listening(HangUp) as port, Child("loadtest.mlperf.run") as child:
        target = {"protocol": "v2", "host": "127.0.0.1", "port": port, "model": "minilm"}
        with pytest.raises(BenchError, match=r"closed the connection|the connection failed"):
            child.ask("run", target=target, **asked, conf=str(conf), out=str(tmp_path))
    assert (tmp_path / "mlperf_log_summary.txt").exists()


def test_a_server_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is measured, and the exit code tells that from a verdict."""
    url = Target("v2", "127.0.0.1", free_port(), "").url
    assert main(["--target", url, "--scenario", "offline", "--out", str(tmp_path)]) == IMPOSSIBLE
    assert capsys.readouterr().err.startswith("mlperf: cannot connect to 127.0.0.1:")


@pytest.mark.parametrize("closes", ["at once", "at the next request"])
def test_a_connection_that_the_server_closed_is_opened_anew(monkeypatch: pytest.MonkeyPatch, closes: str) -> None:
    """A server closes what nobody uses, at times while a request is on its way; no query is lost for that."""
    head = json.dumps(
        {"outputs": [{"name": "embedding", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}}]}
    ).encode()
    line = f"HTTP/1.1 200 OK\r\nInference-Header-Content-Length: {len(head)}\r\nContent-Length: {len(head) + 8}"
    completed: SimpleQueue[Sequence[bytes] | None] = SimpleQueue()
    monkeypatch.setattr(system, "complete", lambda _, data: completed.put(data))

    class AnswerOnce(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1 << 16)
            self.request.sendall(line.encode() + b"\r\n\r\n" + head + bytes(8))
            if closes == "at the next request":
                self.request.recv(1)

    with listening(AnswerOnce) as port:
        target = Target("v2", "127.0.0.1", port, "minilm")
        conversation = Conversation(target, Library("embed", "", ("a text",)))
        with system.SideBySide(conversation, connections=2, batch=1) as asked:
            for done in range(1, 6):
                asked.issue([SimpleNamespace(id=0, index=0)])
                assert completed.get(timeout=10) == [bytes(8)]
                closed = done if closes == "at once" else done - 1
                wait_for(lambda: asked.closed == closed, "a closed connection")  # noqa: B023  called at once
        assert asked.failure is None


@pytest.mark.long
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_int8_passes_the_gate_of_embeddings(
    int8_server: Server, fp32_server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], scenario: str
) -> None:
    """Over all built-in texts, in every scenario, beside the same server in fp32."""
    words = ["--target", f"http://{int8_server.http}", "--reference", f"http://{fp32_server.http}", "--mode", "both"]
    short = ["--seconds", "10", "--rate", "50", "--p99-ms", "10000", "--out", str(tmp_path)]
    assert main([*words, "--scenario", scenario, *short]) in {PASSED, MISSED}
    assert f"{SCENARIOS[scenario].name}, accuracy: PASSED, mean cosine 0.99" in capsys.readouterr().out
