"""What only a GPU can show: `make test-gpu`. Where there is none each test is skipped, and says why."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from bertserve.serving.engine.gpu import cuda_driver, discovery
from bertserve.serving.engine.gpu.cuda import Device
from bertserve.serving.models.bundle import open_bundle
from tests.support.models import ROOT
from tests.support.skips import excused

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bertserve.serving.engine.gpu.discovery import Machine
    from bertserve.serving.models.bundle import Bundle


@pytest.fixture(scope="session")
def machine() -> Machine:
    found = discovery.look()
    if found.problem:
        pytest.skip(excused(f"needs an NVIDIA GPU: {found.problem}"))
    return found


@pytest.fixture(scope="session")
def device(machine: Machine) -> Device:
    """The first GPU, in use by this process."""
    return Device(cuda_driver.load(), machine.gpus[0].ordinal)


@pytest.fixture(scope="session")
def export_demo(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Exports the demo model for this GPU: fp32, fp16 for ONNX Runtime, and an engine where TensorRT builds for it.

    It takes further words of the command, and returns the repository.
    """

    def export(*words: str) -> Path:
        root = tmp_path_factory.mktemp("models")
        command = [sys.executable, "-m", "bertserve", "export", "demo", "--out", str(root), "--name", "minilm", *words]
        command += ["--precision", "fp32", "--precision", "fp16"]
        target = machine.gpus[0].target
        if not machine.libraries["rtx"].problem and target in {"sm75", "sm80", "sm86", "sm89", "sm120"}:
            command += ["--tensorrt", target]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stderr
        return root

    return export


@pytest.fixture(scope="session")
def bundle(export_demo: Callable[..., Path]) -> Bundle:
    return open_bundle(export_demo() / "minilm" / "1")


@pytest.fixture(scope="session")
def proven(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A node's cache with the proofs of what this GPU ran, beside PyTorch's answers on at least 256 texts."""
    cache = tmp_path_factory.mktemp("cache")
    command = [sys.executable, "-m", "bertserve", "verify", str(bundle.path), "--cache-dir", str(cache)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(next(cache.rglob("derived.json")).read_text())["proofs"] or "is within its limits" in done.stdout
    return cache
