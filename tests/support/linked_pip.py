"""In the place of `pip install` without a network: packages are links to what is installed here.

Arguments: the environment, the working directory, and what pip was told.
"""

from __future__ import annotations

import sys
import sysconfig
import venv
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from tests.support.models import ROOT
from tests.support.wheel import link, pip, requirements

_WITH_VALUE = {"--constraint", "-c"}
_EDITABLE = {"--editable", "-e"}
_PROGRAM = """#!{python}
import subprocess, sys, os
words = [{here!r}, "-m", "tests.support.linked_pip", {folder!r}, os.getcwd(), *sys.argv[1:]]
sys.exit(subprocess.call(words, cwd={root!r}))
"""


def make_environment(folder: Path) -> None:
    """A virtual environment with nothing but this pip, as a program and as a module."""
    venv.create(folder, with_pip=False)
    text = _PROGRAM.format(python=folder / "bin" / "python", here=sys.executable, folder=str(folder), root=str(ROOT))
    program, module = folder / "bin" / "pip", _packages(folder) / "pip"
    program.write_text(text)
    program.chmod(0o755)
    module.mkdir()
    (module / "__init__.py").touch()
    (module / "__main__.py").write_text(text)


def _packages(folder: Path) -> Path:
    return Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))


def main(folder: Path, cwd: Path, words: list[str]) -> None:
    """Links what `words` ask for; of a checkout only itself is installed."""
    if words.pop(0) != "install":
        raise SystemExit("only `pip install` is known here")
    while words:
        word = words.pop(0)
        if word in _WITH_VALUE:
            words.pop(0)
        elif word in _EDITABLE or word.startswith("."):  # a checkout stays where it is, in both cases
            place, _, extras = (words.pop(0) if word in _EDITABLE else word).rstrip("]").partition("[")
            link(metadata.distribution("setuptools"), _packages(folder))
            checkout = str(cwd / place)
            pip("--python", str(folder), "install", "--no-deps", "--no-build-isolation", "--editable", checkout)
            (made,) = _packages(folder).glob("bertserve-*.dist-info")
            needs = list(metadata.PathDistribution(made).requires or [])
            _bring(folder, requirements(needs, frozenset(extras.split(","))))
        elif not word.startswith("-"):
            wanted = Requirement(word)
            _bring(folder, requirements([word], frozenset(wanted.extras)))


def _bring(folder: Path, names: set[str]) -> None:
    """Links packages, and writes their commands."""
    for name in names:
        distribution = metadata.distribution(name)
        link(distribution, _packages(folder))
        for entry in distribution.entry_points.select(group="console_scripts"):
            program = folder / "bin" / entry.name
            lines = (
                f"#!{folder / 'bin' / 'python'}",
                f"import sys, {entry.module}",
                f"sys.exit({entry.value.replace(':', '.')}())",
            )
            program.write_text("\n".join(lines))
            program.chmod(0o755)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
