from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.outsiders import COMMON, MAX_COMMITS, OUTSIDERS, Outsider, Record

ROOT = Path(__file__).parents[1]
STARTERS = {"tests/support/server.py", "tests/support/ray_nodes.py", "loadtest/benchmarks/server_process.py"}
"""Modules that start the server by its command: what imports them depends on all of it."""


def files_of(module: str) -> list[Path]:
    """The files that an import of this name runs, if it is one of the project."""
    places = [ROOT / Path(*module.split(".")[: end + 1]) for end in range(module.count(".") + 1)]
    files = [*(place / "__init__.py" for place in places), places[-1].with_suffix(".py")]
    return [file for file in files if file.is_file()]


def imports_of(file: Path) -> set[str]:
    """The names that a file imports, at any depth; for types alone is not at all."""
    found, nodes = set(), list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    for_types = {
        id(node)
        for test in nodes
        if isinstance(test, ast.If) and "TYPE_CHECKING" in ast.dump(test.test)
        for branch in test.body
        for node in ast.walk(branch)
    }
    for node in nodes:
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def closure_of(files: list[Path]) -> set[str]:
    """The project's files that these import, directly or not, themselves included."""
    found: set[Path] = set()
    while files:
        file = files.pop()
        if file not in found:
            found.add(file)
            files += [other for name in imports_of(file) for other in files_of(name)]
    return {str(file.relative_to(ROOT)) for file in found}


@pytest.mark.parametrize("name", OUTSIDERS)
def test_the_table_names_all_that_an_outsider_imports(name: str) -> None:
    """Every path exists; what the tests import, or the server that they start, lies in one of them."""
    outsider = OUTSIDERS[name]
    own = [test.partition("::")[0] for test in outsider.tests]
    places = [*COMMON, *outsider.paths, *own]
    assert [place for place in places if not (ROOT / place).exists()] == []
    imported = closure_of([ROOT / file for file in own])
    if imported & STARTERS:
        imported.add("serving/cli.py")
    assert [file for file in sorted(imported) if not any(f"{file}/".startswith(f"{place}/") for place in places)] == []


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout of one commit, with one file that a test depends on and one that none does."""
    root = tmp_path / "checkout"
    (root / "source").mkdir(parents=True)
    (root / "source" / "part.py").write_text("1")
    git(root, "init", "--quiet")
    commit(root)
    return root


def git(root: Path, *words: str) -> None:
    identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    subprocess.run(["git", "-C", str(root), *identity, *words], check=True, timeout=60)  # noqa: S607  as it is found


def commit(root: Path, times: int = 1) -> None:
    for _ in range(times):
        git(root, "commit", "--quiet", "--allow-empty", "--message", "a change")


ONE = {"one": Outsider(("source/part_test.py",), ("source",))}


def test_what_has_passed_is_left_out_until_a_file_changes(checkout: Path, tmp_path: Path) -> None:
    """In a checkout that is another folder too; a changed, a new and a renamed file each run it again."""
    record = Record(checkout, tmp_path / "kept" / "record.json")
    assert record.unchanged(ONE) == {}
    record.keep(ONE)
    assert "passed 0 commits ago" in record.unchanged(ONE)["one"]
    (checkout / "elsewhere.py").write_text("2")
    assert record.unchanged(ONE).keys() == {"one"}
    (checkout / "source" / "part.py").write_text("2")
    assert record.unchanged(ONE) == {}
    record.keep(ONE)
    (checkout / "source" / "new.py").write_text("")
    assert record.unchanged(ONE) == {}
    record.keep(ONE)
    (checkout / "source" / "new.py").rename(checkout / "source" / "other.py")
    assert record.unchanged(ONE) == {}
    other = Record(checkout.rename(tmp_path / "clone"), tmp_path / "kept" / "record.json")
    assert other.unchanged(ONE) == {}
    other.keep(ONE)
    assert other.unchanged(ONE).keys() == {"one"}


def test_everything_runs_within_ten_commits(checkout: Path, tmp_path: Path) -> None:
    """Whatever has changed."""
    record = Record(checkout, tmp_path / "record.json")
    record.keep(ONE)
    commit(checkout, MAX_COMMITS - 1)
    assert "passed 9 commits ago" in record.unchanged(ONE)["one"]
    commit(checkout)
    assert record.unchanged(ONE) == {}


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"one": 1}', '{"one": ["a"]}', '{"one": ["digest", "--all"]}'], ids=str
)
def test_a_record_that_is_damaged_runs_everything(checkout: Path, tmp_path: Path, content: str) -> None:
    """And is replaced by the next that is kept."""
    file = tmp_path / "record.json"
    file.write_text(content)
    assert Record(checkout, file).unchanged(ONE) == {}
    Record(checkout, file).keep(ONE)
    assert Record(checkout, file).unchanged(ONE).keys() == {"one"}


def test_a_commit_that_is_not_there_runs_everything(checkout: Path, tmp_path: Path) -> None:
    """As after a rebase, or in a clone without its history."""
    file = tmp_path / "record.json"
    record = Record(checkout, file)
    record.keep(ONE)
    digest, _ = json.loads(file.read_text())["one"]
    file.write_text(json.dumps({"one": [digest, "0" * 40]}))
    assert record.unchanged(ONE) == {}


PROBE = """
def test_first(): pass
def test_second(): assert {second}
"""


def run(folder: Path, cache: Path, *options: str, second: bool) -> str:
    """A run of a small project that has this one's plugin, and one outsider."""
    (folder / "first_test.py").write_text(PROBE.format(second=True))
    (folder / "second_test.py").write_text(PROBE.format(second=second))
    (folder / "pytest.ini").write_text("[pytest]\ntestpaths = .\npython_files = *_test.py\n")
    (folder / "conftest.py").write_text(
        "from tests.support import outsiders\n"
        "from tests.conftest import pytest_addoption, pytest_configure\n"
        "outsiders.OUTSIDERS = {'one': outsiders.Outsider(('first_test.py',), ()), "
        "'two': outsiders.Outsider(('second_test.py',), ())}\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:schemathesis", *options]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(cache)}
    env = {name: value for name, value in env.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)
    return done.stdout + done.stderr


@pytest.mark.parametrize("processes", ["0", "2"])
def test_a_run_leaves_out_what_has_passed(tmp_path: Path, processes: str) -> None:
    """And says so; what failed is run again, in one process or in several; `all` runs everything."""
    folder, cache = tmp_path / "project", tmp_path / "cache"
    folder.mkdir()
    changed = ("--outsiders", "changed", "--numprocesses", processes)
    assert "1 failed, 3 passed" in run(folder, cache, *changed, second=False)
    again = run(folder, cache, *changed, second=True)
    assert "2 passed" in again
    assert "one: passed 0 commits ago" in again
    assert "two: " not in again
    none = run(folder, cache, *changed, second=True)
    assert "two: passed 0 commits ago" in none
    assert "4 passed" in run(folder, cache, "--numprocesses", processes, second=True)
