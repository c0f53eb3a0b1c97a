from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from xml.etree import ElementTree as ET

import pytest

from bertserve.loadtest.benchmarks import processes
from bertserve.loadtest.benchmarks.__main__ import BENCHMARKS
from bertserve.loadtest.benchmarks.runner import Benchmark, main
from bertserve.loadtest.benchmarks.server_process import BertServer, free_ports
from bertserve.loadtest.benchmarks.store import Store
from bertserve.loadtest.benchmarks.turns import Samples
from bertserve.loadtest.errors import BenchError
from bertserve.loadtest.generator.child import Child

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bertserve.loadtest.benchmarks.store import Step


ROOT = Path(__file__).parents[3]
CHILD = """
    import os
    from bertserve.loadtest.generator.child import answer
    from bertserve.loadtest.errors import BenchError

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
            with pytest.raises(BenchError, match="exited unexpectedly"):
                asked.ask("die")


def test_a_child_that_hangs_is_an_error(child: str) -> None:
    """No question waits for ever."""
    with Child(child) as asked, pytest.raises(BenchError, match="did not answer 'wait' within"):
        asked.ask("wait", limit_s=0.2)


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    """What the server said last stands in the error."""
    server = BertServer(tmp_path, "auto", 1)
    with pytest.raises(BenchError, match=r"(?s)did not become ready.*contains no model.*exit code"), server:
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


@pytest.mark.parametrize("wrong", [["--rounds", "0"], ["--seconds", "-1"], ["--tokens", "0"], ["--minutes", "0"]])
def test_senseless_options_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """They end at the command line."""
    with pytest.raises(SystemExit, match="2"):
        main(BENCHMARKS, ["server", *wrong])
    assert "must be positive" in capsys.readouterr().err


@pytest.mark.parametrize("name", [kind.name for kind in BENCHMARKS if kind.name not in {"wires", "peers"}])
def test_a_run_without_a_model_ends_in_a_sentence(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1 and what to do about it, not a traceback."""
    assert main(BENCHMARKS, [name, "--models", str(tmp_path), "--out", str(tmp_path / "figures.json")]) == 1
    assert "export one with `bertserve export`" in capsys.readouterr().err


def test_every_benchmark_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """With its purpose; each has a file of its own."""
    with pytest.raises(SystemExit, match="0"):
        main(BENCHMARKS, ["--help"])
    shown = capsys.readouterr().out.split()
    assert all(kind.name in shown for kind in BENCHMARKS)
    assert len({kind.out or kind.name for kind in BENCHMARKS}) == len(BENCHMARKS)


MEASURED = [
    (kind, figures)
    for kind in BENCHMARKS
    if (figures := ROOT / "docs" / "benchmarks" / f"{kind.out or kind.name}.json").exists()
]


@pytest.mark.parametrize(("kind", "figures"), MEASURED, ids=[kind.name for kind, _ in MEASURED])
def test_the_figures_of_the_documents_make_their_pages(kind: type[Benchmark], figures: Path, tmp_path: Path) -> None:
    """From each store in docs/benchmarks its page is written anew: the one that stands there."""
    for file in figures.parent.glob(f"{figures.stem}*.json"):
        shutil.copy(file, tmp_path)
    assert main(BENCHMARKS, [kind.name, "--page-only", "--out", str(tmp_path / figures.name)]) == 0
    page = figures.with_suffix(".md")
    assert (tmp_path / page.name).read_text() == page.read_text()
    plots = {plot.name for plot in tmp_path.glob("*.svg")}
    assert plots == set(re.findall(r"\]\(([^)]+\.svg)\)", page.read_text()))
    for plot in plots:
        drawn = ET.fromstring((tmp_path / plot).read_text())  # noqa: S314  our own file
        assert any((entry.text or "").strip() for entry in drawn.iter("{http://www.w3.org/2000/svg}text"))


class Counting(Benchmark):
    """Three steps, the last of which fails once."""

    name = "counting"
    purpose = "a test"
    rounds = 3
    seconds = 1.0
    measured: ClassVar[list[int]] = []

    def facts(self) -> dict[str, Any]:
        return {"seconds": self.options.seconds}

    def steps(self) -> Iterator[Step]:
        for number in range(1, self.options.rounds + 1):
            yield f"round {number}", partial(self._measure, number)

    def _measure(self, number: int) -> int:
        self.measured.append(number)
        if self.measured.count(3) == 1 and number == 3:
            raise BenchError("the server is gone")
        return number

    def plots(self, store: Store) -> dict[str, str]:
        return {"plot": f"<svg>{len(store.steps)}</svg>"}


def test_a_benchmark_goes_on_where_it_was_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was measured before a failure is kept, the rest is measured by the same command, and the page says it."""
    Counting.measured.clear()
    out = tmp_path / "figures" / "counting.json"
    words = ["counting", "--out", str(out)]
    assert main([Counting], words) == 1
    assert capsys.readouterr().err.endswith("counting: the server is gone\n")
    assert main([Counting], words) == 0
    assert Counting.measured == [1, 2, 3, 3]
    page = out.with_suffix(".md").read_text()
    assert page.startswith("# Counting\n\nMade by `python -m bertserve.loadtest.benchmarks counting --out ")
    assert "In turns, one after another: a paragraph is one line.\n" in page
    assert "| round 3 | 3.0 | - |" in page
    assert "![plot](counting-plot.svg)" in page
    assert (out.parent / "counting-plot.svg").read_text() == "<svg>3</svg>"
    command = Store.read(out).command
    assert main([Counting], [*words, "--page-only"]) == 0
    assert Store.read(out).command == command
    assert main([Counting], [*words, "--seconds", "2"]) == 1
    assert "measured with another seconds; start afresh with --fresh" in capsys.readouterr().err
    assert main([Counting], [*words, "--only", "2", "--fresh"]) == 0
    assert main([Counting], [*words, "--only", "2$", "--again"]) == 0
    assert list(Store.read(out).steps) == ["round 2"]
    assert Counting.measured[-2:] == [2, 2]
    assert main([Counting], [*words, "--only", "4"]) == 1
    assert "there is no step '4'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_short_run_measures_everything(models: Path, tmp_path: Path) -> None:
    """One short round over a real server fills every table and writes both files."""
    out = tmp_path / "figures" / "bench.json"
    words = ["server", "--models", str(models), "--rounds", "1", "--seconds", "1", "--tokens", "8", "--out", str(out)]
    assert main(BENCHMARKS, words) == 0
    store = Store.read(out)
    samples = Samples.of(store)
    assert {subject.split()[0] for subject in samples.subjects(8)} == {"raw", "HTTP", "gRPC"}
    assert all(sample.requests > 0 for sample in samples.every())
    assert samples.spread(8, "HTTP 32", "server_cpu_us").median > 0
    assert store.steps["usage"]["ready_s"] > 0
    assert store.steps["usage"]["engine_mb"] > 10
    assert "# The server against the raw engine" in out.with_suffix(".md").read_text()
