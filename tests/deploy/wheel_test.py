"""The built wheel is all that is needed: it is installed into a bare environment and serves from there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.support.clients import Grpc, Tei, get
from tests.support.models import HIDDEN_SIZE, ROOT
from tests.support.server import MEASURED, Server, environment
from tests.support.wheel import PACKAGES, install

if TYPE_CHECKING:
    from collections.abc import Iterator

EXTRAS = frozenset({"cpu"})
"""As `pip install 'bertserve[cpu]'`."""
NO_DATA = {".py", ".md", ".pyc"}


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment that holds the wheel and what it asks for."""
    return install(wheel, tmp_path_factory.mktemp("bare") / "environment", EXTRAS)


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory from which the repository cannot be imported."""
    return tmp_path_factory.mktemp("elsewhere")


@pytest.fixture(scope="module")
def installed(programs: Path, elsewhere: Path, models: Path) -> Iterator[Server]:
    """The installed `bertserve serve`, with the INT8 artifact on ONNX Runtime."""
    program = (str(programs / "bertserve"),)
    with Server(models, "--precision", "int8", *MEASURED, program=program, cwd=elsewhere) as server:
        yield server


def run(program: Path, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs an installed program outside the repository."""
    return subprocess.run(
        [str(program), *words], cwd=cwd, env=environment(), capture_output=True, text=True, timeout=60, check=False
    )


def test_every_data_file_is_in_the_wheel(wheel: Path) -> None:
    """Pages, styles, texts, tables, protocol definitions and the mark that the packages are typed."""
    folders = [ROOT / package for package in PACKAGES]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and path.suffix not in NO_DATA]
    data = {f"bertserve/{path.relative_to(ROOT)}" for path in files if "__pycache__" not in path.parts}
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "bertserve/serving/web/index.html" in data
    assert (data | {"bertserve/py.typed"}) - names == set()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"bertserve"}


def test_the_wheel_brings_its_licence(wheel: Path) -> None:
    """The text, and its name in the metadata."""
    with zipfile.ZipFile(wheel) as archive:
        (folder,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        assert archive.read(f"{folder}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        assert "License-Expression: Apache-2.0" in archive.read(f"{folder}/METADATA").decode()


def test_only_the_wheel_is_imported(programs: Path, elsewhere: Path) -> None:
    """Neither the repository nor a package that the wheel does not ask for: the environment is a bare one."""
    names = ("bertserve", "serving", "torch", "pytest")
    code = f"from importlib.util import find_spec\nfor name in {names}: print(find_spec(name))"
    done = run(programs / "python", "-c", code, cwd=elsewhere)
    ours, *others = done.stdout.splitlines()
    assert str(programs.parent) in ours
    assert others == ["None", "None", "None"]


@pytest.mark.parametrize("place", ["wheel", "checkout"])
def test_a_project_may_have_folders_of_the_same_names(programs: Path, tmp_path: Path, place: str) -> None:
    """Its own are imported by those names, and ours by one name each."""
    for name in PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    code = (
        "import os, sys, bertserve.serving.server, bertserve.serving.bulk.cli, serving, export, loadtest\n"
        "files = [os.path.realpath(getattr(module, '__file__', None) or '') for module in sys.modules.values()]\n"
        "ours = [file for file in files if file.startswith(os.path.realpath(bertserve.serving.__path__[0]))]\n"
        "assert len(ours) == len(set(ours)) > 50\n"
        "print(serving.__file__, export.__file__, loadtest.__file__)"
    )
    python = programs / "python" if place == "wheel" else Path(sys.executable)
    done = run(python, "-c", code, cwd=tmp_path)
    assert done.stdout.split() == [str(tmp_path / name / "__init__.py") for name in PACKAGES], done.stderr


def test_a_checkout_offers_one_name(elsewhere: Path) -> None:
    """Its folders are found below `bertserve` alone."""
    code = "from importlib.util import find_spec\nfor name in ('serving', 'export', 'loadtest'): print(find_spec(name))"
    done = run(Path(sys.executable), "-c", code, cwd=elsewhere)
    assert done.stdout.split() == ["None"] * 3


def test_it_serves(installed: Server) -> None:
    """A real model answers over HTTP and gRPC with the same vector, of length 1."""
    vectors = []
    for transport in (Tei, Grpc):
        with transport(installed) as client:
            vectors.append(client.embed(["What is a T4?"]).vectors)
    assert np.asarray(vectors[0]).shape == (1, HIDDEN_SIZE)
    assert np.linalg.norm(vectors[0]) == pytest.approx(1, abs=1e-5)
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-5)


def test_it_brings_its_pages(installed: Server) -> None:
    """The console with its modules, and the documentation of the API."""
    files = re.findall(r'(?:src|href)="(console/[^"]+)"', get(installed.http, "/").body.decode())
    assert len(files) > 1
    for path in [*files, "docs"]:
        assert get(installed.http, f"/{path}").status == 200, path
    assert json.loads(get(installed.http, "/openapi.json").body)["paths"]


@pytest.mark.parametrize(
    "command",
    [
        *("serve", "export", "load", "simulate", "batch"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("verify", "inspect", "build", "doctor")),
    ],
)
def test_every_command_explains_itself(programs: Path, elsewhere: Path, command: str) -> None:
    """`--help` needs nothing that the environment lacks."""
    done = run(programs / "bertserve", command, "--help", cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    assert "usage: bertserve" in done.stdout


def test_it_says_which_version_it_is(programs: Path, elsewhere: Path, wheel: Path) -> None:
    """That of the wheel."""
    done = run(programs / "bertserve", "--version", cwd=elsewhere)
    assert done.stdout == f"bertserve {wheel.name.split('-')[1]}\n"


def test_an_export_says_what_to_install(programs: Path, elsewhere: Path, tmp_path: Path) -> None:
    """Where libraries are missing the start ends with one sentence before it loads anything, and leaves nothing."""
    for name in ("somebody/something", "."):
        done = run(programs / "bertserve", *("serve", "--model-id", name, "--cache-dir", str(tmp_path)), cwd=elsewhere)
        assert done.returncode == 1
        *_, line = done.stderr.splitlines()
        assert re.search(r"the module \w+ is missing: /\S+/pip install 'bertserve\[cpu,export\]'$", line)
        assert not list(tmp_path.iterdir())


def test_the_simulator_brings_its_tables(wheel: Path, programs: Path, elsewhere: Path) -> None:
    """It finds NVIDIA's published costs. A page needs an extra, which the command names; its templates are there."""
    words = ("--cost", "t4-bert-base-fp16", "--tokens", "128", "--rate", "50", "--slo-p99-ms", "100", "--duration", "5")
    done = run(programs / "bertserve", "simulate", *words, cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    done = run(programs / "bertserve", "simulate", *words, "--out", "page.html", cwd=elsewhere)
    assert done.returncode == 2
    assert re.search(r"the module jinja2 is missing: /\S+/pip install 'bertserve\[loadtest\]'$", done.stderr)
    assert not (elsewhere / "page.html").exists()
    pages = ("export/*.html", "export/*.css", "export/*.mplstyle", "loadtest/*.html", "loadtest/*.j2")
    kept = subprocess.run(["git", "ls-files", *pages], cwd=ROOT, capture_output=True, text=True, check=True).stdout  # noqa: S607
    assert {f"bertserve/{name}" for name in kept.split()} <= set(zipfile.ZipFile(wheel).namelist())
