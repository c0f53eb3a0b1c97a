"""`xds.service.orca.v3.OpenRcaService`: load reports out of band, on a stream."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from serving.errors import InvalidRequest, NotReady
from serving.grpc.calls import Method
from serving.net.orca_pb2 import OrcaLoadReport, OrcaLoadReportRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from serving.net.orca import LoadReports

SERVICE = "xds.service.orca.v3.OpenRcaService"
_MIN_S, _USUAL_S = 0.1, 10.0


class OrcaService:
    """Sends a report at once and then at the interval that was asked for: 0.1 s at least, 10 s where none was."""

    def __init__(self, reports: LoadReports) -> None:
        self._reports = reports
        self._closed = asyncio.Event()

    def methods(self) -> dict[str, Method]:
        return {f"/{SERVICE}/StreamCoreMetrics": Method(OrcaLoadReportRequest, streaming=self.stream)}

    def close(self) -> None:
        """Ends all streams: they have no end of their own that a drain could wait for."""
        self._closed.set()

    async def stream(self, request: OrcaLoadReportRequest, _: object) -> AsyncIterator[OrcaLoadReport]:
        asked = request.report_interval
        interval_s = asked.seconds + asked.nanos / 1e9
        if interval_s < 0:
            raise InvalidRequest("`report_interval` is below zero")
        interval_s = max(_MIN_S, interval_s or _USUAL_S)
        while not self._closed.is_set():
            yield self._reports.report().message()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), interval_s)
        raise NotReady("the server ends")
