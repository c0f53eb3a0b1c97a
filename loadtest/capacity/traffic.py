"""Traffic: Poisson arrivals with a mix of lengths, or a saved schedule.

Times and lengths are drawn as in `bertserve load`: equal rate, duration, mix and seed give exactly the requests that it
sends.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from bertserve.loadtest.capacity.simulator import Arrival
from bertserve.loadtest.errors import BenchError
from bertserve.loadtest.generator.arrivals import choices, schedule
from bertserve.loadtest.generator.scenario import Phase, Scenario

if TYPE_CHECKING:
    from pathlib import Path


def poisson(rate: float, mix: dict[int, float], duration_s: float, timeout_s: float, seed: int) -> list[Arrival]:
    """Poisson arrivals with one text each."""
    scenario = Scenario("simulated", "", (Phase(duration_s, 1, 1),), mix)
    times = schedule(scenario, rate, seed).tolist()
    lengths = list(mix)
    drawn = choices(list(mix.values()), len(times), seed).tolist()
    return [Arrival(at, (lengths[index],), timeout_s) for at, index in zip(times, drawn, strict=True)]


def replayed(path: Path, timeout_s: float) -> list[Arrival]:
    """A schedule from a file: a JSON list of pairs, seconds and tokens (of one text, or a list for several).

    Raises:
        BenchError: The file is not such a list.
    """
    try:
        rows = json.loads(path.read_bytes())
        pairs = [(float(at), tuple(tokens) if isinstance(tokens, list) else (int(tokens),)) for at, tokens in rows]
    except OSError as error:
        raise BenchError(f"--replay {path}: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise BenchError(f"--replay {path}: must be a list of [seconds, tokens]") from error
    if not pairs or any(not lengths or min(lengths) < 1 for _, lengths in pairs):
        raise BenchError(f"--replay {path}: must have requests, each with a length above 0")
    return [Arrival(at, lengths, timeout_s) for at, lengths in sorted(pairs)]
