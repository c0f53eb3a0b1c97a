"""Limits of control groups, of made-up trees as real systems mount them, and of a real group."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bertserve.export.engines import free_space
from bertserve.serving.host import available_cpus, can_busy_wait, cpu_quota, memory_left, memory_limit, oom_kills
from tests.support.models import ROOT
from tests.support.skips import excused

if TYPE_CHECKING:
    from collections.abc import Iterator

CPUS = len(os.sched_getaffinity(0))
GIB = 1 << 30
FREE = 3 * GIB // 2
V2_MOUNT = "35 24 0:30 {root} {at} rw,nosuid,nodev,noexec,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "{id} 24 0:{id} {root} {at} ro,nosuid - cgroup {name} rw,{name}"
NO_LIMIT_V1 = "9223372036854771712"


@dataclass(frozen=True)
class Tree:
    """What a process finds.

    Attributes:
        files: Limits and uses by their path below the mounted folder.
        own: Of `/proc/self/cgroup`, the lines.
        v1: Controllers with a hierarchy of their own.
        root: Of `mountinfo`, the group that is mounted.
    """

    files: dict[str, str]
    own: tuple[str, ...] = ("0::/",)
    v1: tuple[str, ...] = ()
    root: str = "/"

    def make(self, folder: Path) -> Path:
        """Writes it; the folder that stands for `/proc/self`."""
        top = folder / "sys fs" / "cgroup"
        at = str(top).replace(" ", "\\040")
        for name, content in self.files.items():
            (top / name).parent.mkdir(parents=True, exist_ok=True)
            (top / name).write_text(content + "\n")
        mounts = [V2_MOUNT.format(root=self.root, at=f"{at}/unified" if self.v1 else at)] + [
            V1_MOUNT.format(id=40 + index, root=self.root, at=f"{at}/{name}", name=name)
            for index, name in enumerate(self.v1)
        ]
        (folder / "cgroup").write_text("\n".join(self.own) + "\n")
        (folder / "mountinfo").write_text("\n".join(["22 1 8:1 / / rw - ext4 /dev/sda1 rw", *mounts]) + "\n")
        return folder


def v2(group: str = "", cpu: str = "", memory: object = "", current: object = "", stat: str = "") -> dict[str, str]:
    """Files of a group of version 2, as far as they are given."""
    files = {"cpu.max": cpu, "memory.max": memory, "memory.current": current, "memory.stat": stat}
    return {f"{group}{name}": str(value) for name, value in files.items() if value != ""}


def v1(
    group: str = "", quota: str = "", period: str = "100000", memory: object = "", usage: object = ""
) -> dict[str, str]:
    """The same of version 1, whose controllers have folders of their own."""
    cpus = {"cfs_quota_us": quota, "cfs_period_us": period} if quota else {}
    used = {"limit_in_bytes": memory, "usage_in_bytes": usage}
    return {f"cpu,cpuacct/{group}cpu.{name}": value for name, value in cpus.items()} | {
        f"memory/{group}memory.{name}": str(value) for name, value in used.items() if value != ""
    }


UNIT = "system.slice/bertserve.service/"
SERVICE = (f"0::/{UNIT[:-1]}",)
DOCKER_V1 = ("5:cpu,cpuacct:/docker/1f", "4:memory:/docker/1f", "1:name=systemd:/docker/1f", "0::/")
BOTH = ("cpu,cpuacct", "memory")
ONE, ONE_AND_A_HALF, TWO, UNLIMITED = "100000 100000", "150000 100000", "200000 100000", "max 100000"
SLICE = v2("system.slice/", "50000 100000", 2 * GIB) | v2(UNIT, "300000 100000", 4 * GIB)
BETWEEN = {
    **v1("", "-1", memory=NO_LIMIT_V1),
    **v1("docker/", "100000", "50000", 3 * GIB),
    **v1("docker/1f/", "400000", memory=NO_LIMIT_V1),
}
MIXED = {"unified/a/cpu.max": UNLIMITED, "memory/a/memory.limit_in_bytes": "4096"}
LIMITS: dict[str, tuple[Tree, float | None, int | None]] = {
    "none": (Tree({}), None, None),
    "no groups": (Tree({}, own=()), None, None),
    "v2, no limit": (Tree(v2("", UNLIMITED, "max")), None, None),
    "v2, empty files": (Tree({"cpu.max": "", "memory.max": ""}), None, None),
    "v2, a container": (Tree(v2("", ONE_AND_A_HALF, GIB)), 1.5, GIB),
    "v2, a unit with CPUQuota= and MemoryMax=": (Tree(v2(UNIT, ONE_AND_A_HALF, GIB), SERVICE), 1.5, GIB),
    "v2, a slice with less than its unit": (Tree(SLICE, SERVICE), 0.5, 2 * GIB),
    "v2, a container within one, without a namespace": (
        Tree(v2("", TWO) | v2("inner/", UNLIMITED), ("0::/pod/inner",), root="/pod"),
        2.0,
        None,
    ),
    "v2, a group outside of the namespace": (Tree(v2("", TWO), ("0::/../other",)), 2.0, None),
    "v2, a mount from outside of it": (Tree(v2("", TWO), root="/../.."), 2.0, None),
    "v2, a group that is gone": (Tree(v2("a/", ONE), ("0::/a/b/gone (deleted)",)), 1.0, None),
    "v1, a container": (Tree(v1("", "200000", memory=GIB), DOCKER_V1, BOTH, "/docker/1f"), 2.0, GIB),
    "v1, one between": (Tree(BETWEEN, DOCKER_V1, BOTH), 2.0, 3 * GIB),
    "v1, no period": (Tree({"cpu,cpuacct/cpu.cfs_quota_us": "100000"}, DOCKER_V1, BOTH), None, None),
    "v1 for memory, v2 beside it": (Tree(MIXED, ("4:memory:/a", "0::/a"), ("memory",)), None, 4096),
}


@pytest.mark.parametrize("case", LIMITS)
def test_the_least_limit_of_all_levels_counts(case: str, tmp_path: Path) -> None:
    """Of both versions; and threads are as many as whole CPUs, at least one, at most those of the affinity mask."""
    tree, cpus, memory = LIMITS[case]
    proc = tree.make(tmp_path)
    assert (cpu_quota(proc), memory_limit(proc)) == (cpus, memory)
    assert available_cpus(proc) == (CPUS if cpus is None else max(1, min(CPUS, int(cpus))))


@pytest.mark.parametrize(
    ("cpus", "quota", "can"), [(4, UNLIMITED, True), (4, TWO, True), (4, ONE_AND_A_HALF, False), (3, UNLIMITED, False)]
)
def test_two_processes_wait_awake_only_beside_free_cpus(
    cpus: int,
    quota: str,
    can: bool,  # noqa: FBT001
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cpus)))
    assert can_busy_wait(Tree(v2("", quota)).make(tmp_path)) is can


FULL = {"memory": 4 * GIB, "current": 3 * GIB}
DOCKER = v1("docker/1f/", memory=4 * GIB, usage=3 * GIB)
STAT_V1 = {"memory/docker/1f/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}"}
LEFT: dict[str, tuple[Tree, int | None]] = {
    "no groups": (Tree({}), None),
    "no limit": (Tree(v2(memory="max", current=5)), None),
    "v2": (Tree(v2(**FULL)), GIB),
    "v2, file pages are free": (Tree(v2(**FULL, stat=f"anon 5\ninactive_file {GIB}\nactive_file 7")), 2 * GIB),
    "more than there is": (Tree(v2(memory=1, current=2)), 0),
    "an outer group has more, and less of it left": (
        Tree(v2(memory=8 * GIB, current=7 * GIB) | v2("job/", memory=4 * GIB, current=GIB), ("0::/job",)),
        GIB,
    ),
    "v1, file pages are free": (Tree(DOCKER | STAT_V1, DOCKER_V1, BOTH), 2 * GIB),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_a_group_has_left(case: str, tmp_path: Path) -> None:
    """The least of all levels, with file pages as free; the exporter never takes more than the machine has."""
    tree, left = LEFT[case]
    proc = tree.make(tmp_path)
    (tmp_path / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:   {FREE >> 10} kB\n")
    assert memory_left(proc) == left
    assert free_space.available_memory(proc, tmp_path / "meminfo") == min(FREE, 3 * GIB if left is None else left)


KILLS: dict[str, tuple[Tree, int]] = {
    "no limit": (Tree({"memory.max": "max", "memory.events": "oom_kill 3"}), 0),
    "v2": (Tree({"memory.max": "1", "memory.events": "max 9\noom 3\noom_kill 2\noom_group_kill 1"}), 2),
    "v1": (Tree(DOCKER | {"memory/docker/1f/memory.oom_control": "under_oom 0\noom_kill 4"}, DOCKER_V1, BOTH), 4),
    "v1 of an old kernel": (Tree(DOCKER | {"memory/docker/1f/memory.oom_control": "under_oom 0"}, DOCKER_V1, BOTH), 0),
}


@pytest.mark.parametrize("case", KILLS)
def test_how_often_the_kernel_has_killed_for_memory(case: str, tmp_path: Path) -> None:
    """As the groups with a limit count it."""
    tree, kills = KILLS[case]
    assert oom_kills(tree.make(tmp_path)) == kills


@pytest.fixture
def group() -> Iterator[Path]:
    """A real group with a quota of one CPU."""
    v1 = Path("/sys/fs/cgroup/cpu")
    made = (v1 if v1.is_dir() else v1.parent) / f"bertserve-{os.getpid()}"
    try:
        made.mkdir()
        limit, value = ("cpu.cfs_quota_us", "100000") if v1.is_dir() else ("cpu.max", "100000 100000")
        (made / limit).write_text(value)
    except OSError as error:
        with suppress(OSError):
            made.rmdir()
        pytest.skip(excused(f"no control group can be made here: {error}"))
    yield made
    made.rmdir()


def test_a_process_in_a_real_group(group: Path) -> None:
    """What the kernel says of a process that was put into a group, with its quota set there and nowhere else."""
    code = "from bertserve.serving import host; print(host.cpu_quota(), host.available_cpus())"
    command = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=True)
    assert done.stdout.split() == ["1.0", "1"]
