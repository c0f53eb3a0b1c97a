"""A short open-loop run against a server under test."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bertserve.loadtest.generator.measure import Measurement
from bertserve.loadtest.generator.messages import Target
from bertserve.loadtest.generator.run import Kind
from bertserve.loadtest.generator.scenario import Phase, Scenario

if TYPE_CHECKING:
    from collections.abc import Callable

    from bertserve.loadtest.report.result import Result
    from tests.support.server import Server
RATE = 300.0
SECONDS = 2.0
EVEN = Scenario("even", "", (Phase(SECONDS, 1, 1),), {8: 1.0}, rate=RATE, arrivals="constant")


def target_of(server: Server, protocol: str) -> Target:
    return Target.of(f"{protocol}://{server.http if protocol == 'http' else server.grpc}", None, "minilm")


def measured(
    target: Target, scenario: Scenario = EVEN, on_progress: Callable[[Result, float], None] | None = None
) -> Result:
    measurement = Measurement(target, scenario, (Kind("8 tokens", "embed", 1.0, ("a text of a few words",)),), (), 1)
    return measurement.run(scenario, scenario.rate, 1, on_progress or (lambda *_: None), check=False)
