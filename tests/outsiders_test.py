"""The table of outsiders against the tree and its imports, and which of them a run leaves out."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Self

import pytest

from tests.support.by_change import MAX_COMMITS, Pass, read_record, unchanged, update_record
from tests.support.outsiders import OUTSIDERS, ROOT, Outsider, modules, reached

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COMMIT = "0123456789" * 4
STARTERS = ("tests/support/server.py", "loadtest/benchmarks/server_process.py")
"""Modules that start a server by its command, which no import shows."""


@pytest.fixture(params=OUTSIDERS)
def outsider(request: pytest.FixtureRequest) -> Outsider:
    return OUTSIDERS[request.param]


def held(outsider: Outsider, file: Path) -> bool:
    paths = ("tests", "constraints.txt", *outsider.paths, *outsider.beside, *outsider.imports_of)
    return any(file.is_relative_to(ROOT / path) for path in paths)


def run_through(outsider: Outsider) -> set[Path]:
    """The project's source files that its tests import or start."""
    started = [modules(name) for name in outsider.runs]
    assert all(started), outsider.runs
    return reached(outsider.sources.union(*started))


def named_paths(source: Path) -> Iterator[str]:
    """What a file names as paths: `"a/b.c"` and `ROOT / "a" / "b.c"`."""
    todo: list[ast.AST] = [ast.parse(source.read_bytes())]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.BinOp) and ast.unparse(node).startswith("ROOT / "):
            parts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
            yield "/".join(map(str, reversed(parts)))
        elif isinstance(node, ast.Constant) and re.fullmatch(r"[\w-]+(/[\w.-]+)+", str(node.value)):
            yield str(node.value)
        else:
            todo += ast.iter_child_nodes(node)


def test_what_the_table_names_is_there(outsider: Outsider) -> None:
    """Files, folders and tests."""
    for path in (*outsider.paths, *outsider.beside, *outsider.imports_of):
        assert (ROOT / path).exists(), path
    for test in outsider.tests:
        file, _, name = test.partition("::")
        assert f"def {name}" in (ROOT / file).read_text(encoding="utf-8"), test


def test_no_test_belongs_to_two() -> None:
    """So that one decision is made of it."""
    tests = [test for outsider in OUTSIDERS.values() for test in outsider.tests]
    assert len(tests) == len(set(tests))
    assert {test.partition("::")[0] for test in tests if "::" in test}.isdisjoint(tests)


def test_the_table_holds_every_import(outsider: Outsider) -> None:
    """Of the tests and of the programs that they start; and code that they do not reach is not said to be beside."""
    own = reached({ROOT / test.partition("::")[0] for test in outsider.tests})
    assert "serving.cli" in outsider.runs or own.isdisjoint(ROOT / starter for starter in STARTERS)
    files = run_through(outsider)
    assert [file for file in files if not held(outsider, file)] == []
    assert [path for path in outsider.beside if not any(file.is_relative_to(ROOT / path) for file in files)] == []


def test_the_table_holds_every_path_that_the_tests_name(outsider: Outsider) -> None:
    """Data, configurations and pages that they read; `build` holds what is installed, by the pins of the project."""
    for source in reached({ROOT / test.partition("::")[0] for test in outsider.tests}, ROOT / "tests"):
        files = {ROOT / path for path in named_paths(source) if path and not path.startswith("build")}
        assert [file for file in files if file.exists() and file != ROOT and not held(outsider, file)] == [], source


def test_tests_with_these_programs_are_outsiders() -> None:
    """A new test with Ray, LoadGen or HAProxy has a place in the table."""
    words = re.compile(r"RayNode\(|mlperf_loadgen|rolling\.parts import .*haproxy")
    tests = {test.partition("::")[0] for outsider in OUTSIDERS.values() for test in outsider.tests}
    found = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("*_test.py")
        if words.search(path.read_text(encoding="utf-8")) and path.name != "outsiders_test.py"
    }
    assert len(found) >= 4
    assert found <= tests


@pytest.mark.parametrize(
    ("last", "commits", "is_left_out"),
    [
        (Pass("same", COMMIT), 0, True),
        (Pass("same", COMMIT), MAX_COMMITS - 1, True),
        (Pass("same", COMMIT), MAX_COMMITS, False),
        (Pass("same", COMMIT), None, False),
        (Pass("other", COMMIT), 0, False),
        (None, 0, False),
    ],
)
def test_an_outsider_is_left_out_for_few_commits_without_a_change(
    last: Pass | None, commits: int | None, *, is_left_out: bool
) -> None:
    """It runs if a file changed, after ten commits, if git cannot count them, and if it never passed."""
    assert bool(unchanged(last, "same", lambda _: commits)) == is_left_out


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"Ray": {"digest": "d"}}', b'{"Ray": {"digest": "d", "commit": "--all"}}']
)
def test_a_damaged_record_is_none(tmp_path: Path, content: bytes) -> None:
    """Everything runs, and the next record is whole."""
    file = tmp_path / "record.json"
    file.write_bytes(content)
    assert read_record(file) == {}
    update_record(file, {"Ray": Pass("digest", COMMIT)}, set())
    assert read_record(file) == {"Ray": Pass("digest", COMMIT)}


