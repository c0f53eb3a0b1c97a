"""A build in a process of its own, as the server sees it: how it ends, and what is said of it.

What builds here is a script in the place of Python; the real one is in `tests/fault/engine_build_test.py`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from serving.children import module_command
from serving.errors import EngineFailed
from serving.rollout.engine_build import EngineBuilder
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from pathlib import Path

LIMIT_S = 30.0


def builds_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> EngineBuilder:
    file = tmp_path / "script"
    file.write_text(f"#!{sys.executable}\nimport os, pathlib, signal, subprocess\n{script}")
    file.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(file))
    monkeypatch.chdir(tmp_path)
    return EngineBuilder(tmp_path / "cache")


@pytest.mark.parametrize(
    ("script", "said", "passing"),
    [
        ('print("bertserve build: it does not match PyTorch"); raise SystemExit(1)', "does not match", False),
        ("raise SystemExit(3)", "the build exited with 3", False),
        ('print("bertserve build: about 9 GiB are needed"); raise SystemExit(75)', "9 GiB are needed", True),
        ("os.kill(os.getpid(), signal.SIGKILL)", "the build exited with -9", True),
    ],
)
def test_a_build_that_fails_says_whether_it_would_another_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, said: str, *, passing: bool
) -> None:
    """Where it was killed, or room was short: that says nothing of the bundle."""
    builder = builds_by(tmp_path, monkeypatch, script)
    with pytest.raises(EngineFailed, match=f"cannot build a TensorRT engine: .*{said}") as failed:
        builder.build(tmp_path / "models" / "small" / "1")
    assert failed.value.passing is passing


def test_clients_hear_of_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where the models lie nor the cache; the log has it all."""
    words = f"bertserve build: bundle {tmp_path}/models/small/1: {tmp_path}/cache/small/1/made: No space left on device"
    builder = builds_by(tmp_path, monkeypatch, f"print({words!r}); raise SystemExit(1)")
    with pytest.raises(EngineFailed) as failed:
        builder.build(tmp_path / "models" / "small" / "1")
    assert str(failed.value).endswith(": bundle small/1: small/1/made: No space left on device")


def test_a_build_is_told_to_end_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the drain begins, and not again at its end: that would interrupt its clearing up."""
    script = """
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
pathlib.Path("started").touch()
signal.sigwait([signal.SIGTERM])
pathlib.Path("told").touch()
again = signal.sigtimedwait([signal.SIGTERM], 0.5)
pathlib.Path("times").write_text("1" if again is None else "2")
"""
    builder = builds_by(tmp_path, monkeypatch, script)
    with ThreadPoolExecutor(1) as pool:
        build = pool.submit(builder.build, tmp_path / "models" / "small" / "1")
        wait_for((tmp_path / "started").exists, "the build")
        builder.stop()
        wait_for((tmp_path / "told").exists, "the signal")
        builder.close()
        assert (tmp_path / "times").read_text() == "1"
        with pytest.raises(EngineFailed, match="the server is shutting down") as failed:
            build.result(LIMIT_S)
    assert failed.value.passing
    with pytest.raises(EngineFailed, match="the server is shutting down"):
        builder.build(tmp_path / "models" / "small" / "2")


def test_what_a_killed_build_had_started_ends_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the pipe that a thread of the server reads, which the server's end waits for."""
    script = """
subprocess.Popen(["sleep", "60"])
pathlib.Path("started").write_text(str(os.getpid()))
signal.pause()
"""
    builder = builds_by(tmp_path, monkeypatch, script)
    with ThreadPoolExecutor(1) as pool:
        build = pool.submit(builder.build, tmp_path / "models" / "small" / "1")
        leader = int(
            wait_for(lambda: (tmp_path / "started").exists() and (tmp_path / "started").read_text(), "the build")
        )
        os.kill(leader, signal.SIGKILL)
        builder.close()
        with pytest.raises(EngineFailed):
            build.result(LIMIT_S)


@pytest.mark.parametrize("verb", ["build", "export"])
def test_a_server_that_has_ended_already_starts_none(verb: str) -> None:
    """A process that its server did not live to see begin would go on for minutes, and keep what it makes."""
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    command = module_command("serving.rollout.verb_process", gone.stdout.decode().strip(), verb, "--help")
    begun = subprocess.run(command, capture_output=True, check=False, timeout=LIMIT_S)
    assert (begun.returncode, begun.stdout) == (os.EX_TEMPFAIL, b"")
