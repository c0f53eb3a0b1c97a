"""The server as a restricted pod runs it: process 1, nobody's user, no capability, not a file that it could write.

The user has no name and no home, and the pod one core, which is not the first.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.clients import Grpc, Tei, get
from tests.support.models import ROOT
from tests.support.server import FAKE, Server, child_pids, environment, free_port
from tests.support.skips import excused
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

USER = 10001
CORE = max(os.sched_getaffinity(0))
TOOLS = ("unshare", "setpriv", "mount", "taskset")
READ_ONLY = """
cut -d' ' -f5 /proc/self/mountinfo | grep -vE '^/(proc|sys|dev)(/|$)' | while read -r place; do
  mount -o remount,bind,ro "$place" 2>/dev/null || true
done
mount -t tmpfs -o size=16m,uid=10001,gid=10001,mode=0700 cache "$CACHE"
exec setpriv --reuid=10001 --regid=10001 --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all "$@"
"""
"""Whatever is mounted, and then a volume for the cache: as `readOnlyRootFilesystem` and an emptyDir."""


def opened(*trees: Path) -> str:
    """Commands that let other users reach directories below those of root alone, within a namespace of mounts."""
    stashed = ["set -e", "mount -t tmpfs stash /mnt"]
    closed: dict[Path, list[str]] = {}
    for number, tree in enumerate(trees):
        above = [folder for folder in reversed(tree.parents) if not folder.stat().st_mode & 1]
        if above:
            stashed.append(f"mkdir /mnt/{number} && mount --bind '{tree}' /mnt/{number}")
            closed.setdefault(above[0], []).append(f"mkdir -p '{tree}' && mount --bind /mnt/{number} '{tree}'")
    for folder, back in closed.items():
        stashed += [f"mount -t tmpfs -o mode=0755 hidden '{folder}'", *back]
    return "\n".join(stashed)


def confine(models: Path, cache: Path) -> list[str]:
    """The words before a command that is to run as in a pod."""
    trees = (Path(sys.base_prefix), Path(sys.prefix), ROOT, models, cache)
    script = opened(*(tree.resolve() for tree in trees)) + READ_ONLY
    return ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", script, "sh"]


def obstacle() -> str | None:
    """Why nothing can be confined here; None where it can."""
    if os.geteuid() != 0:
        return excused("only root can confine a process so")
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"no {', '.join(missing)} here"
    words = ["unshare", "--mount", "--pid", "--fork", "mount", "-t", "tmpfs", "tried", "/mnt"]
    tried = subprocess.run(words, capture_output=True, timeout=60, check=False)
    return None if tried.returncode == 0 else excused("no namespaces here")


pytestmark = pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))


class Confined:
    """A confined server, and where it is reached.

    Attributes:
        http: As `Server` has it.
        grpc: Likewise.
        metrics: Likewise.
    """

    def __init__(self, models: Path, cache: Path) -> None:
        self.http, self.grpc, self.metrics = (f"127.0.0.1:{free_port()}" for _ in range(3))
        ports = (("--http-port", self.http), ("--grpc-port", self.grpc), ("--metrics-port", self.metrics))
        words = [word for name, place in ports for word in (name, place.rpartition(":")[2])]
        pinned = ["env", "--unset=HOME", "taskset", "--cpu-list", str(CORE)]
        serve = [sys.executable, "-m", "bertserve", "serve", "--models", str(models), "--cache-dir", str(cache)]
        self.process = subprocess.Popen(
            [*confine(models, cache), *pinned, *serve, *words, "--lame-duck-s", "0", "--log-format", "json"],
            cwd=ROOT,
            env=environment({"CACHE": str(cache), "PYTHONDONTWRITEBYTECODE": "1"}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def pid(self) -> int:
        """Of the server, as this namespace sees it."""
        (child,) = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(child)

    def ready(self) -> bool:
        """Whether it says so."""
        assert self.process.poll() is None, self.process.stdout.read() if self.process.stdout else ""
        try:
            return get(self.metrics, "/readyz").status == 200
        except OSError:
            return False


@pytest.fixture(scope="module")
def confined(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Confined]:
    """A server with the demo model, its own engine and a cache."""
    cache = tmp_path_factory.mktemp("confined")
    # Where directories are mounted in ways that nobody foresaw, not even Python is reached: that says nothing of ours.
    tried = subprocess.run(
        [*confine(models, cache), sys.executable, "-c", "import ssl"],
        env=environment({"CACHE": str(cache)}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if tried.returncode != 0:
        pytest.skip(excused(f"Python does not run confined here: {tried.stderr.strip()[-300:]}"))
    server = Confined(models, cache)
    try:
        wait_for(server.ready, "a confined server", 60)
        yield server
    finally:
        server.process.kill()
        server.process.wait()
        if server.process.stdout:
            server.process.stdout.close()


def status(pid: int) -> dict[str, str]:
    """What the kernel says of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def test_it_is_as_confined_as_the_manifests_say(confined: Confined) -> None:
    """Nobody's user, process 1 of its namespace, no capability left or to be had, no privilege to be gained."""
    told = status(confined.pid())
    assert set(told["Uid"].split()) == set(told["Gid"].split()) == {str(USER)}
    assert told["NSpid"].split()[-1] == "1"
    assert {told[name] for name in ("CapEff", "CapPrm", "CapInh", "CapBnd")} == {"0" * 16}
    assert told["NoNewPrivs"] == "1"
    with pytest.raises(OSError, match="Read-only file system"):
        Path(f"/proc/{confined.pid()}/root{ROOT}/written").touch()


def test_it_serves(confined: Confined) -> None:
    """Over both protocols, with an engine process of its own, and a cost table that it wrote where it may."""
    for transport in (Tei, Grpc):
        with transport(confined) as client:
            assert client.embed(["What is a T4?"]).vectors.shape == (1, 384)
    assert get(confined.metrics, "/metrics").status == 200


def test_it_computes_on_its_core(confined: Confined) -> None:
    """With one thread, as many as there are cores for the pod."""
    engine = child_pids(confined.pid())
    assert {core for pid in engine for core in os.sched_getaffinity(pid)} == {CORE}
    threads = re.findall(r'"threads": ?(\d+)', get(confined.metrics, "/status").body.decode())
    assert threads == ["1"]


def test_it_ends_at_the_signal_of_kubernetes(confined: Confined) -> None:
    """Process 1 hears SIGTERM only because it asks to, and ends what it started; the last test with this server."""
    os.kill(confined.pid(), signal.SIGTERM)
    assert confined.process.wait(20) == 0


@pytest.mark.sampled(4)
@pytest.mark.parametrize("delay_s", [0.0, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_while_it_starts(models: Path, number: signal.Signals, code: int, delay_s: float) -> None:
    """Whatever is imported or read just then, it ends the start in order, without a traceback."""
    term = 1 << (signal.SIGTERM - 1)  # the second that it asks for, and Python hears the other one from its own start
    with Server(models, *FAKE, wait_ready=False) as server:
        wait_for(lambda: int(status(server.pid)["SigCgt"], 16) & term, "the signals to be caught")
        time.sleep(delay_s)
        server.signal(number)
        assert server.wait(30) in {0, code}  # a server that has started ends with 0
        assert "Traceback" not in server.log
