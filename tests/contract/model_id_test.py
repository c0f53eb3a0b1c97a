"""`bertserve serve --model-id`: one command from a checkpoint to answers."""

from __future__ import annotations

import json
import signal
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.support.checkpoints import write_checkpoint
from tests.support.clients import Tei
from tests.support.server import Server, is_running, refused_start
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

COLD_S = 300.0
"""For an export beside other tests."""
LOADED = "loading the weights"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "small", layers=1)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the servers of this file share."""
    return tmp_path_factory.mktemp("cache")


def options(checkpoint: Path, cache: Path) -> tuple[str, ...]:
    """Of a server of a checkpoint, in fp32."""
    return ("--model-id", str(checkpoint), "--cache-dir", str(cache), "--precision", "fp32")


@pytest.fixture(scope="module")
def cold(checkpoint: Path, cache: Path) -> Iterator[tuple[Server, Server]]:
    """Two servers of the same checkpoint, started at once where nothing has been exported."""
    with ExitStack() as stack:
        servers = [Server(None, *options(checkpoint, cache), wait_ready=False, start_limit_s=COLD_S) for _ in range(2)]
        for server in servers:
            stack.enter_context(server)
        for server in servers:
            server.wait_announced()
        yield servers[0], servers[1]


def bundles(cache: Path) -> list[Path]:
    return sorted(cache.glob("exports/*/models/*/*"))


@pytest.mark.slow
def test_two_cold_starts_export_once(cold: tuple[Server, Server], cache: Path) -> None:
    """One works, shows what it does and what the comparison found; the other waits; both answer alike."""
    (bundle,) = bundles(cache)
    assert [bundle.parent.name, bundle.name] == ["small", "1"]
    logs = sorted((server.log for server in cold), key=lambda log: LOADED not in log)
    assert [LOADED in log for log in logs] == [True, False]
    assert "comparing model.fp32.onnx with PyTorch" in logs[0]
    for log in logs:
        assert "over 256 texts; max diff" in log
    vectors = []
    for server in cold:
        with Tei(server) as client:
            vectors.append(client.embed(["the server"]).vectors)
    np.testing.assert_array_equal(vectors[0], vectors[1])


def test_a_warm_start_exports_nothing(cold: tuple[Server, Server], checkpoint: Path, cache: Path) -> None:
    """The folder may be named by another path; the server holds no PyTorch."""
    assert all(server.process.poll() is None for server in cold)
    elsewhere = checkpoint.parent / ".." / checkpoint.parent.name / checkpoint.name
    with Server(None, *options(elsewhere, cache), start_limit_s=COLD_S) as server:
        assert "already exported" in server.log
        assert LOADED not in server.log
        assert len(bundles(cache)) == 1
        for pid in (server.pid, *server.engine_pids()):
            assert "torch" not in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")


def test_logs_of_an_export_are_json_too(cold: tuple[Server, Server], checkpoint: Path, cache: Path) -> None:
    """Where the log is: nothing else comes out."""
    with Server(
        None, *options(checkpoint, cache), "--log-format", "json", wait_ready=False, start_limit_s=COLD_S
    ) as server:
        server.wait_state()
        messages = [json.loads(line)["message"] for line in server.log.splitlines()]
    assert all(server.process.poll() is None for server in cold)
    assert any("already exported" in message for message in messages)


def test_an_export_that_just_began_ends_with_the_server(checkpoint: Path, tmp_path: Path) -> None:
    """Before it has imported what it needs; no port was opened."""
    with Server(None, *options(checkpoint, tmp_path / "cache"), wait_ready=False) as server:
        (export,) = wait_for(server.child_pids, "the export", 30)
        server.signal(signal.SIGINT)
        assert server.wait() == 130
        wait_for(lambda: not is_running(export), "the end of the export", 30)
        assert "bertserve serve: interrupted" in server.log
    assert not bundles(tmp_path / "cache")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGKILL, -9)])
def test_an_interrupted_export_leaves_nothing(
    checkpoint: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """The export ends with the server, however that ends, and takes with it what it wrote; no port was opened."""
    with Server(None, *options(checkpoint, tmp_path / "cache"), wait_ready=False) as server:
        server.wait_logged(LOADED, COLD_S)
        (staged,) = bundles(tmp_path / "cache")
        assert staged.name.startswith(".staging-")
        (export,) = server.child_pids()
        server.signal(number)
        assert server.wait() == code
        wait_for(lambda: not is_running(export), "the end of the export", 30)
        assert ("bertserve serve: interrupted" in server.log) is (number is signal.SIGINT)
    assert not (tmp_path / "cache").exists()


NO_HUB = "somebody/something: not a folder, not in the Hugging Face cache, and the hub cannot be reached"
REFUSED: dict[str, tuple[str, dict[str, str], int, str]] = {
    # The command line, more of the environment, the exit code and the sentence.
    "both": ("--model-id demo --models models", {}, 2, "--models and --model-id: set only one, a repository"),
    "both-by-environment": ("--model-id demo", {"BERTSERVE_MODELS": "models"}, 2, "--models and --model-id"),
    "revision-alone": ("--revision main", {}, 2, "--revision: needs --model-id"),
    "no-task": ("--model-id demo --task translate", {}, 2, "--task: input should be 'embed'"),
    "no-cache": ("--model-id demo", {"HOME": ""}, 2, "no home directory to export to; set --cache-dir"),
    "tensorrt": ("--model-id demo --engine tensorrt", {}, 2, "export --tensorrt native` and --models instead"),
    "no-id": ("--model-id ./none", {}, 1, "./none: not a folder, and not a Hugging Face model ID such as owner/model"),
    "no-checkpoint": ("--model-id tests/deploy", {}, 1, "checkpoint tests/deploy: config.json is missing"),
    "file": ("--model-id README.md", {}, 1, "README.md is a file; use a checkpoint folder, a Hugging Face model ID"),
    "revision-of-a-folder": ("--model-id demo --revision main", {}, 1, "--revision needs a Hugging Face model ID"),
    "offline": ("--model-id somebody/something", {"HF_HUB_OFFLINE": "1"}, 1, NO_HUB),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_exported_ends_the_start(tmp_path: Path, case: str) -> None:
    """With one sentence that says what would be right, and nothing in the cache."""
    words, variables, code, sentence = REFUSED[case]
    environment = {"HOME": str(tmp_path), "XDG_CACHE_HOME": "", "HF_HOME": str(tmp_path / "hub"), **variables}
    done = refused_start(*words.split(), "--log-level", "error", env=environment)
    assert done.returncode == code, done.stderr
    (line,) = done.stderr.splitlines()
    assert sentence in line
    assert not (tmp_path / ".cache").exists()


def test_a_taken_port_is_told_before_the_export(checkpoint: Path, tmp_path: Path) -> None:
    """An export takes minutes; what can be found out at once is."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = refused_start(*options(checkpoint, tmp_path / "cache"), "--http-port", str(port))
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port} for HTTP (--http-port): Address already in use" in done.stderr
    assert LOADED not in done.stdout
    assert not (tmp_path / "cache").exists()
