"""Load test scenarios: arrival rate over time, tasks, and text lengths.

A scenario contains only shares: of a rate in an open loop, of a number of users in a closed loop (Locust). The same
scenario therefore fits a laptop and a rack. There are six built-in scenarios, and a TOML file defines any other:

    purpose = "A quiet morning, then the newsletter goes out."
    rate = 200                      # requests per second where a phase says 1; `--rate` replaces it
    users = 20                      # users where a phase says 1, for a closed loop
    arrivals = "poisson"            # or "constant"
    protocol = "http"               # or another of `routes.PROTOCOLS`
    lengths = { 8 = 70, 32 = 30 }   # tokens of the texts = weight
    tasks = { embed = 1 }           # task = weight; left out: the model's task

    [[phases]]
    seconds = 60
    from = 0.2
    to = 0.2

    [[phases]]
    seconds = 120
    from = 1
    to = 0.2
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertserve.loadtest.errors import BenchError
from bertserve.loadtest.generator.routes import PROTOCOLS, ROUTES

if TYPE_CHECKING:
    from collections.abc import Mapping

ARRIVALS = ("poisson", "constant")
_MAX_TOKENS = 100_000
_PHASE_KEYS = ("seconds", "from", "to")


@dataclass(slots=True, frozen=True)
class Phase:
    """A part of a scenario in which the load changes linearly.

    Attributes:
        seconds: Duration.
        begin: Share of the scenario's rate or users at its start; 1 is all of it, larger values are allowed.
        end: The same at its end.
    """

    seconds: float
    begin: float
    end: float

    def share(self, passed_s: float) -> float:
        """The share after that many seconds of the phase."""
        return self.begin + (self.end - self.begin) * passed_s / self.seconds


@dataclass(slots=True, frozen=True)
class Scenario:
    """A load.

    Attributes:
        name: Name of the scenario.
        purpose: Purpose, in one sentence.
        phases: One after the other.
        lengths: Weights of the texts' lengths in tokens, special tokens included.
        tasks: Weights of the tasks; empty: the model's task.
        rate: Requests per second where a phase's share is 1.
        users: Users where a phase's share is 1.
        arrivals: One of `ARRIVALS`.
        protocol: One of `routes.PROTOCOLS`.
    """

    name: str
    purpose: str
    phases: tuple[Phase, ...]
    lengths: Mapping[int, float]
    tasks: Mapping[str, float] = dataclasses.field(default_factory=dict)
    rate: float = 100.0
    users: float = 8.0
    arrivals: str = "poisson"
    protocol: str = "http"

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return sum(phase.seconds for phase in self.phases)

    def share(self, passed_s: float) -> float | None:
        """The share of rate or users after that many seconds; None after the end."""
        for phase in self.phases:
            if passed_s < phase.seconds:
                return phase.share(passed_s)
            passed_s -= phase.seconds
        return None

    def lasting(self, seconds: float) -> Scenario:
        """The same scenario, stretched or compressed to that many seconds."""
        factor = seconds / self.seconds
        phases = tuple(Phase(phase.seconds * factor, phase.begin, phase.end) for phase in self.phases)
        return dataclasses.replace(self, phases=phases)


_USUAL = {8: 30.0, 16: 30.0, 32: 25.0, 64: 10.0, 128: 5.0}
"""Search queries, sentences, and occasionally a paragraph."""

SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            "steady",
            "Constant load well below capacity. Does latency meet the SLO?",
            (Phase(60, 1, 1),),
            _USUAL,
        ),
        Scenario(
            "ramp",
            "Load that rises from almost zero. Where does latency start to grow?",
            (Phase(120, 0.02, 1),),
            _USUAL,
            rate=800,
            users=32,
        ),
        Scenario(
            "spike",
            "Low load with a burst of eight times as much. How fast does latency recover?",
            (Phase(20, 0.125, 0.125), Phase(10, 1, 1), Phase(30, 0.125, 0.125)),
            _USUAL,
            rate=640,
            users=64,
        ),
        Scenario(
            "overload",
            "Load above the capacity of one machine. Is the excess rejected at once, and the rest served in time?",
            (Phase(10, 0.1, 0.1), Phase(30, 1, 1), Phase(20, 0.1, 0.1)),
            _USUAL,
            rate=3000,
            users=256,
        ),
        Scenario(
            "mixed-lengths",
            "Short texts beside very long ones. Do short texts stay fast?",
            (Phase(60, 1, 1),),
            {8: 60.0, 32: 20.0, 128: 15.0, 250: 5.0},
            rate=60,
        ),
        Scenario(
            "soak",
            "Constant load for half an hour. Does anything grow, leak or slow down?",
            (Phase(1800, 1, 1),),
            _USUAL,
        ),
    )
}


def find_scenario(given: str) -> Scenario:
    """A built-in scenario, or one from a TOML file.

    Args:
        given: A name in `SCENARIOS`, or a path that ends in `.toml`.

    Raises:
        BenchError: The name is unknown, or the file is invalid; the message is one line.
    """
    if given in SCENARIOS:
        return SCENARIOS[given]
    path = Path(given)
    if path.suffix != ".toml" and not path.exists():
        close = difflib.get_close_matches(given, SCENARIOS, 1)
        hint = f"did you mean {close[0]}?" if close else f"one of {', '.join(SCENARIOS)}, or a .toml file"
        raise BenchError(f"unknown scenario {given!r} ({hint})")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
        return _scenario(path.stem, values)
    except OSError as error:
        raise BenchError(f"scenario {given}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BenchError(f"scenario {given}: not TOML: {error}") from error
    except _WrongValueError as error:
        raise BenchError(f"scenario {given}: {error}") from error


class _WrongValueError(Exception):
    """An invalid value and its location."""


def _scenario(stem: str, values: dict[str, Any]) -> Scenario:
    _only_known("", values, [field.name for field in dataclasses.fields(Scenario)])
    if missing := [key for key in ("phases", "lengths") if key not in values]:
        raise _WrongValueError(f"{missing[0]} is missing")
    phases = values["phases"]
    if not isinstance(phases, list) or not phases:
        raise _WrongValueError("phases must be one or more [[phases]] tables")
    read: dict[str, Any] = {
        "name": _word("name", values.get("name", stem)),
        "purpose": _word("purpose", values.get("purpose", "")),
        "phases": tuple(_phase(f"phases[{index}]", phase) for index, phase in enumerate(phases)),
        "lengths": {_tokens(key): weight for key, weight in _weights("lengths", values["lengths"]).items()},
    }
    for key, choices in (("arrivals", ARRIVALS), ("protocol", PROTOCOLS)):
        if key in values:
            read[key] = _choice(key, values[key], choices)
    for key in ("rate", "users"):
        if key in values:
            read[key] = _number(key, values[key], positive=True)
    if "tasks" in values:
        read["tasks"] = _weights("tasks", values["tasks"])
        for task in read["tasks"]:
            _choice("tasks", task, tuple(ROUTES[read.get("protocol", "http")]))
    if not any(phase.begin or phase.end for phase in read["phases"]):
        raise _WrongValueError("at least one phase must have a load above 0")
    return Scenario(**read)


def _phase(where: str, values: Any) -> Phase:  # noqa: ANN401  any TOML value
    if not isinstance(values, dict):
        raise _WrongValueError(f"{where} must be a table")
    _only_known(f"{where}.", values, _PHASE_KEYS)
    if missing := [key for key in _PHASE_KEYS if key not in values]:
        raise _WrongValueError(f"{where}.{missing[0]} is missing")
    return Phase(
        _number(f"{where}.seconds", values["seconds"], positive=True),
        _number(f"{where}.from", values["from"]),
        _number(f"{where}.to", values["to"]),
    )


def _only_known(where: str, values: Mapping[str, object], known: list[str] | tuple[str, ...]) -> None:
    for key in values.keys() - set(known):
        close = difflib.get_close_matches(key, known, 1)
        raise _WrongValueError(f"{where}{key} is unknown" + (f" (did you mean {close[0]}?)" if close else ""))


def _number(where: str, value: object, *, positive: bool = False) -> float:
    number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not 0 <= number < math.inf or (positive and not number):
        raise _WrongValueError(f"{where} must be {'above 0' if positive else '0 or more'}, not {value!r}")
    return number


def _word(where: str, value: object) -> str:
    if not isinstance(value, str):
        raise _WrongValueError(f"{where} must be a string, not {value!r}")
    return value


def _choice(where: str, value: object, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise _WrongValueError(f"{where} must be one of {', '.join(choices)}, not {value!r}")
    return str(value)


def _weights(where: str, value: object) -> dict[str, float]:
    if not isinstance(value, dict) or not value:
        raise _WrongValueError(f"{where} must be a table of weights")
    return {key: _number(f"{where}.{key}", weight, positive=True) for key, weight in value.items()}


def _tokens(key: str) -> int:
    if not key.isdecimal() or not 0 < int(key) <= _MAX_TOKENS:
        raise _WrongValueError(f"lengths.{key}: {key!r} is not a number of tokens")
    return int(key)
