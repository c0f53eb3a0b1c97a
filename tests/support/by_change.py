"""A pytest plugin that leaves outsiders out of a run (`--outsiders=changed`) until a file on which they depend changes.

A record outside the clone, so that a fresh one finds it, keeps the digest and the commit with which each last passed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import pytest

from tests.support.outsiders import OUTSIDERS, ROOT
from tests.support.skips import is_excused

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.outsiders import Outsider

MAX_COMMITS = 10
"""An outsider runs again after so many commits, whatever they changed."""


class Pass(msgspec.Struct, frozen=True):
    """An outsider's last pass: the digest of its files and the newest commit then."""

    digest: str
    commit: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{40,64}$")]


def record_file() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "bertserve-tests" / "outsiders.json"


def read_record(file: Path) -> dict[str, Pass]:
    """The last passes by name; none if the file is absent or damaged."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Pass])
    except (OSError, msgspec.MsgspecError):
        return {}


def update_record(file: Path, passed: dict[str, Pass], failed: set[str]) -> None:
    """Adds what passed and removes what failed; another run that reads at this moment sees one state or the other."""
    record = {name: last for name, last in read_record(file).items() if name not in failed} | passed
    file.parent.mkdir(parents=True, exist_ok=True)
    making = file.with_name(f".{file.name}-{os.getpid()}")
    making.write_bytes(msgspec.json.encode(record))
    making.replace(file)


def git(*words: str) -> str:
    """What git says of the project; nothing if it fails."""
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S607
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def commits_since(commit: str) -> int | None:
    """How many commits came after this one; None if git does not know."""
    found = git("rev-list", "--count", f"{commit}..HEAD")
    return int(found) if found else None


def unchanged(last: Pass | None, digest: str, since: Callable[[str], int | None] = commits_since) -> str:
    """Why an outsider need not run now; empty if it must."""
    if last is None or last.digest != digest:
        return ""
    commits = since(last.commit)
    if commits is None or commits >= MAX_COMMITS:
        return ""
    return f"unchanged since {last.commit[:10]} (commits since: {commits} of {MAX_COMMITS})"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--outsiders",
        choices=("all", "changed", "none"),
        default="all",
        help="which tests with other people's software run: all, those concerned by a change, or none",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Worker(config) if hasattr(config, "workerinput") else Controller(config))


class Worker:
    """Leaves out what the controller says."""

    def __init__(self, config: pytest.Config) -> None:
        self.left_out: dict[str, str] = getattr(config, "workerinput", {}).get("outsiders", {})
        self.numbers: Counter[str] = Counter()
        self._names = {test: name for name, outsider in OUTSIDERS.items() for test in outsider.tests}

    def outsider_of(self, nodeid: str) -> str | None:
        """The outsider to which a test belongs; neither parameters nor xdist's group are part of the test's name."""
        file, test = nodeid.partition("::")[0], nodeid.partition("[")[0].partition("@")[0]
        return self._names.get(file) or self._names.get(test)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        names = [(item, self.outsider_of(item.nodeid)) for item in items]
        if deselected := [item for item, name in names if name in self.left_out]:
            config.hook.pytest_deselected(items=deselected)
            items[:] = [item for item, name in names if name not in self.left_out]
        self.numbers = Counter(name for _, name in names if name in self.left_out)
        if hasattr(config, "workeroutput"):
            config.workeroutput["outsiders"] = dict(self.numbers)


class Controller(Worker):
    """Decides once for all processes, says what is left out, and keeps what passed."""

    def __init__(self, config: pytest.Config) -> None:
        super().__init__(config)
        self._record = record_file()
        # What is not asked for whole is neither left out nor recorded.
        self._digests = {name: one.digest() for name, one in OUTSIDERS.items() if _is_whole(config, one)}
        self._planned: dict[str, set[str]] = defaultdict(set)
        self._passed: set[str] = set()
        self._excused: set[str] = set()
        self._failed: set[str] = set()
        mode = config.getoption("outsiders")
        if mode == "none":
            self.left_out = dict.fromkeys(OUTSIDERS, "--outsiders=none")
        elif mode == "changed":
            record = read_record(self._record)
            reasons = {name: unchanged(record.get(name), digest) for name, digest in self._digests.items()}
            self.left_out = {name: reason for name, reason in reasons.items() if reason}

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["outsiders"] = self.left_out

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.numbers |= Counter(getattr(node, "workeroutput", {}).get("outsiders", {}))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._plan(ids)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._plan([item.nodeid for item in session.items])

    def _plan(self, ids: list[str]) -> None:
        for nodeid in ids:
            if name := self.outsider_of(nodeid):
                self._planned[name].add(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and (name := self.outsider_of(report.nodeid)):
            self._failed.add(name)
        elif report.skipped and is_excused(report):
            self._excused.add(report.nodeid)
        elif report.passed and report.when == "call":
            self._passed.add(report.nodeid)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        passed: dict[str, Pass] = {}
        if exitstatus in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED} and (commit := git("rev-parse", "HEAD")):
            for name, digest in self._digests.items():
                planned = self._planned[name]
                ran = planned <= self._passed | self._excused and bool(planned & self._passed)
                # Whoever edits while tests run does not know what passed.
                if ran and name not in self._failed and OUTSIDERS[name].digest() == digest:
                    passed[name] = Pass(digest, commit)
        if passed or self._failed:
            with contextlib.suppress(OSError):  # without a record all of them run next time
                update_record(self._record, passed, self._failed)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.numbers:
            terminalreporter.section("outsiders left out (make test-long runs them)")
            for name, number in self.numbers.items():
                terminalreporter.line(f"{name}: {number} tests, {self.left_out[name]}")


def _is_whole(config: pytest.Config, outsider: Outsider) -> bool:
    """Whether a run asks for all of its tests, or all but the long ones."""
    option = config.option
    parts = (
        *(option.keyword, option.deselect, option.ignore, option.ignore_glob, option.continue_on_collection_errors),
        *(config.getoption(name, None) for name in ("resume", "front_processes", "one_in")),
    )
    if option.markexpr not in {"", "not endurance", "not long and not endurance"} or any(parts):
        return False
    asked = [config.invocation_params.dir / argument for argument in config.args]
    return all(any((ROOT / test.partition("::")[0]).is_relative_to(path) for path in asked) for test in outsider.tests)
