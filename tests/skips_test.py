from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.models import ROOT

if TYPE_CHECKING:
    from pathlib import Path

HOOKS = "from tests.conftest import pytest_make_collect_report, pytest_runtest_makereport\n"
TESTS = """
import pytest
from tests.support.skips import excused

@pytest.fixture
def tool():
    pytest.skip("no tool")

def test_fixture(tool): ...

@pytest.mark.skipif(True, reason="no mark")
def test_mark(): ...

@pytest.mark.skipif(True, reason=excused("no GPU"))
def test_gpu(): ...

@pytest.mark.xfail
def test_expected(): raise ValueError

def test_passes(): ...
"""
MODULE = "import pytest\npytest.importorskip('absent_module', reason='no module')\n"


@pytest.mark.parametrize(("ci", "failed"), [("true", {"no tool", "no mark", "no module"}), ("", set())])
def test_a_skip_in_ci_fails_unless_excused(tmp_path: Path, ci: str, failed: set[str]) -> None:
    """Skips of a fixture, a mark and a file fail there and nowhere else; one for want of a GPU stays a skip."""
    for name, content in {"conftest": HOOKS, "test_skips": TESTS, "test_module": MODULE}.items():
        (tmp_path / f"{name}.py").write_text(content)
    command = [sys.executable, "-m", "pytest", "-ra", "--continue-on-collection-errors", "-p", "no:cacheprovider"]
    environment = {**os.environ, "CI": ci, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "-p", "no:schemathesis", "."],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = {reason for reason in ("no tool", "no mark", "no module", "no GPU") if f"{reason}. CI can" in done.stdout}
    assert said == failed, done.stdout
    assert done.returncode == (1 if failed else 0), done.stdout
    assert f"1 passed, {4 - len(failed)} skipped, 1 xfailed" in done.stdout
