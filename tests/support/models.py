"""The exported demo model that tests serve: made once for each state of the exporter, then kept."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAME = "minilm"
MAX_LENGTH = 256
HIDDEN_SIZE = 384

_CACHE = ROOT / "build" / "test-models"
_EXPORT_LIMIT_S = 540


def cache_key() -> str:
    """A digest of everything that decides what `export demo` writes."""
    sources = [*sorted((ROOT / "export").rglob("*.py")), *sorted((ROOT / "export" / "texts").iterdir())]
    sources += [ROOT / "constraints.txt", ROOT / "pyproject.toml"]
    total = hashlib.sha256()
    for source in sources:
        if source.is_file():
            total.update(f"{source.relative_to(ROOT)}\0".encode())
            total.update(hashlib.sha256(source.read_bytes()).digest())
    return total.hexdigest()[:16]


def demo_repository() -> Path:
    """A model repository that holds the demo model; two runs that race for it both get a whole one."""
    final = _CACHE / cache_key()
    if final.is_dir():
        return final
    making = _CACHE / f".making-{final.name}-{os.getpid()}"
    making.mkdir(parents=True)
    command = [sys.executable, "bertserve.py", "export", "demo", "--out", str(making)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_EXPORT_LIMIT_S, check=False)
    if done.returncode != 0:
        shutil.rmtree(making)
        raise RuntimeError(f"export demo ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    try:
        making.rename(final)
    except OSError:  # another run was faster, and a directory is never renamed onto one that is not empty
        shutil.rmtree(making)
    return final


def copy_bundle(models: Path, root: Path, *, without: tuple[str, ...] = ()) -> Path:
    """A private copy of the demo bundle below `root`, for a test to spoil; returns the bundle's directory.

    Args:
        models: The repository to copy from.
        root: The repository to copy to.
        without: Files to leave out of the copy.
    """
    source = models / NAME / "1"
    target = root / NAME / "1"
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.name not in without:
            shutil.copyfile(file, target / file.name)
    return target
