"""Skips in CI (`CI` is set): there a test may be skipped only for want of what CI cannot have, as a GPU is."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.support.models import ROOT

if TYPE_CHECKING:
    from pathlib import Path

SHARED = ROOT.parent / "shared"
"""Data and tools that lie beside the project and are no part of it."""
_EXCUSED = " [CI may lack it]"


def excused(reason: str) -> str:
    """The reason of a skip that is none of CI's faults."""
    return reason + _EXCUSED


def needs_shared(path: Path) -> pytest.MarkDecorator:
    """Skips where something of `SHARED` is absent; no fault of CI's where all of it is."""
    reason = f"{path} is absent"
    return pytest.mark.skipif(not path.exists(), reason=reason if SHARED.is_dir() else excused(reason))


def is_excused(report: pytest.TestReport | pytest.CollectReport) -> bool:
    return _reason(report).endswith(_EXCUSED)


def fail_in_ci(report: pytest.TestReport | pytest.CollectReport) -> None:
    if os.environ.get("CI", "").lower() in {"", "0", "false"} or not report.skipped or hasattr(report, "wasxfail"):
        return
    if not is_excused(report):
        report.longrepr = f"{_reason(report)}. CI can have what is missing: a skip is a failure there."
        report.outcome = "failed"


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    return report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
