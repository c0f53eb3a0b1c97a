"""Our own generators with the samples and the rate of a LoadGen run, to cross-check both."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

from loadtest.errors import BenchError
from loadtest.generator.closed_loop import Lane, connect, measure
from loadtest.generator.run import Kind, Load
from loadtest.generator.run import run as drive
from loadtest.generator.scenario import Phase, Scenario
from loadtest.report.result import Result

if TYPE_CHECKING:
    from loadtest.generator.wire import Reply
    from loadtest.mlperf.library import Conversation

MAX_S = 60.0
_MESSAGES = 256


def beside(scenario: str, conversation: Conversation, rate: float, seconds: float) -> str:
    """Measures SingleStream with our closed loop, or Server with our open loop; empty for other scenarios.

    Args:
        scenario: One of `scenarios.SCENARIOS`.
        conversation: Requests and replies of the server.
        rate: Server's queries per second.
        seconds: Duration; capped at one minute.

    Raises:
        BenchError: A request failed.
    """
    seconds = min(seconds, MAX_S)
    if scenario == "single-stream":
        return _closed_loop(conversation, seconds)
    return _open_loop(conversation, rate, seconds) if scenario == "server" else ""


def _closed_loop(conversation: Conversation, seconds: float) -> str:
    dice = random.Random(1)
    size = len(conversation.library.samples)
    messages = itertools.cycle([conversation.message([dice.randrange(size)]) for _ in range(_MESSAGES)])

    def check(reply: Reply) -> None:
        conversation.data(reply, 1)

    with connect(*conversation.target.address()) as connection:
        sample = measure([Lane(connection, conversation.target.wire(), check)], messages, 1, 0.0, seconds)
    return _text(sample.p50_ms, sample.p99_ms, sample.per_s)


def _open_loop(conversation: Conversation, rate: float, seconds: float) -> str:
    library = conversation.library
    scenario = Scenario("server", "", (Phase(seconds, 1, 1),), {})
    load = Load(scenario, rate, (Kind("samples", library.task, 1.0, library.samples),))
    found = drive(conversation.target, load, Result({}, seconds), lambda *_: None)
    if found.faults:
        raise BenchError(f"{found.failed + found.unsent} of {found.offered} requests failed: {', '.join(found.faults)}")
    return _text(found.latency.percentile_ms(50), found.latency.percentile_ms(99), found.answered_per_s)


def _text(p50_ms: float, p99_ms: float, per_s: float) -> str:
    return f"p50 {p50_ms:.2f} ms, p99 {p99_ms:.2f} ms, {per_s:.1f} a second"
