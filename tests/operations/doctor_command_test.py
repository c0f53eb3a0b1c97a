"""`bertserve doctor` as an operator runs it: what it says of this machine is what `serve` then finds."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from serving.host import available_cpus
from tests.support.fork_server import fork_server
from tests.support.models import ROOT
from tests.support.server import Server, environment, refused_start

if TYPE_CHECKING:
    from pathlib import Path

FREE = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")


def doctor(*options: str, cold: bool = False) -> subprocess.CompletedProcess[str]:
    """The command; `cold`: in a Python that is started anew, as a shell does."""
    if not cold:
        return fork_server().run(["doctor", *options], environment(), ROOT, 60)
    command = [sys.executable, "bertserve.py", "doctor", *options]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60, check=False)


def findings(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    """What `--json` printed, by name."""
    return {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}


def test_a_machine_that_can_serve(models: Path, tmp_path: Path) -> None:
    """One screen, exit code 0, and nothing is changed."""
    done = doctor("--models", str(models), "--cache-dir", str(tmp_path), *FREE, cold=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "`bertserve serve` would start"
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 120
    assert {"Machine", "GPU", "Software", "Serving"} <= set(lines)
    assert not list(tmp_path.iterdir())
    assert not done.stderr


def test_what_it_says_is_so(models: Path, tmp_path: Path) -> None:
    """Versions, cores and models, as programs read them."""
    done = doctor("--json", "--models", str(models), "--cache-dir", str(tmp_path), *FREE)
    found = findings(done)
    assert json.loads(done.stdout)["ok"] is True
    assert found["engine ort-cpu"]["value"].startswith(f"onnxruntime {version('onnxruntime')}")
    assert f"tokenizers {version('tokenizers')}" in found["libraries"]["value"]
    assert found["cores"]["value"].startswith(f"{available_cpus()} usable of ")
    assert found["model"]["value"].startswith("minilm version 1: embed, int8, ")
    assert found["cache"]["value"] == f"{tmp_path} can be written"


def test_a_server_that_runs_is_named_at_its_ports(models: Path, fake_server: Server) -> None:
    """Who forgot that one is running reads so in place of ports that somebody has."""
    ports = {name: str(getattr(fake_server, name)).rpartition(":")[2] for name in ("http", "grpc", "metrics")}
    done = doctor("--models", str(models), *(word for name in ports for word in (f"--{name}-port", ports[name])))
    assert done.returncode == 1
    words = " ".join(done.stdout.split())
    assert words.count(f"; a bertserve answers at http://127.0.0.1:{ports['metrics']}, and has these ports") == 3
    assert words.endswith("`bertserve serve` would not start: 3 problems, marked with !")


def test_what_stops_serve_is_found(models: Path, tmp_path: Path) -> None:
    """A port that is taken, models that are not there: each for itself, in the words of the start."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        options = ("--models", str(tmp_path), *FREE[2:], "--http-port", port)
        done = doctor("--json", *options)
        ports = refused_start("--models", str(models), *FREE[2:], "--http-port", port).stderr
    assert done.returncode == 1
    assert json.loads(done.stdout)["ok"] is False
    found = findings(done)
    assert {name for name, finding in found.items() if finding["state"] == "bad"} == {"models", f"port {port}"}
    assert found[f"port {port}"]["value"] in ports
    assert found["models"]["value"] in refused_start("--models", str(tmp_path), *FREE).stderr


def test_what_else_serve_opens_is_found(models: Path, tmp_path: Path) -> None:
    """A port of agent checks that is taken, a folder of batches that is a file, a table of ids that is not there."""
    file = tmp_path / "file"
    file.touch()
    ids = f"cl100k_base={tmp_path / 'none'}"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        wrong = (("--agent-port", port), ("--batch-dir", str(file)), ("--accept-token-ids", ids))
        done = doctor("--json", "--models", str(models), *FREE, *(word for option in wrong for word in option))
        starts = [refused_start("--models", str(models), "--engine", "fake", *FREE, *option).stderr for option in wrong]
    assert done.returncode == 1
    found = findings(done)
    names = (f"port {port}", "batches", "token ids")
    assert {name for name, finding in found.items() if finding["state"] == "bad"} == set(names)
    for name, start in zip(names, starts, strict=True):
        assert found[name]["value"] in start


def test_a_model_that_the_start_exports(tmp_path: Path) -> None:
    """Where it will lie; nothing is looked for in the repository that `--models` would name."""
    done = doctor("--json", "--model-id", "demo", "--cache-dir", str(tmp_path / "cache"), *FREE)
    assert done.returncode == 0, done.stdout
    found = findings(done)
    assert found["export"]["value"].startswith(f"demo: the start exports it where {tmp_path / 'cache' / 'exports'}")
    assert "models" not in found
    assert not list(tmp_path.iterdir())


def test_what_could_be_better_is_no_failure(models: Path) -> None:
    """A cache that cannot be written: the server would start without it."""
    done = doctor("--json", "--models", str(models), "--cache-dir", "/proc/none", *FREE)
    assert done.returncode == 0
    assert findings(done)["cache"]["state"] == "note"


def test_wrong_options_are_the_servers(models: Path) -> None:
    """The same sentence and the same exit code."""
    wrong = ("--models", str(models), "--precison", "int8")
    done, refused = doctor(*wrong), refused_start(*wrong)
    assert done.returncode == refused.returncode == 2
    assert done.stderr.removeprefix("bertserve doctor: ") == refused.stderr.removeprefix("bertserve serve: ")


def test_its_help() -> None:
    """Says what it is for."""
    done = doctor("--help")
    assert done.returncode == 0
    assert "--json" in done.stdout
