"""ORCA load reports (Open Request Cost Aggregation) for load balancers such as Envoy and gRPC clients.

An HTTP reply carries one in the header `endpoint-load-metrics`, in the format that the request's
`endpoint-load-metrics-format` names. A gRPC call carries one in the trailer `endpoint-load-metrics-bin` (gRPC proposal
A51). `OpenRcaService` streams them.

TEXT follows ORCA's proposal, as Triton does: `name=value`. Envoy expects `name:value` and rejects the proposal's
format. Clients that ask for no format therefore get JSON, which all support.
"""

from __future__ import annotations

from base64 import b64encode
from typing import TYPE_CHECKING, Literal

import msgspec

from serving.net.orca_pb2 import OrcaLoadReport

if TYPE_CHECKING:
    from collections.abc import Callable

LOAD_FORMAT = b"endpoint-load-metrics-format"
TRAILER = "endpoint-load-metrics-bin"


class LoadReport(msgspec.Struct, frozen=True):
    """The load of this replica.

    Attributes:
        application_utilization: From 0 to 1: predicted wait / (predicted wait + cost of a text). This is the
            utilization of an M/M/1 queue with the same mean wait.
        rps_fractional: Recent requests per second.
        named_metrics: This server's own metrics.
    """

    application_utilization: float
    rps_fractional: float
    named_metrics: dict[str, float]

    def message(self) -> OrcaLoadReport:
        return OrcaLoadReport(**msgspec.structs.asdict(self))

    def header(self, form: bytes) -> bytes:
        """The header line in the format TEXT, JSON or BIN; empty for any other format."""
        match form.strip().upper():
            case b"TEXT":
                named = {f"named_metrics.{name}": value for name, value in self.named_metrics.items()}
                figures = {
                    "application_utilization": self.application_utilization,
                    "rps_fractional": self.rps_fractional,
                    **named,
                }
                value = "TEXT " + ", ".join(f"{name}={figure:.6g}" for name, figure in figures.items())
            case b"JSON":
                value = "JSON " + msgspec.json.encode(self).decode()
            case b"BIN":
                value = "BIN " + b64encode(self.message().SerializeToString()).decode()
            case _:
                return b""
        return b"endpoint-load-metrics: %b\r\n" % value.encode()

    def trailer(self) -> tuple[str, str]:
        """The trailer of a call. It is padded base64: Envoy reads only that, and gRPC clients read both."""
        return TRAILER, b64encode(self.message().SerializeToString()).decode()


class LoadReports:
    """Which replies carry a report: those to requests that ask, or all.

    Attributes:
        report: Returns the current report.
        usual_form: Format for requests that do not ask; None: no report.
    """

    def __init__(self, report: Callable[[], LoadReport], sent: Literal["asked", "always"]) -> None:
        self.report = report
        self.usual_form = b"JSON" if sent == "always" else None