def test_a_digest_tells_every_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a path, a test, what it imports of `tests` and the pins; of some sources the names and imports alone."""
    for name in ("constraints.txt", "tests/a_test.py", "tests/conftest.py", "beside/b.py", "path/p.txt", "wheel/w.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("import os\n")
    (tmp_path / "tests" / "help.py").write_text("")
    (tmp_path / "tests" / "a_test.py").write_text("def test(): from tests import help\n")
    monkeypatch.setattr("tests.support.outsiders.ROOT", tmp_path)
    modules.cache_clear()
    outsider = Outsider(("tests/a_test.py",), ("path",), beside=("beside",), imports_of=("wheel",))
    found = [outsider.digest()]

    def changes(name: str, content: str) -> bool:
        (tmp_path / name).write_text(content)
        found.append(outsider.digest())
        return found[-1] != found[-2]

    assert not changes("beside/b.py", "import sys\n")
    assert not changes("wheel/w.py", "import os\nx = 1\n")
    for name, content in {
        "constraints.txt": "pytest==1\n",
        "path/p.txt": "changed",
        "path/new.txt": "",
        "tests/a_test.py": "def test(): import tests.help\n",
        "tests/conftest.py": "",
        "tests/help.py": "x = 1\n",
        "wheel/w.py": "    import os\n",
        "wheel/new.py": "",
        "wheel/data.css": "",
    }.items():
        assert changes(name, content), name
    assert dataclasses.replace(outsider, paths=()).digest() != found[-1]


CONFTEST = """
from tests.support import outsiders
outsiders.OUTSIDERS.clear()
outsiders.OUTSIDERS["sample"] = outsiders.Outsider(("tests/sample_test.py",), ("subject.txt",))
pytest_plugins = ["tests.support.by_change", "tests.support.resume"]
"""
SAMPLE = """
import os
import pytest
from pathlib import Path
from tests.support.skips import excused

@pytest.mark.parametrize("number", [1, 2])
def test_subject(number): assert "bad" not in Path("subject.txt").read_text() + os.environ.get("FAULT", "")

@pytest.mark.skipif("absent" in Path("subject.txt").read_text(), reason="no tool")
def test_tool(): not os.environ.get("STOP") or pytest.exit("enough", 1)

@pytest.mark.skip(reason=excused("no GPU"))
def test_gpu(): ...
"""


FORKS = """
import json, os, sys
import execnet, msgspec, pytest
for line in sys.stdin:
    folder, environment, words, outputs = json.loads(line)
    process = os.fork()
    if not process:
        for descriptor, output in enumerate(outputs, 1):
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.path.insert(0, folder)
        sys.argv[1:] = words
        code = pytest.main(words)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    os.waitpid(process, 0)
    print(flush=True)
