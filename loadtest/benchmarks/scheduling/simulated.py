"""The simulator, asked by its command line: this package shares no code with the server."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadtest.errors import BenchError
from loadtest.generator.child import module_environment

if TYPE_CHECKING:
    from collections.abc import Sequence

_LIMIT_S = 300.0

T4 = {
    "t4-bert-base-fp16": (10.0, (32, 128, 384)),
    "t4-bert-base-int8": (10.0, (32, 128, 384)),
    "t4-bert-large-fp16": (50.0, (128, 384)),
    "t4-bert-large-int8": (50.0, (128, 384)),
}
"""The published tables: an objective for p99 in milliseconds, and the lengths that they were measured at."""


def replay(status: Any, requests: Sequence[tuple[float, int]], seconds: float, overhead: dict[str, float]) -> Any:  # noqa: ANN401  JSON
    """What becomes of the requests of a measured run.

    Args:
        status: The server's `/status`.
        requests: Seconds and tokens of each.
        seconds: Length of the schedule.
        overhead: Options of `bertserve simulate` that end in `-us`, without that end.

    Raises:
        BenchError: The simulator fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        costs, kept = Path(folder) / "status.json", Path(folder) / "requests.json"
        costs.write_text(json.dumps(status), encoding="utf-8")
        kept.write_text(json.dumps(requests), encoding="utf-8")
        words = [word for name, us in overhead.items() for word in (f"--{name}-us", f"{us:.2f}")]
        return _asked("--cost", str(costs), "--replay", str(kept), "--duration", str(seconds), *words)


def t4(table: str, tokens: int, slo_ms: float) -> Any:  # noqa: ANN401  JSON
    """Capacity at an objective, and the curves below it, of a published table at one length.

    Raises:
        BenchError: The simulator fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        curve = Path(folder) / "curve.json"
        words = ("--cost", table, "--tokens", str(tokens), "--slo-p99-ms", str(slo_ms), "--find-capacity")
        found = _asked(*words, "--out", str(curve))
        return {**found, "slo_ms": slo_ms, "runs": json.loads(curve.read_bytes())["runs"]}


def _asked(*words: str) -> Any:  # noqa: ANN401  JSON
    command = [sys.executable, "-m", "bertserve", "simulate", *words, "--json"]
    told = subprocess.run(
        command, capture_output=True, text=True, timeout=_LIMIT_S, check=False, env=module_environment()
    )
    if not told.stdout:
        raise BenchError(f"{' '.join(command[2:])}: {told.stderr.strip()}")
    return json.loads(told.stdout)
