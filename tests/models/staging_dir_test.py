"""Staging directories: whose they are, and what a sweep takes. Owners are processes of their own."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bertserve.serving.models.staging_dir import StagedVersion, StagingDir, exclusive
from tests.support.server import is_running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]
PREFIX = ".staging-"

STRANGER = 4_194_305
"""An id that no process of this system has: so the processes of another container look from here."""

OWN = """
import os, pathlib, subprocess, sys
os.getpid = lambda: int(sys.argv[2])
from bertserve.serving.models.staging_dir import StagedVersion
with StagedVersion(pathlib.Path(sys.argv[1])) as staging:
    (staging.path / "engine").write_bytes(b"x")
    print(staging.path, flush=True)
    heir = subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    print(heir.pid, flush=True)
    sys.stdin.readline()
    heir.kill()
    print(staging.move(), flush=True)
"""

TURNS = 300
TAKE_TURNS = f"""
import pathlib, sys
from bertserve.serving.models.staging_dir import StagingDir
for _ in range({TURNS}):
    with StagingDir(pathlib.Path(sys.argv[1]), {PREFIX!r}) as staging:
        (staging.path / "file").touch()
        if not (staging.path / "file").exists():
            sys.exit("it was taken away")
"""


def test_one_at_a_time(tmp_path: Path) -> None:
    """The second waits, says so, and has a directory even where the first has removed the one that both wanted."""
    shared, waiting, order = tmp_path / "models" / "small", threading.Event(), []

    def second() -> None:
        with exclusive(shared, waiting.set):
            order.append("second")
            (shared / "file").touch()

    with exclusive(shared, lambda: order.append("waited for nobody")):
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(10)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]
    assert [entry.name for entry in shared.iterdir()] == ["file"]


@pytest.mark.parametrize("full", [False, True])
def test_what_was_made_to_be_shared_goes_again(tmp_path: Path, *, full: bool) -> None:
    """Only as far as it is empty."""
    shared = tmp_path / "models" / "small"
    with exclusive(shared, lambda: None):
        if full:
            (shared / "1").mkdir()
    assert (tmp_path / "models").exists() is full


class Owner:
    """A process that fills a staging directory, by itself and with one that it has started."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.path = Path(self.said())
        self.heir = int(self.said())

    def said(self) -> str:
        return self.process.stdout.readline().strip()

    def finish(self) -> Path:
        """Lets it move what it wrote into place; where that is."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return Path(self.said())


@contextlib.contextmanager
def owner(place: Path, pid: int = STRANGER) -> Iterator[Owner]:
    """A process that takes its own id for another, as one in a container does."""
    words = [sys.executable, "-c", OWN, str(place), str(pid)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        started = Owner(process)
        try:
            yield started
        finally:
            process.kill()
            with contextlib.suppress(ProcessLookupError):
                os.kill(started.heir, 9)


def sweep(home: Path) -> None:
    with StagingDir(home, PREFIX):
        pass


def test_what_another_container_writes_is_left_alone(tmp_path: Path) -> None:
    """Its processes are not to be seen from here, and may have the ids of ours; what they write is theirs."""
    with owner(tmp_path) as first, owner(tmp_path) as second:
        sweep(tmp_path)
        assert first.path != second.path
        assert (first.path / "engine").exists()
        assert (second.path / "engine").exists()
        assert first.finish() == tmp_path / "1"
        assert (tmp_path / "1" / "engine").exists()


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    """Even if its id is another's by now, and something that it had started still runs."""
    with owner(tmp_path, os.getpid()) as killed:
        killed.process.kill()
        killed.process.wait()
        assert (killed.path / "engine").exists()
        sweep(tmp_path)
        assert is_running(killed.heir)
        assert list(tmp_path.iterdir()) == []


def test_a_directory_can_be_its_owners_alone(tmp_path: Path) -> None:
    with StagingDir(tmp_path, PREFIX, 0o700) as staging:
        assert staging.path.stat().st_mode & 0o777 == 0o700


