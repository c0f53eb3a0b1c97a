"""Who asks what when: Poisson arrivals with a mix of lengths, or a schedule that was kept before.

The times and the mix are drawn as `bertserve load` draws them: equal rate, duration, mix and seed give the very
requests that it sends.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from loadtest.capacity.errors import SimulateError
from loadtest.capacity.simulator import Arrival
from loadtest.generator.arrivals import choices, schedule
from loadtest.generator.scenario import Phase, Scenario

if TYPE_CHECKING:
    from pathlib import Path

_MIX = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?(?::(\d+(?:\.\d+)?))?")


def parse_mix(given: str, option: str = "--tokens") -> dict[int, float]:
    """Weights by number of tokens, as in `128`, `8:70,32:30` or `10-250`, a range whose lengths share its weight.

    `option` is where it stands, for the error.

    Raises:
        SimulateError: It looks otherwise.
    """
    mix: dict[int, float] = {}
    for part in given.split(","):
        found = _MIX.fullmatch(part.strip())
        low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not found or not 0 < low <= high:
            raise SimulateError(f"{option} {given}: must look like 128, 8:70,32:30 or 10-250")
        weight = float(found[3] or 1) / (high - low + 1)
        for tokens in range(low, high + 1):
            mix[tokens] = mix.get(tokens, 0.0) + weight
    if not any(mix.values()):
        raise SimulateError(f"{option} {given}: no length has any weight")
    return mix


def poisson(rate: float, mix: dict[int, float], duration_s: float, timeout_s: float, seed: int) -> list[Arrival]:
    """Requests of one text each."""
    scenario = Scenario("simulated", "", (Phase(duration_s, 1, 1),), mix)
    times = schedule(scenario, rate, seed).tolist()
    lengths = list(mix)
    drawn = choices(list(mix.values()), len(times), seed).tolist()
    return [Arrival(at, (lengths[index],), timeout_s) for at, index in zip(times, drawn, strict=True)]


def replayed(path: Path, timeout_s: float) -> list[Arrival]:
    """A schedule from a file: a JSON list of pairs, seconds and tokens (of one text, or a list for several).

    Raises:
        SimulateError: It is none.
    """
    try:
        rows = json.loads(path.read_bytes())
        pairs = [(float(at), tuple(tokens) if isinstance(tokens, list) else (int(tokens),)) for at, tokens in rows]
    except OSError as error:
        raise SimulateError(f"--replay {path}: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise SimulateError(f"--replay {path}: must be a list of [seconds, tokens]") from error
    if not pairs or any(not lengths or min(lengths) < 1 for _, lengths in pairs):
        raise SimulateError(f"--replay {path}: no request, or one without a positive length")
    return [Arrival(at, lengths, timeout_s) for at, lengths in sorted(pairs)]
