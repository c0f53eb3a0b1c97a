"""A pytest plugin for runs of hours: with `--resume=FILE` a run leaves out what passed in one that was ended before it.

The file lists what has passed on this state of the tree, and is removed once everything has.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.by_change import git

if TYPE_CHECKING:
    from collections.abc import Sequence


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--resume", type=Path, metavar="FILE", help="leave out what FILE says has passed, and add to it")


def pytest_configure(config: pytest.Config) -> None:
    if file := config.getoption("resume"):
        config.pluginmanager.register(Resumed(file, recording=not hasattr(config, "workerinput")))


def tree() -> str:
    changes = git("diff", "HEAD") + git("status", "--porcelain")
    return f"{git('rev-parse', 'HEAD')} {hashlib.sha256(changes.encode()).hexdigest()}"


class Resumed:
    """Leaves out what has passed and, in the process that sees all reports, records what passes."""

    def __init__(self, file: Path, *, recording: bool) -> None:
        self._file, self._recording = file, recording
        self._failed: set[str] = set()
        of, *passed = file.read_text(encoding="utf-8").splitlines() if file.exists() else [""]
        now = tree()
        self._passed = set(passed) if of == now else set()
        if recording and not self._passed:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{now}\n", encoding="utf-8")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in self._passed])
        items[:] = [item for item in items if item.nodeid not in self._passed]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not self._recording:
            return
        if report.failed:
            self._failed.add(report.nodeid)
        elif report.when == "teardown" and report.nodeid not in self._failed:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(f"{report.nodeid}\n")

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if self._recording and exitstatus in {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}:
            self._file.unlink(missing_ok=True)

    def pytest_report_header(self) -> Sequence[str]:
        return [f"resumed: {len(self._passed)} tests have passed before"] if self._passed else []
