"""Load reports for balancers: the predicted wait and the speed of this replica."""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving.net.orca import LoadReport

if TYPE_CHECKING:
    from serving.inference.dispatcher import Dispatcher
    from serving.telemetry.recent import Recent

_TEXT_TOKENS = 64
"""Length of the text whose cost stands for a replica's speed."""


def text_s(dispatcher: Dispatcher) -> float:
    """Predicted seconds of a text on the idle device, for the slowest model; 0 before the first engine."""
    return max((costs.alone_us(_TEXT_TOKENS) for costs in dispatcher.costs), default=0.0) / 1e6


def load_report(dispatcher: Dispatcher, recent: Recent) -> LoadReport:
    load, own_s = dispatcher.load(), text_s(dispatcher)
    wait_s = load.wait_s
    return LoadReport(
        application_utilization=wait_s / (wait_s + own_s) if wait_s else 0.0,
        rps_fractional=recent.requests_per_s,
        named_metrics={"predicted_wait_s": wait_s, "queued_texts": load.queued_texts, "requests": load.requests},
    )
