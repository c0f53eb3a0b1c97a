from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from loadtest.benchmarks import processes
from loadtest.benchmarks.server.command import main, parse
from loadtest.benchmarks.server.rounds import Plan
from loadtest.benchmarks.server_process import BertServer, free_ports
from loadtest.errors import BenchError
from loadtest.generator.child import Child
from loadtest.generator.workload import find_bundle
from loadtest.report import machine

ROOT = Path(__file__).parents[3]
CHILD = """
    import os
    from loadtest.generator.child import answer
    from loadtest.errors import BenchError

    def fail():
        raise BenchError("a sentence")

    answer({"double": lambda value: 2 * value, "fail": fail, "die": lambda: os._exit(3), "wait": lambda: input()})
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that answers a few verbs."""
    (tmp_path / "answers.py").write_text(textwrap.dedent(CHILD))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "answers"


def test_a_child_answers(child: str) -> None:
    """Questions are answered one by one; an error is raised where it was asked, and the child goes on."""
    with Child(child) as asked:
        assert asked.ask("double", value=4) == 8
        with pytest.raises(BenchError, match="a sentence"):
            asked.ask("fail")
        assert asked.ask("double", value="ab") == "abab"


def test_a_child_that_ends_is_an_error(child: str) -> None:
    """A process that dies in the middle of a measurement does not hang the run, nor does the next question."""
    with Child(child) as asked:
        for _ in range(2):
            with pytest.raises(BenchError, match="ended by itself"):
                asked.ask("die")


def test_a_child_that_hangs_is_an_error(child: str) -> None:
    """No question waits for ever."""
    with Child(child) as asked, pytest.raises(BenchError, match="did not answer 'wait' within"):
        asked.ask("wait", limit_s=0.2)


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    """What the server said last stands in the error."""
    server = BertServer(tmp_path, "auto", 1)
    with pytest.raises(BenchError, match=r"(?s)did not become ready.*holds no model.*exit code"), server:
        pass


def test_ports_are_different() -> None:
    """A server's ports do not meet one another."""
    assert len(set(free_ports(3))) == 3


def test_a_process_and_its_children_are_found() -> None:
    """CPU time and memory are those of real processes; one that has gone counts nothing."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as started:
        assert started.pid in processes.descendants(os.getpid())
    assert started.pid not in processes.descendants(os.getpid())
    assert processes.cpu_s(os.getpid()) > 0
    assert processes.resident_bytes(os.getpid()) > 5_000_000
    assert (processes.cpu_s(started.pid), processes.resident_bytes(started.pid)) == (0, 0)


@pytest.mark.parametrize(
    ("name", "content", "most"),
    [
        ("cpu.max", "150000 100000", 1),
        ("cpu.max", "50000 100000", 1),
        ("cpu.max", "max 100000", 10**6),
        ("absent", "", 10**6),
    ],
)
def test_a_container_s_quota_limits_the_cores(tmp_path: Path, name: str, content: str, most: int) -> None:
    """A part of a core is no core to run a thread on, and there is always one."""
    (tmp_path / name).write_text(content)
    assert machine.usable_cores(tmp_path) == min(most, len(os.sched_getaffinity(0)))


def test_the_old_form_of_a_quota_counts_too(tmp_path: Path) -> None:
    """The first version of control groups keeps the quota in two files."""
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("100000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert machine.usable_cores(tmp_path) == 1


def test_quick_is_one_short_round() -> None:
    """`--quick` sets what is not given by itself."""
    assert parse(["--quick"]).plan == Plan((8, 32, 128), 1, 0.4)
    assert parse(["--quick", "--seconds", "0.2", "--tokens", "8"]).plan == Plan((8,), 1, 0.2)
    assert parse([]).plan == Plan((8, 32, 128), 20, 0.4)


@pytest.mark.parametrize("wrong", [["--rounds", "0"], ["--seconds", "-1"], ["--tokens", "0"]])
def test_senseless_settings_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """They end at the command line."""
    with pytest.raises(SystemExit, match="2"):
        parse(wrong)
    assert "must be positive" in capsys.readouterr().err


def test_a_run_without_a_model_ends_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1 and what to do about it, not a traceback."""
    assert main(["--models", str(tmp_path)]) == 1
    assert "make one with `bertserve export`" in capsys.readouterr().err


def test_a_quick_run_measures_everything(models: Path, tmp_path: Path) -> None:
    """One short round over a real server fills every table and writes both files."""
    if find_bundle(models).max_length < 8:
        pytest.skip("the bundle at hand takes no text of 8 tokens")
    out = tmp_path / "figures" / "bench.json"
    command = [
        sys.executable,
        "-m",
        "loadtest.benchmarks.server.command",
        "--models",
        str(models),
        "--quick",
        "--seconds",
        "0.3",
    ]
    done = subprocess.run(
        [*command, "--tokens", "8", "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Verdict" in done.stdout
    data = json.loads(out.read_text())
    assert all(len(group) == 1 for group in data["lengths"]["8"]["rounds"].values())
    assert {subject.split()[0] for subject in data["lengths"]["8"]["rounds"]} == {"raw", "HTTP", "gRPC"}
    assert data["ready_s"] > 0
    assert data["engine_mb"] > 10
    assert "# The server against the raw engine" in out.with_suffix(".md").read_text()
