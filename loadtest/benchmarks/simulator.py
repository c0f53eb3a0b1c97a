"""Calls the simulator by its command line: this package shares no code with the server."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertserve.loadtest.errors import BenchError
from bertserve.loadtest.generator.child import module_environment

if TYPE_CHECKING:
    from collections.abc import Mapping

_LIMIT_S = 300.0
_CURVE = ("offered_per_s", "p50_ms", "p99_ms")


def capacity(cost: str, tokens: int, slo_ms: float, overhead: Mapping[str, float]) -> Any:  # noqa: ANN401  JSON
    """Capacity at an objective for p99, and the curves below it, of a published table at one length.

    `overhead` holds options of `bertserve simulate` that end in `-us`, without that suffix. Both functions raise
    BenchError if the simulator fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        curve = Path(folder) / "curve.json"
        words = ("--cost", cost, "--tokens", str(tokens), "--slo-p99-ms", str(slo_ms), "--find-capacity")
        found = _asked(overhead, *words, "--out", str(curve))
        runs = [{name: run[name] for name in _CURVE} for run in json.loads(curve.read_bytes())["runs"]]
        return {**found, "slo_ms": slo_ms, "runs": runs}


def at_rate(cost: str, tokens: int, rate: float, overhead: Mapping[str, float]) -> Any:  # noqa: ANN401  JSON
    """Figures of a published table at one length and one rate; the arguments are those of `capacity`."""
    return _asked(overhead, "--cost", cost, "--tokens", str(tokens), "--rate", f"{rate:g}")


def _asked(overhead: Mapping[str, float], *words: str) -> Any:  # noqa: ANN401  JSON
    added = [word for name, us in overhead.items() for word in (f"--{name}-us", f"{us:.2f}")]
    command = [sys.executable, "-m", "bertserve", "simulate", *words, *added, "--json"]
    run: dict[str, Any] = {"capture_output": True, "text": True, "timeout": _LIMIT_S, "env": module_environment()}
    told = subprocess.run(command, check=False, **run)
    if not told.stdout:
        raise BenchError(f"{' '.join(command[2:])}: {told.stderr.strip()}")
    return json.loads(told.stdout)
