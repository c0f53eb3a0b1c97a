"""LoadGen's scenarios: request pattern and settings of each."""

from __future__ import annotations

import itertools
import random
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loadtest.generator.closed_loop import Lane, connect, measure
from loadtest.mlperf.system import OneByOne, SideBySide

if TYPE_CHECKING:
    from loadtest.generator.wire import Reply
    from loadtest.mlperf.library import Conversation, Library
    from loadtest.report.sample import Sample

BENCHMARK = "bert"
"""The benchmark whose settings LoadGen uses, such as 130 ms for Server's 99th percentile."""

FULL_S = 600.0
"""Minimum duration of every scenario: https://github.com/mlcommons/inference_policies, inference_rules.adoc."""

_MS = 1000
_OFFLINE_SAMPLES = 24_576
_PROBE_S = 2.0
_PROBE_MESSAGES = 64
_MARGIN = 1.25


@dataclass(frozen=True)
class Way:
    """The request pattern of a scenario.

    Attributes:
        name: LoadGen's name of the scenario.
        batch: Maximum samples per request.
        connections: Maximum requests in flight.
    """

    name: str
    batch: int
    connections: int

    def system(self, conversation: Conversation) -> OneByOne | SideBySide:
        """The system under test that LoadGen calls.

        Raises:
            BenchError: The server refuses the connection.
        """
        return (
            OneByOne(conversation) if self.connections == 1 else SideBySide(conversation, self.connections, self.batch)
        )


SCENARIOS = {
    "single-stream": Way("SingleStream", 1, 1),
    "multi-stream": Way("MultiStream", 8, 1),
    "server": Way("Server", 1, 256),
    "offline": Way("Offline", 32, 4),
}


def least_samples(library: Library) -> int:
    """Minimum samples of Offline: the whole data set, up to the number that the rules require."""
    return min(len(library.samples), _OFFLINE_SAMPLES)


def user_conf(way: Way, conversation: Conversation, rate: float, seconds: float, latency_ms: float) -> str:
    """The settings of a run, in LoadGen's format; its own configuration supplies the rest.

    The streams and Offline are first measured for a few seconds: LoadGen draws all queries before it starts, so it must
    know how many to draw.

    Args:
        way: Request pattern of the scenario.
        conversation: Requests and replies of the server.
        rate: Server's queries per second.
        seconds: Minimum duration.
        latency_ms: Limit of Server's 99th percentile; 0: the benchmark's own.

    Raises:
        BenchError: The server does not answer.
    """
    size = len(conversation.library.samples)
    lines = {"*.performance_sample_count_override": f"{size}"}
    if seconds < FULL_S:
        lines[f"{way.name}.min_duration"] = f"{round(_MS * seconds)}"
    if way.name != "Server":
        asked = _asked(way, conversation, min(_PROBE_S, seconds / 4))
    match way.name:
        case "Server":
            lines["Server.target_qps"] = f"{rate:g}"
            if latency_ms:
                lines["Server.target_latency"] = f"{latency_ms:g}"
        case "Offline":
            lines["Offline.min_query_count"] = f"{least_samples(conversation.library)}"
            lines["Offline.target_qps"] = f"{_MARGIN * way.batch * asked.per_s:.6g}"
        case name:
            lines[f"{name}.target_latency"] = f"{asked.p50_ms / 2:.6g}"
    return "".join(f"{BENCHMARK}.{key} = {value}\n" for key, value in lines.items())


def _asked(way: Way, conversation: Conversation, seconds: float) -> Sample:
    """Measures the scenario's requests in a short closed loop."""
    dice = random.Random(1)
    size = len(conversation.library.samples)
    messages = [conversation.message([dice.randrange(size) for _ in range(way.batch)]) for _ in range(_PROBE_MESSAGES)]

    def check(reply: Reply) -> None:
        conversation.data(reply, way.batch)

    with ExitStack() as stack:
        address = conversation.target.address()
        connections = [stack.enter_context(connect(*address)) for _ in range(way.connections)]
        lanes = [Lane(connection, conversation.target.wire(), check) for connection in connections]
        return measure(lanes, itertools.cycle(messages), way.connections, seconds / 4, seconds)
