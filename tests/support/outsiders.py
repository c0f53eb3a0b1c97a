"""Tests that need slow programs of others: `make test` runs them when something that they depend on has changed.

The option `--outsiders changed` leaves out tests whose files have the same digest as when they last passed, if that is
less than `MAX_COMMITS` commits ago. The record of it lies outside the checkout, where fresh clones on this machine find
it. Without the option, as in `make test-long`, all tests run.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.models import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_COMMITS = 10
_RECORD = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bertserve-tests" / "outsiders.json"
_GIT_LIMIT_S = 10

COMMON = ("constraints.txt", "pyproject.toml", "Makefile", "bertserve.py", "tests/conftest.py", "tests/support")
"""What all of them depend on."""


@dataclass(frozen=True)
class Outsider:
    """Some slow tests, and what they depend on beside `COMMON` and their own files.

    Attributes:
        tests: Files, or ids of tests, relative to the project.
        paths: Files and folders, relative to the project.
    """

    tests: tuple[str, ...]
    paths: tuple[str, ...]

    def has(self, test: str) -> bool:
        """Whether a test's id is one of these."""
        return any(test == own or test.startswith((f"{own}::", f"{own}[")) for own in self.tests)

    def digest(self, root: Path) -> str:
        """The digest of every file that it depends on: names and contents."""
        total = hashlib.sha256()
        for place in (*COMMON, *self.paths, *sorted({test.partition("::")[0] for test in self.tests})):
            for file in _files(root / place):
                total.update(f"{file.relative_to(root)}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
        return total.hexdigest()


OUTSIDERS = {
    "Ray": Outsider(
        ("tests/batch/job_test.py", "tests/deploy/ray_serve_test.py"), ("batch", "serving", "export", "deploy/ray")
    ),
    "LoadGen": Outsider(("tests/loadtest/mlperf/runs_test.py",), ("loadtest", "charts", "serving")),
    "HAProxy": Outsider(
        ("tests/fault/rolling_test.py", "tests/fault/agent_check_test.py", "tests/loadtest/benchmarks/rolling_test.py"),
        ("loadtest", "charts", "serving", "deploy/haproxy"),
    ),
    # Every package is in it, and each of its commands is started.
    "wheel": Outsider(
        ("tests/deploy/wheel_test.py",),
        ("README.md", "LICENSE", "batch", "charts", "export", "loadtest", "serving", "simulate", "sizing"),
    ),
    "clients": Outsider(
        ("tests/contract/existing_clients_test.py",), ("serving", "tests/contract/clients", "docs/clients.md", "export")
    ),
    "compatibility": Outsider(
        ("tests/export/compatibility_test.py",), ("export", "serving", "charts", "docs/compatibility.md")
    ),
    "capacity": Outsider(
        ("tests/sizing/carried_test.py",), ("sizing", "simulate", "loadtest", "export", "serving", "charts")
    ),
}


def _files(place: Path) -> Iterable[Path]:
    if place.is_file():
        return [place]
    return sorted(path for path in place.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


class Record:
    """With which digest, and at which commit, each outsider passed last."""

    def __init__(self, root: Path = ROOT, file: Path = _RECORD) -> None:
        self._root, self._file = root, file

    def unchanged(self, outsiders: dict[str, Outsider]) -> dict[str, str]:
        """The names of those that need not run, and why."""
        passed = self._read()
        found = {}
        for name, outsider in outsiders.items():
            digest, commit = passed.get(name, ("", ""))
            if digest == outsider.digest(self._root) and (ago := self._commits_since(commit)) is not None:
                found[name] = f"passed {ago} commits ago, and nothing that they depend on has changed"
        return found

    def keep(self, outsiders: dict[str, Outsider]) -> None:
        """Notes that these have passed now."""
        commit = self._git("rev-parse", "HEAD")
        passed = self._read() | {name: (outsider.digest(self._root), commit) for name, outsider in outsiders.items()}
        self._file.parent.mkdir(parents=True, exist_ok=True)
        staged = self._file.with_suffix(f".{os.getpid()}")
        staged.write_text(json.dumps(passed, indent=1), encoding="utf-8")
        staged.replace(self._file)

    def _read(self) -> dict[str, tuple[str, str]]:
        try:
            return {
                name: (str(digest), str(commit))
                for name, (digest, commit) in json.loads(self._file.read_text()).items()
            }
        except (OSError, ValueError, TypeError, AttributeError):  # absent, or damaged: all are run
            return {}

    def _commits_since(self, commit: str) -> int | None:
        """Commits between that one and this, or None where they are too many or git knows no such one."""
        ago = self._git("rev-list", "--count", f"{commit}..HEAD") if commit else ""
        return int(ago) if ago and int(ago) < MAX_COMMITS else None

    def _git(self, *words: str) -> str:
        command = ["git", "-C", str(self._root), *words]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_LIMIT_S, check=False)
        except OSError:
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""


class LeftOut:
    """The plugin that leaves out what is unchanged; of several processes the first decides for all."""

    def __init__(self, config: pytest.Config) -> None:
        workerinput: dict[str, Any] | None = getattr(config, "workerinput", None)
        self._decides = workerinput is None
        self._record = Record()
        self._names: dict[str, str] = workerinput["left_out"] if workerinput else self._record.unchanged(OUTSIDERS)
        self._passed: dict[str, bool] = {}

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tells a process of pytest-xdist."""
        node.workerinput["left_out"] = self._names

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Takes the tests out."""
        left_out = [item for item in items if self._name_of(item.nodeid) in self._names]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if self._name_of(item.nodeid) not in self._names]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes which outsider's tests have all passed."""
        if name := self._name_of(report.nodeid):
            self._passed[name] = self._passed.get(name, True) and report.passed

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Keeps them, after a run that was neither ended early nor told to run a part."""
        whole = not session.config.option.keyword and session.config.args_source is pytest.Config.ArgsSource.TESTPATHS
        if self._decides and whole and exitstatus in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED}:
            self._record.keep({name: OUTSIDERS[name] for name, passed in self._passed.items() if passed})

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Says what was left out, and why."""
        if self._names:
            terminalreporter.section("left out (run them with --outsiders all, or by make test-long)")
            for name, why in self._names.items():
                terminalreporter.line(f"{name}: {why}: {', '.join(OUTSIDERS[name].tests)}")

    def _name_of(self, test: str) -> str:
        return next((name for name, outsider in OUTSIDERS.items() if outsider.has(test)), "")
