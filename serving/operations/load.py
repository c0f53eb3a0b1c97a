"""What balancers are told of this replica's load: the predicted wait, and how fast it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving.net.orca import LoadReport

if TYPE_CHECKING:
    from serving.inference.dispatcher import Dispatcher
    from serving.telemetry.recent import Recent

_TEXT_TOKENS = 64
"""Of the text whose cost tells how fast a replica is."""


def text_s(dispatcher: Dispatcher) -> float:
    """Predicted seconds of a text on the idle device, of the slowest model; 0 while there has been no engine."""
    return max((costs.alone_us(_TEXT_TOKENS) for costs in dispatcher.costs), default=0.0) / 1e6


def load_report(dispatcher: Dispatcher, recent: Recent) -> LoadReport:
    load, own_s = dispatcher.load(), text_s(dispatcher)
    wait_s = load.wait_s
    return LoadReport(
        application_utilization=wait_s / (wait_s + own_s) if wait_s else 0.0,
        rps_fractional=recent.requests_per_s,
        named_metrics={"predicted_wait_s": wait_s, "queued_texts": load.queued_texts, "requests": load.requests},
    )
