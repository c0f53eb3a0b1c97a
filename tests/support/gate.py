"""What a server does with a repository before any engine runs, in a process that has none.

Run as `python -m tests.support.gate ENGINE`: reads a repository's path a line, answers a line of JSON: why it is
refused, or null. Importing the library of an engine fails here, so whatever is refused is refused without it.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Self

from tests.support.models import ROOT
from tests.support.server import environment

ENGINES = ("onnxruntime", "openvino", "tensorrt", "tensorrt_rtx", "onnx", "torch")


class Gate:
    """The process, from the side of a test; use it in a `with` block."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.gate"],
            cwd=ROOT,
            env=environment({"PYTHONPATH": str(ROOT)}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def refusal(self, repository: Path) -> str | None:
        """Why a repository is refused; None where it would now be given to an engine."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{repository}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the process ended"
        found: str | None = json.loads(line)
        return found


def _can_import(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def main() -> None:
    """Answers until its input ends."""
    sys.modules.update(dict.fromkeys(ENGINES))  # type: ignore[arg-type]  None is Python's mark for "not to be had"
    assert not any(map(_can_import, ENGINES))
    from bertserve.serving.errors import StartupError  # noqa: PLC0415  after the engines are gone
    from bertserve.serving.inference.served_models import Repository  # noqa: PLC0415

    for line in sys.stdin:
        refused = None
        try:
            Repository.open(Path(line.rstrip("\n")))
        except StartupError as error:
            refused = str(error)
        sys.stdout.write(f"{json.dumps(refused)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
