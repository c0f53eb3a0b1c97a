"""What the doctor makes of machines that are not this one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from serving.operations.doctor import Finding, engines, gpus, machine, text
from serving.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

VERSION = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version: x\n"
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


def test_cards_driver_and_libraries(tmp_path: Path) -> None:
    """As the driver tells them, and what is found beside it."""
    for bus in ("0000:00:1e.0", "0000:00:1f.0"):
        (tmp_path / "driver/nvidia/gpus" / bus).mkdir(parents=True)
        (tmp_path / "driver/nvidia/gpus" / bus / "information").write_text(INFORMATION)
    (tmp_path / "driver/nvidia/version").write_text(VERSION)
    folder = tmp_path / "lib" / "x86_64-linux-gnu"
    folder.mkdir(parents=True)
    for name in ("libcuda.so.1", "libnvinfer.so.10", "libother.so.1"):
        (folder / name).touch()
    found = named(gpus(tmp_path, [tmp_path / "lib"]))
    assert found["GPUs"].value == "Tesla T4, Tesla T4"
    assert found["driver"].value == "535.104.05"
    assert "libcuda.so.1, libnvinfer.so.10" in found["libraries"].value
    assert "libother" not in found["libraries"].value


def test_the_engine_that_is_wanted() -> None:
    """Is marked; the fake one needs no library."""
    assert "what --engine says" in named(engines(Settings()))["engine ort-cpu"].value
    assert not [finding for finding in engines(Settings(engine="fake")) if "what --engine says" in finding.value]


def test_the_report_marks_what_is_wrong() -> None:
    """And ends with what that means."""
    good = Finding("One", "a", "fine")
    bad = Finding("Two", "b", "wrong " * 40, "bad", "mend it")
    assert text([good]).splitlines() == ["One", "   a                fine", "`bertserve serve` would start"]
    lines = text([good, bad]).splitlines()
    assert lines[3].startswith(" ! b")
    assert lines[-2].strip() == "-> mend it"
    assert lines[-1] == "`bertserve serve` would not start: 1 wrong"
    assert max(map(len, lines)) <= 120