def test_processes_that_come_and_go_do_not_disturb_one_another(tmp_path: Path) -> None:
    """Each makes the place, sweeps it and removes it again while the others do."""
    words = [sys.executable, "-c", TAKE_TURNS, str(tmp_path / "a" / "b")]
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(subprocess.Popen(words, cwd=ROOT)) for _ in range(3)]
    assert [process.returncode for process in started] == [0, 0, 0]
    assert list(tmp_path.rglob(f"{PREFIX}*")) == []


def test_the_place_may_go_while_it_is_found_to_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Path.mkdir` asks what is in its way, and by then another process has removed it."""
    home = tmp_path / "home"
    home.mkdir()

    def gone_meanwhile(_: Path) -> bool:
        monkeypatch.undo()
        home.rmdir()
        return False

    monkeypatch.setattr(Path, "is_dir", gone_meanwhile)
    with StagingDir(home, PREFIX) as staging:
        assert staging.path.parent == home
    home.mkdir(exist_ok=True)
    monkeypatch.setattr(Path, "is_dir", gone_meanwhile)
    with exclusive(home, pytest.fail):
        assert home.exists()


def _removed(home: Path, _: contextlib.ExitStack) -> None:
    sweep(home)


def _about_to_be_removed(home: Path, stack: contextlib.ExitStack) -> None:
    (found,) = home.iterdir()
    handle = os.open(found, os.O_RDONLY)
    stack.callback(os.close, handle)
    fcntl.flock(handle, fcntl.LOCK_EX)


@pytest.mark.parametrize("come_between", [_removed, _about_to_be_removed])
def test_a_sweep_may_come_before_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, come_between: Callable[[Path, contextlib.ExitStack], None]
) -> None:
    """What has just been made is not locked yet: where it is taken for a dead one's, another is made."""
    made = []

    def late(handle: int, operation: int) -> None:
        monkeypatch.undo()
        made.extend(tmp_path.iterdir())
        come_between(tmp_path, stack)
        fcntl.flock(handle, operation)

    monkeypatch.setattr("fcntl.flock", late)
    with contextlib.ExitStack() as stack, StagingDir(tmp_path, PREFIX) as staging:
        assert made
        assert staging.path not in made
        sweep(tmp_path)
        assert staging.path.is_dir()


def test_where_nothing_can_be_locked_what_is_young_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its owner lives cannot be known there; what nobody can still be writing goes."""

    def refuse(*_: int) -> None:  # as the kernel does for a directory over NFS
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr("fcntl.flock", refuse)
    young, old = tmp_path / f"{PREFIX}young", tmp_path / f"{PREFIX}old"
    for leftover, hours in ((young, 23), (old, 25)):
        leftover.mkdir()
        os.utime(leftover, (time.time() - hours * 3600,) * 2)
    with StagedVersion(tmp_path) as staging:
        (staging.path / "engine").write_bytes(b"x")
        staging.move()
    assert sorted(path.name for path in tmp_path.iterdir()) == [young.name, "1"]


def test_a_sweep_leads_nowhere_else(tmp_path: Path) -> None:
    """A link, a file or a pipe in the place of a leftover is not followed, and nobody waits for it."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "kept").touch()
    home = tmp_path / "home"
    home.mkdir()
    (home / f"{PREFIX}link").symlink_to(other)
    (home / f"{PREFIX}file").touch()
    os.mkfifo(home / f"{PREFIX}pipe")
    sweep(home)
    assert (other / "kept").exists()
    assert len(list(home.iterdir())) == 3


@pytest.mark.parametrize("home", ["/proc/none", "/dev/null/none"])
def test_a_directory_that_cannot_be_made_is_reported(home: str) -> None:
    """By its own name, not by that of what would have been made in it."""
    with pytest.raises(OSError, match=home):
        sweep(Path(home))