"""
"""Runs pytest in copies of a process that has imported it, one for each line: folder, environment, words, outputs."""


class Project:
    """A git repository with one outsider of four tests, one of which is skipped, and one other test."""

    def __init__(self, folder: Path, forks: subprocess.Popen[str]) -> None:
        self.folder, self.cache, self._forks = folder, folder.with_name("cache"), forks
        (folder / "tests" / "support").mkdir(parents=True)
        for name in ("by_change", "imported_names", "models", "outsiders", "resume", "skips"):
            shutil.copyfile(ROOT / "tests" / "support" / f"{name}.py", folder / "tests" / "support" / f"{name}.py")
        (folder / "tests" / "conftest.py").write_text(CONFTEST)
        (folder / "tests" / "sample_test.py").write_text(SAMPLE)
        (folder / "tests" / "other_test.py").write_text("def test_other(): ...\n")
        (folder / "pytest.ini").write_text("[pytest]\npython_files = *_test.py\ntestpaths = tests\n")
        (folder / "constraints.txt").write_text("")
        self.git("init", "--quiet")
        self.write("good")

    @classmethod
    def clone_of(cls, other: Project) -> Self:
        clone = cls.__new__(cls)
        clone.folder, clone.cache, clone._forks = other.folder.with_name("clone"), other.cache, other._forks
        other.git("clone", "--quiet", ".", str(clone.folder))
        return clone

    def git(self, *words: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@localhost", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *identity, *words], cwd=self.folder, check=True)  # noqa: S607

    def write(self, content: str) -> None:
        (self.folder / "subject.txt").write_text(content)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", content)

    def run(self, *words: str, **variables: str) -> str:
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
            "XDG_CACHE_HOME": str(self.cache),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "CI": "",
            **variables,
        }
        outputs = [self.folder.with_name(name) for name in ("stdout", "stderr")]
        assert self._forks.stdin is not None
        assert self._forks.stdout is not None
        line = [str(self.folder), environment, ["-p", "no:cacheprovider", *words], [*map(str, outputs)]]
        print(json.dumps(line), file=self._forks.stdin, flush=True)
        assert self._forks.stdout.readline() == "\n"
        stdout, stderr = (output.read_text() for output in outputs)
        assert not stderr, stderr
        return stdout


@pytest.fixture(scope="module")
def forks() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", FORKS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process


@pytest.fixture
def project(tmp_path: Path, forks: subprocess.Popen[str]) -> Project:
    return Project(tmp_path / "project", forks)


LEFT_OUT = "sample: 4 tests, unchanged since "
EVERY_TEST = "4 passed, 1 skipped"


def test_what_passed_is_left_out_until_it_changes(project: Project) -> None:
    """By one process and by several; a run that was asked for everything leaves nothing out."""
    several = ("-p", "xdist", "--numprocesses", "2", "--dist", "loadgroup")
    assert EVERY_TEST in project.run("--outsiders=changed", *several)
    for options in ((), several):
        said = project.run("--outsiders=changed", *options)
        assert LEFT_OUT in said
        assert "1 passed" in said
    assert EVERY_TEST in project.run()
    assert LEFT_OUT in Project.clone_of(project).run("--outsiders=changed")
    project.write("changed")
    assert EVERY_TEST in project.run("--outsiders=changed")
    for _ in range(MAX_COMMITS - 1):
        project.write("changed")
    assert f"(commits since: {MAX_COMMITS - 1} of {MAX_COMMITS})" in project.run("--outsiders=changed")
    project.write("changed")
    assert EVERY_TEST in project.run("--outsiders=changed")


def test_what_did_not_pass_whole_is_no_pass(project: Project) -> None:
    """A failure, a skip for want of a tool, and a run of some of the tests."""
    for content in ("bad", "absent"):
        project.write(content)
        for _ in range(2):
            assert LEFT_OUT not in project.run("--outsiders=changed")
    project.write("good")
    for words in (("-k", "subject"), ("tests/sample_test.py::test_tool",), ("tests/other_test.py",)):
        project.run(*words)
    assert EVERY_TEST in project.run("--outsiders=changed")
    assert LEFT_OUT in project.run("--outsiders=changed", "tests/sample_test.py")


def test_a_failure_undoes_a_pass(project: Project) -> None:
    """What failed with the same files runs again."""
    assert EVERY_TEST in project.run()
    assert "2 failed" in project.run(FAULT="bad")
    assert EVERY_TEST in project.run("--outsiders=changed")
    assert LEFT_OUT in project.run("--outsiders=changed")
    assert "sample: 4 tests, --outsiders=none" in project.run("--outsiders=none")


def test_a_commit_that_git_does_not_know_counts_as_no_pass(project: Project) -> None:
    """As after a rebase, or in a clone without its history."""
    project.run()
    file = project.cache / "bertserve-tests" / "outsiders.json"
    update_record(file, {"sample": Pass(read_record(file)["sample"].digest, "0" * 40)}, set())
    assert EVERY_TEST in project.run("--outsiders=changed")


def test_a_run_that_is_ended_early_is_no_pass(project: Project) -> None:
    """Even if each test that ran has passed."""
    assert "2 passed" in project.run("tests/sample_test.py", STOP="1")
    assert EVERY_TEST in project.run("--outsiders=changed")


def test_a_run_that_was_ended_is_resumed(project: Project) -> None:
    """What passed is left out, what failed is not; a change of the tree, or a run in which all passed, starts anew."""
    file = project.cache / "resumed"
    resume = f"--resume={file}"
    assert "2 failed, 2 passed, 1 skipped" in project.run(resume, FAULT="bad")
    assert "2 passed" in (said := project.run(resume))
    assert "resumed: 3 tests have passed before" in said
    assert not file.exists()
    project.run(resume, STOP="1")
    project.write("changed")
    assert EVERY_TEST in project.run(resume)


@pytest.mark.long
def test_a_run_of_several_processes_is_resumed(project: Project) -> None:
    """As one of a single process."""
    words = (f"--resume={project.cache / 'resumed'}", "-p", "xdist", "--numprocesses", "2")
    assert "2 failed" in project.run(*words, FAULT="bad")
    assert "2 passed" in (said := project.run(*words))
    assert "resumed: 3 tests have passed before" in said
