"""The project's wheel, and an environment that holds nothing but the wheel and what it asks for."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from tests.support.models import ROOT

NAME = "bertserve"
PACKAGES = ("serving", "export", "loadtest")
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "src", *PACKAGES)
"""What the wheel is built of."""
_LIMIT_S = 120


def build_wheel(folder: Path) -> Path:
    """Builds the wheel from a copy of the sources, so that nothing is left in the working tree; returns its path."""
    copy = folder / "src"
    copy.mkdir(parents=True)
    for source in SOURCES:
        if (ROOT / source).is_dir():
            shutil.copytree(
                ROOT / source, copy / source, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
            )
        else:
            shutil.copyfile(ROOT / source, copy / source)
    _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(copy))
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(wheel: Path, folder: Path, extras: frozenset[str]) -> Path:
    """Makes an environment with the wheel and its requirements; returns the environment's `bin`.

    The requirements are links to what is installed here: no package is loaded, and no package that the wheel does not
    ask for can be imported.
    """
    venv.create(folder, with_pip=False)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    _pip("--python", str(folder), "install", "--no-deps", "--no-index", str(wheel))
    ours = metadata.PathDistribution(next(packages.glob(f"{NAME}-*.dist-info")))
    for name in requirements(list(ours.requires or []), extras):
        _link(metadata.distribution(name), packages)
    return folder / "bin"


def requirements(own: list[str], extras: frozenset[str]) -> set[str]:
    """The names of all packages that these requirements bring, directly or not, as far as they are installed here."""
    done: set[tuple[str, frozenset[str]]] = set()
    todo = _wanted(own, extras)
    names: set[str] = set()
    while todo:
        name, wanted = todo.pop()
        if (name, wanted) in done:
            continue
        done.add((name, wanted))
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # of the other kind of machine
            continue
        names.add(name)
        todo += _wanted(needs, wanted)
    return names


def _wanted(needs: list[str], extras: frozenset[str]) -> list[tuple[str, frozenset[str]]]:
    return [
        (need.name.lower(), frozenset(need.extras))
        for need in map(Requirement, needs)
        if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras or {""})
    ]


def _link(distribution: metadata.Distribution, packages: Path) -> None:
    for top in {file.parts[0] for file in distribution.files or [] if file.parts[0] not in {"..", "__pycache__"}}:
        source = Path(str(distribution.locate_file(top)))
        target = packages / top
        if source.exists() and not target.exists():
            target.symlink_to(source)


def _pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if done.returncode != 0:
        raise AssertionError(done.stdout + done.stderr)
