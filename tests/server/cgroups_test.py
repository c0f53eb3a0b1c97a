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

from export.engines import free_space
from serving.cgroups import cpu_quota, memory_left, memory_limit
from serving.host import available_cpus
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


SERVICE = ("0::/system.slice/bertserve.service",)
DOCKER_V1 = ("5:cpu,cpuacct:/docker/1f", "4:memory:/docker/1f", "1:name=systemd:/docker/1f", "0::/")
BOTH = ("cpu,cpuacct", "memory")


@pytest.mark.parametrize(
    ("tree", "cpus", "memory"),
    [
        pytest.param(Tree({}), None, None, id="none"),
        pytest.param(Tree({}, own=()), None, None, id="no groups"),
        pytest.param(Tree({"cpu.max": "max 100000", "memory.max": "max"}), None, None, id="v2, no limit"),
        pytest.param(Tree({"cpu.max": "", "memory.max": ""}), None, None, id="v2, empty files"),
        pytest.param(Tree({"cpu.max": "150000 100000", "memory.max": str(GIB)}), 1.5, GIB, id="v2, a container"),
        pytest.param(
            Tree(
                {
                    "system.slice/bertserve.service/cpu.max": "150000 100000",
                    "system.slice/bertserve.service/memory.max": str(GIB),
                },
                SERVICE,
            ),
            1.5,
            GIB,
            id="v2, a unit with CPUQuota= and MemoryMax=",
        ),
        pytest.param(
            Tree(
                {
                    "system.slice/cpu.max": "50000 100000",
                    "system.slice/memory.max": str(2 * GIB),
                    "system.slice/bertserve.service/cpu.max": "300000 100000",
                    "system.slice/bertserve.service/memory.max": str(4 * GIB),
                },
                SERVICE,
            ),
            0.5,
            2 * GIB,
            id="v2, a slice with less than its unit",
        ),
        pytest.param(
            Tree({"cpu.max": "200000 100000", "inner/cpu.max": "max 100000"}, ("0::/pod/inner",), root="/pod"),
            2.0,
            None,
            id="v2, a container within one, without a namespace",
        ),
        pytest.param(
            Tree({"cpu.max": "200000 100000"}, ("0::/../other",)), 2.0, None, id="v2, a group outside of the namespace"
        ),
        pytest.param(
            Tree({"cpu.max": "200000 100000"}, ("0::/",), root="/../.."), 2.0, None, id="v2, a mount from outside of it"
        ),
        pytest.param(
            Tree({"a/cpu.max": "100000 100000"}, ("0::/a/b/gone (deleted)",)), 1.0, None, id="v2, a group that is gone"
        ),
        pytest.param(
            Tree(
                {
                    "cpu,cpuacct/cpu.cfs_quota_us": "200000",
                    "cpu,cpuacct/cpu.cfs_period_us": "100000",
                    "memory/memory.limit_in_bytes": str(GIB),
                },
                DOCKER_V1,
                BOTH,
                "/docker/1f",
            ),
            2.0,
            GIB,
            id="v1, a container",
        ),
        pytest.param(
            Tree(
                {
                    "cpu,cpuacct/cpu.cfs_quota_us": "-1",
                    "cpu,cpuacct/cpu.cfs_period_us": "100000",
                    "cpu,cpuacct/docker/cpu.cfs_quota_us": "100000",
                    "cpu,cpuacct/docker/cpu.cfs_period_us": "50000",
                    "cpu,cpuacct/docker/1f/cpu.cfs_quota_us": "400000",
                    "cpu,cpuacct/docker/1f/cpu.cfs_period_us": "100000",
                    "memory/memory.limit_in_bytes": NO_LIMIT_V1,
                    "memory/docker/memory.limit_in_bytes": str(3 * GIB),
                    "memory/docker/1f/memory.limit_in_bytes": NO_LIMIT_V1,
                },
                DOCKER_V1,
                BOTH,
            ),
            2.0,
            3 * GIB,
            id="v1, one between",
        ),
        pytest.param(Tree({"cpu,cpuacct/cpu.cfs_quota_us": "100000"}, DOCKER_V1, BOTH), None, None, id="v1, no period"),
        pytest.param(
            Tree(
                {"unified/a/cpu.max": "max 100000", "memory/a/memory.limit_in_bytes": "4096"},
                ("4:memory:/a", "0::/a"),
                ("memory",),
            ),
            None,
            4096,
            id="v1 for memory, v2 beside it",
        ),
    ],
)
def test_the_least_limit_of_all_levels_counts(
    tree: Tree, cpus: float | None, memory: int | None, tmp_path: Path
) -> None:
    """Of both versions; and threads are as many as whole CPUs, at least one, at most those of the affinity mask."""
    proc = tree.make(tmp_path)
    assert (cpu_quota(proc), memory_limit(proc)) == (cpus, memory)
    assert available_cpus(proc) == (CPUS if cpus is None else max(1, min(CPUS, int(cpus))))


@pytest.mark.parametrize(
    ("tree", "left"),
    [
        (Tree({}), None),
        (Tree({"memory.max": "max", "memory.current": "5"}), None),
        (Tree({"memory.max": str(4 * GIB), "memory.current": str(3 * GIB)}), GIB),
        (
            Tree(
                {
                    "memory.max": str(4 * GIB),
                    "memory.current": str(3 * GIB),
                    "memory.stat": f"anon 5\ninactive_file {GIB}\nactive_file 7",
                }
            ),
            2 * GIB,
        ),
        (Tree({"memory.max": "1", "memory.current": "2"}), 0),
        # The outer group has the larger limit, and less of it left.
        (
            Tree(
                {
                    "memory.max": str(8 * GIB),
                    "memory.current": str(7 * GIB),
                    "job/memory.max": str(4 * GIB),
                    "job/memory.current": str(GIB),
                },
                ("0::/job",),
            ),
            GIB,
        ),
        (
            Tree(
                {
                    "memory/docker/1f/memory.limit_in_bytes": str(4 * GIB),
                    "memory/docker/1f/memory.usage_in_bytes": str(3 * GIB),
                    "memory/docker/1f/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}",
                },
                DOCKER_V1,
                BOTH,
            ),
            2 * GIB,
        ),
    ],
)
def test_what_a_group_has_left(tree: Tree, left: int | None, tmp_path: Path) -> None:
    """The least of all levels, with file pages as free; the exporter never takes more than the machine has."""
    proc = tree.make(tmp_path)
    (tmp_path / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:   {FREE >> 10} kB\n")
    assert memory_left(proc) == left
    assert free_space.available_memory(proc, tmp_path / "meminfo") == min(
        3 * GIB // 2, 3 * GIB if left is None else left
    )


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
    code = "from serving import cgroups, host; print(cgroups.cpu_quota(), host.available_cpus())"
    command = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=True)
    assert done.stdout.split() == ["1.0", "1"]
