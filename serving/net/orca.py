"""Load reports of ORCA (Open Request Cost Aggregation), which balancers such as Envoy and gRPC's clients read.

A reply carries one in the header `endpoint-load-metrics`, in the form that the request's `endpoint-load-metrics-format`
names, and a call in the trailer `endpoint-load-metrics-bin` (gRPC proposal A51). `OpenRcaService` streams them.

Who asks for TEXT gets what ORCA's proposal shows, as Triton writes it: `name=value`. Envoy reads `name:value` there and
refuses the proposal's form, so who does not ask gets JSON, which all read.
"""

from __future__ import annotations

from base64 import b64encode
from typing import TYPE_CHECKING, Literal

import msgspec

from serving.net.orca_pb2 import OrcaLoadReport

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

LOAD_FORMAT = b"endpoint-load-metrics-format"
TRAILER = "endpoint-load-metrics-bin"


class LoadReport(msgspec.Struct, frozen=True):
    """How busy this replica is.

    Attributes:
        application_utilization: From 0 to 1: the predicted wait in proportion to itself and a text's cost, which is the
            utilisation of a queue with one server where waits are as long as that (M/M/1).
        rps_fractional: Requests answered a second, lately.
        named_metrics: Figures of our own.
    """

    application_utilization: float
    rps_fractional: float
    named_metrics: Mapping[str, float]

    def message(self) -> OrcaLoadReport:
        return OrcaLoadReport(**msgspec.structs.asdict(self))

    def header(self, form: bytes) -> bytes:
        """A line of a reply's head in the form TEXT, JSON or BIN; nothing for another one."""
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
        """The trailer of a call; padded, as Envoy reads no other base64, and gRPC's clients read both."""
        return TRAILER, b64encode(self.message().SerializeToString()).decode()


class LoadReports:
    """Who gets a report: each that asks, or everybody.

    Attributes:
        report: Makes one.
        usual_form: The form for those that do not ask; None where they get none.
    """

    def __init__(self, report: Callable[[], LoadReport], sent: Literal["asked", "always"]) -> None:
        self.report = report
        self.usual_form = b"JSON" if sent == "always" else None
