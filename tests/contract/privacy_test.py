"""What runs here is nobody else's business: the libraries that run models do not report it to their makers.

ONNX Runtime and OpenVINO keep quiet where they take a process for a test of somebody's pipeline, so these tests take
away what they would know that by. Both write an id for the machine into its user's home before they send anything.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.clients import post_json
from tests.support.models import ROOT
from tests.support.server import MEASURED, Server

if TYPE_CHECKING:
    from pathlib import Path

LIMIT_S = 60
LIBRARIES = [name for name in ("onnxruntime", "openvino") if importlib.util.find_spec(name) is not None]
"""Those whose reports are known, as far as they are installed."""


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty home, and no variable but what a process needs to be found and started."""
    for name in os.environ:
        if name not in {"PATH", "LD_LIBRARY_PATH"} and not name.startswith("PYTEST"):
            monkeypatch.delenv(name)
    place = tmp_path / "home"
    place.mkdir()
    monkeypatch.setenv("HOME", str(place))
    return place


def left_in(place: Path) -> list[str]:
    return sorted(str(path.relative_to(place)) for path in place.rglob("*"))


def test_a_server_that_answers_has_left_no_trace(models: Path, home: Path) -> None:
    """Not while it starts, serves and ends."""
    with Server(models, "--engine", "ort-cpu", *MEASURED) as server:
        assert post_json(server.http, "/embed", b'{"inputs": "nobody else shall know"}').status == 200
    assert left_in(home) == []


@pytest.mark.parametrize(
    ("package", "library"),
    [("loadtest", "onnxruntime"), *((package, library) for package in ("serving", "export") for library in LIBRARIES)],
)
def test_our_packages_keep_libraries_quiet(home: Path, package: str, library: str) -> None:
    """Whichever of our modules imports one, its package was imported before."""
    command = [sys.executable, "-c", f"import bertserve.{package}, {library}"]
    subprocess.run(command, cwd=ROOT, timeout=LIMIT_S, check=True)
    assert left_in(home) == []


@pytest.mark.usefixtures("home")
def test_someone_who_wants_reports_may_have_them() -> None:
    """A setting of the operator's own is left as it is."""
    command = [sys.executable, "-c", "import os, bertserve.serving; print(os.environ['ORT_DISABLE_TELEMETRY'])"]
    environment = {**os.environ, "ORT_DISABLE_TELEMETRY": "0"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    assert done.stdout == "0\n"
