"""What the doctor makes of machines that are not this one."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

import pytest

from serving.bulk.batches_api.store import BatchesApiStore, StoreLimits
from serving.errors import StartupError
from serving.operations.doctor import OPENED, Finding, engines, gpus, machine, serving_with, text
from serving.settings import Settings, kind_of
from tests.support.server import free_port

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


def test_a_processor_without_them(tmp_path: Path) -> None:
    """INT8 works and gains little, which is worth a word."""
    found = named(machine(Settings(), proc(tmp_path, "avx2")))
    assert found["instructions"].state == "note"
    assert "--precision fp32" in found["instructions"].advice


def test_more_threads_than_cores(tmp_path: Path) -> None:
    """They would stand in one another's way."""
    found = named(machine(Settings(threads=200), proc(tmp_path, "avx2")))
    assert found["cores"].state == "note"
    assert "--threads 200" in found["cores"].advice


def test_no_driver(tmp_path: Path) -> None:
    """Is nothing that is wrong."""
    (finding,) = gpus(tmp_path, [])
    assert (finding.state, finding.value) == ("ok", "none (no NVIDIA driver)")


def test_a_driver_without_a_card(tmp_path: Path) -> None:
    """A container without its device."""
    (tmp_path / "driver/nvidia").mkdir(parents=True)
    (tmp_path / "driver/nvidia/version").write_text(VERSION)
    (finding,) = gpus(tmp_path, [])
    assert finding.value == "none (the driver is there and no GPU)"


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


def test_a_folder_of_batches_is_looked_at_and_left_alone(tmp_path: Path) -> None:
    """One in use, one with something else in it and one of another version are refused in the words of the start."""
    folders = {name: tmp_path / name for name in ("used", "foreign", "later", "free")}
    limits = StoreLimits.of(Settings())
    used = BatchesApiStore(folders["used"], limits)
    BatchesApiStore(folders["free"], limits).close()
    BatchesApiStore(folders["later"], limits).close()
    with sqlite3.connect(folders["later"] / "jobs.sqlite") as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    folders["foreign"].mkdir()
    (folders["foreign"] / "jobs.sqlite").write_bytes(b"something else" * 100)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    found = {
        name: named(serving_with(Settings(batch_dir=folder, http_port=0, grpc_port=0, metrics_port=0)))["batches"]
        for name, folder in folders.items()
    }
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert {name: finding.state for name, finding in found.items()} == dict.fromkeys(folders, "bad") | {"free": "ok"}
    used.close()
    assert "another server uses this folder" in found["used"].value
    for name in ("foreign", "later"):
        with pytest.raises(StartupError) as refused:
            BatchesApiStore(folders[name], limits)
        assert str(refused.value) == found[name].value


def test_two_settings_with_one_port() -> None:
    """Each is free alone; the start could not have both."""
    port = free_port()
    settings = Settings(http_port=port, grpc_port=0, metrics_port=0, agent_port=port)
    found = [finding for finding in serving_with(settings) if finding.name == f"port {port}"]
    assert [finding.state for finding in found] == ["ok", "bad"]
    assert "for agent checks" in found[1].value
