"""The README's commands, in its order and after its own installation, from an empty clone."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.support.linked_pip import make_environment
from tests.support.models import ROOT
from tests.support.server import environment, free_port
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from pathlib import Path

README = (ROOT / "README.md").read_text(encoding="utf-8")
EXCUSED = {
    ".venv/bin/bertserve serve --model-id sentence-transformers/all-mpnet-base-v2": "loads a model of 400 MB",
    "kubectl apply -k my-cluster": "needs a cluster; guide_test.py renders and validates it",
}
"""Commands that are not run here, and why."""
SHORTENED = {"bertserve load": " --duration 1"}
"""Commands that measure for minutes, and what makes them short."""
SERVES = "make run"
LIMIT_S, START_LIMIT_S = 600, 1200


def blocks() -> list[tuple[str, str]]:
    """Kind and text of what can be copied, in the README's order: indented blocks, Python, and `(pip install ...)`."""
    shapes = (r"^((?:    [^\n]+\n)+)", r"^```python\n(.*?)^```", r"\(`(pip install [^`]+)`\)")
    found = re.findall("|".join(shapes), README, re.MULTILINE | re.DOTALL)
    return [
        ("python", python) if python else ("shell", re.sub("^    ", "", indented, flags=re.MULTILINE) or pip)
        for indented, python, pip in found
    ]


def commands() -> list[tuple[str, str]]:
    """The same command by command; what a command prints is none."""
    return [
        (kind, command)
        for kind, text in blocks()
        for command in ([text] if kind == "python" else text.splitlines())
        if kind == "python" or not re.match(r"bertserve is ready|  ", command)
    ]


def test_every_excuse_is_of_a_command() -> None:
    """Of those that the README has today."""
    shown = [command for _, command in commands()]
    assert shown[0] == SERVES
    assert EXCUSED.keys() <= set(shown)
    assert all(any(word in command for command in shown) for word in SHORTENED)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The files of this working tree, and an environment whose `pip` needs no network."""
    folder = tmp_path / "clone"
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],  # noqa: S607
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(lambda name: (ROOT / name).is_file(), listed.stdout.splitlines()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    make_environment(folder / ".venv")
    return folder


@pytest.mark.long
def test_every_command_of_the_readme_works(clone: Path) -> None:
    """`make run` serves while the others are run; they end well, and the examples print what the README says."""
    ports = {name: free_port() for name in ("HTTP", "GRPC", "METRICS")}
    env = environment({f"BERTSERVE_{name}_PORT": str(port) for name, port in ports.items()})
    env |= {"PATH": f"{clone / '.venv' / 'bin'}:{env['PATH']}", "HF_HUB_OFFLINE": "1"}
    _, *others = commands()
    log = clone.parent / "server.log"
    with log.open("wb") as out:
        server = subprocess.Popen(SERVES.split(), cwd=clone, env=env, stdout=out, stderr=out, start_new_session=True)
    try:
        wait_for(lambda: "bertserve is ready" in log.read_text() or server.poll() is not None, SERVES, START_LIMIT_S)
        assert re.findall(r"^ {4}(bertserve is ready.*)$", README, re.MULTILINE)[0] in log.read_text()
        for kind, command in others:
            if command in EXCUSED:
                continue
            here = command.replace("127.0.0.1:8000", f"127.0.0.1:{ports['HTTP']}")
            here = here.replace("127.0.0.1:8001", f"127.0.0.1:{ports['GRPC']}")
            here += next((more for word, more in SHORTENED.items() if word in command), "")
            words = [".venv/bin/python", "-c", here] if kind == "python" else ["bash", "-c", here]
            done = subprocess.run(
                words, cwd=clone, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
            )
            # A busy machine may miss an objective, which is an answer too.
            missed = done.returncode == 1 and "--slo" in command and not done.stderr.strip().startswith("bertserve ")
            assert done.returncode == 0 or missed, f"{command}\n{done.stdout}\n{done.stderr}\n{log.read_text()}"
            assert kind == "shell" or f"`{done.stdout.strip()}`" in README
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)
