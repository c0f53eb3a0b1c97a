"""What the doctor makes of this machine and of others, and `bertserve doctor` as an operator runs it."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from bertserve.serving.host import available_cpus
from bertserve.serving.operations.doctor import OPENED, Finding, engines, gpus, machine, serving_with, text
from bertserve.serving.rollout import engine_load
from bertserve.serving.settings import Settings, kind_of
from tests.support.fork_server import fork_server
from tests.support.models import ROOT
from tests.support.server import Server, environment, free_port, refused_start

VERSION = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version: x\n"
OPEN_VERSION = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (root@x)\n"
INFORMATION = "Model: \t\t Tesla T4\nIRQ:   \t\t 36\nGPU UUID: \t GPU-8f3b\nBus Location: \t 0000:00:1e.0\n"


def named(findings: object) -> dict[str, Finding]:
    """Findings by name."""
    return {finding.name: finding for finding in findings}  # type: ignore[attr-defined]


def proc(root: Path, flags: str) -> Path:
    """A `/proc` of another machine."""
    (root / "cpuinfo").write_text(f"model name\t: Some CPU\nflags\t\t: fpu {flags}\n")
    (root / "meminfo").write_text("MemTotal:       16384000 kB\nMemAvailable:    8192000 kB\n")
    return root


@pytest.mark.parametrize("flags", ["avx2 avx512f avx512_vnni", "avx2 avx_vnni", "avx512f amx_int8"])
def test_instructions_that_int8_wants(flags: str, tmp_path: Path) -> None:
    """They are named, and there is nothing to say."""
    found = named(machine(Settings(), proc(tmp_path, flags)))
    assert found["processor"].value == "Some CPU"
    assert found["instructions"].state == "ok"
    assert set(found["instructions"].value.split(", ")) == set(flags.split())
    assert found["memory"].value.startswith("8,000 MiB free of 16,000")


@pytest.mark.parametrize(
    ("settings", "name", "advice"),
    [(Settings(), "instructions", "--precision fp32"), (Settings(threads=200), "cores", "--threads 200")],
    ids=["INT8 gains little", "threads in one another's way"],
)
def test_what_is_worth_a_word(settings: Settings, name: str, advice: str, tmp_path: Path) -> None:
    finding = named(machine(settings, proc(tmp_path, "avx2")))[name]
    assert finding.state == "note"
    assert advice in finding.advice


@pytest.mark.parametrize("driver", [False, True], ids=["no driver", "a container without its device"])
def test_no_card(tmp_path: Path, *, driver: bool) -> None:
    """Is nothing that is wrong."""
    if driver:
        (tmp_path / "driver/nvidia").mkdir(parents=True)
        (tmp_path / "driver/nvidia/version").write_text(VERSION)
    (finding,) = gpus(tmp_path, [])
    why = "NVIDIA driver without a GPU" if driver else "no NVIDIA driver"
    assert (finding.state, finding.value) == ("ok", f"none ({why})")


@pytest.mark.parametrize(("version", "driver"), [(VERSION, "535.104.05"), (OPEN_VERSION, "580.159.04")])
def test_cards_driver_and_libraries(tmp_path: Path, version: str, driver: str) -> None:
    """As the driver tells them, with closed and with open modules, and what is found beside it."""
    for bus in ("0000:00:1e.0", "0000:00:1f.0"):
        (tmp_path / "driver/nvidia/gpus" / bus).mkdir(parents=True)
        (tmp_path / "driver/nvidia/gpus" / bus / "information").write_text(INFORMATION)
    (tmp_path / "driver/nvidia/version").write_text(version)
    folder = tmp_path / "lib" / "x86_64-linux-gnu"
    folder.mkdir(parents=True)
    for name in ("libcuda.so.1", "libnvinfer.so.10", "libother.so.1"):
        (folder / name).touch()
    found = named(gpus(tmp_path, [tmp_path / "lib"]))
    assert found["GPUs"].value == "Tesla T4, Tesla T4"
    assert found["driver"].value == driver
    assert "libcuda.so.1, libnvinfer.so.10" in found["libraries"].value
    assert "libother" not in found["libraries"].value


def test_the_engine_that_is_wanted() -> None:
    """Is marked; the fake one needs no library. What other commands need is listed too."""
    found = named(engines(Settings()))
    assert found["engine ort-cpu"].value.endswith(", which --engine auto uses")
    assert not [finding for finding in engines(Settings(engine="fake")) if "--engine" in finding.value]
    assert found["bertserve batch"].value.startswith("ray ")
    assert found["bertserve load"].value.startswith("hdrhistogram ")


def test_the_report_marks_what_is_wrong() -> None:
    """And ends with what that means."""
    good = Finding("One", "a", "fine")
    bad = Finding("Two", "b", "wrong " * 40, "bad", "mend it")
    assert text([good]).splitlines() == ["One", "   a                fine", "`bertserve serve` would start"]
    lines = text([good, bad]).splitlines()
    assert lines[3].startswith(" ! b")
    assert lines[-2].strip() == "-> mend it"
    assert lines[-1] == "`bertserve serve` would not start: 1 problem, marked with !"
    assert max(map(len, lines)) <= 120


def test_it_looks_at_every_setting_that_names_a_place() -> None:
    """Whatever setting has a path or a port, or says of its text that it names a file: `serve` opens that."""
    fields = Settings.model_fields.items()
    named = {name for name, field in fields if kind_of(field) is Path or name.endswith("_port")}
    told = {
        name
        for name, field in fields
        if kind_of(field) is str and re.search(r"\b(file|folder|PATH)\b", field.description or "")
    }
    assert named | told == OPENED.keys()


def test_two_settings_with_one_port() -> None:
    """Each is free alone; the start could not have both."""
    port = free_port()
    settings = Settings(http_port=port, grpc_port=port, metrics_port=0)
    found = [finding for finding in serving_with(settings) if finding.name == f"port {port}"]
    assert [finding.state for finding in found] == ["ok", "bad"]
    assert "for gRPC" in found[1].value


FREE = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")


def doctor(*options: str, cold: bool = False) -> subprocess.CompletedProcess[str]:
    """The command; `cold`: in a Python that is started anew, as a shell does."""
    if not cold:
        return fork_server().run(["doctor", *options], environment(), ROOT, 60)
    command = [sys.executable, "-m", "bertserve", "doctor", *options]
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
    assert found["cache"]["value"] == f"{tmp_path} is writable"


@pytest.mark.parametrize(("limit_mib", "said"), [(100, "limit of 100 MiB may be too low"), (None, "")])
def test_a_memory_limit_that_is_too_low_is_worth_a_word(
    models: Path, monkeypatch: pytest.MonkeyPatch, limit_mib: int | None, said: str
) -> None:
    """With the memory that the container needs. It is no failure, because the need is an estimate."""
    monkeypatch.setattr(engine_load, "memory_limit", lambda: limit_mib and limit_mib << 20)
    settings = Settings(models=models, engine="ort-cpu", threads=2, http_port=0, grpc_port=0, metrics_port=0)
    finding = named(serving_with(settings)).get("memory")
    assert (finding is not None) == bool(said)
    if finding:
        assert (finding.state, said in finding.value) == ("note", True)
        assert re.fullmatch(r"give it \d+ MiB", finding.advice)


def test_a_server_that_runs_is_named_at_its_ports(models: Path, fake_server: Server) -> None:
    """Who forgot that one is running reads so in place of ports that somebody has."""
    ports = {name: str(getattr(fake_server, name)).rpartition(":")[2] for name in ("http", "grpc", "metrics")}
    done = doctor("--models", str(models), *(word for name in ports for word in (f"--{name}-port", ports[name])))
    assert done.returncode == 1
    words = " ".join(done.stdout.split())
    assert words.count(f"; another bertserve is running at http://127.0.0.1:{ports['metrics']}") == 3
    assert words.endswith("`bertserve serve` would not start: 3 problems, marked with !")


def test_what_stops_serve_is_found(models: Path, tmp_path: Path) -> None:
    """Ports that are taken, models and a table of ids that are not there: each in the words of the start."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        wrong = {
            f"port {port}": ("--grpc-port", port),
            "token IDs": ("--accept-token-ids", f"cl100k_base={tmp_path / 'none'}"),
            "models": ("--models", str(tmp_path)),
        }
        done = doctor("--json", *FREE, *(word for option in wrong.values() for word in option))
        good = ("--models", str(models), "--engine", "fake", *FREE)
        starts = {name: refused_start(*good, *option).stderr for name, option in wrong.items()}
        clients = (*FREE[2:], "--http-port", port)
        shown, start = doctor("--json", "--models", str(models), *clients), refused_start(*good, *clients).stderr
    assert (done.returncode, json.loads(done.stdout)["ok"]) == (1, False)
    found = findings(done)
    assert {name for name, finding in found.items() if finding["state"] == "bad"} == wrong.keys()
    assert [name for name in wrong if found[name]["value"] not in starts[name]] == []
    assert findings(shown)[f"port {port}"]["value"] in start


def test_a_model_that_the_start_exports(tmp_path: Path) -> None:
    """Where it will lie; nothing is looked for in the repository that `--models` would name."""
    done = doctor("--json", "--model-id", "demo", "--cache-dir", str(tmp_path / "cache"), *FREE)
    assert done.returncode == 0, done.stdout
    found = findings(done)
    assert found["export"]["value"].startswith(f"demo: `serve` exports it unless {tmp_path / 'cache' / 'exports'}")
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
