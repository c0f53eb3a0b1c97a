"""`bertserve` with a clock in it: `python stamped.py FILE serve ...` writes where each lone `/embed` spent its time.

It knows the server from within: it is run in a process of its own and never imported. The file gets, at the end, the
median microseconds up to each point of a request's way, from the point before it.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import bertserve
from serving.engine.process.remote_engine import _Lane
from serving.http.connection import HttpConnection
from serving.http.port import HotRoutes
from serving.inference.dispatcher import Dispatcher
from serving.inference.pipeline import Pipeline, _Job
from serving.scheduling.admission import Admission

_KEPT = 50_000
"""Requests, the last ones."""

_BEGIN, _END = "begin", "sent"

_now: list[tuple[str, float]] = []
_requests: deque[list[tuple[str, float]]] = deque(maxlen=_KEPT)


def _stamp(owner: type, name: str, before: str = "", after: str = "") -> None:
    """Notes the time whenever a method begins or returns; of a coroutine, whenever it is called."""
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def stamped(*args: Any, **words: Any) -> Any:  # noqa: ANN401  whatever the method takes and gives
        if before == _BEGIN:
            _now.clear()
        if before:
            _now.append((before, time.perf_counter()))
        result = inner(*args, **words)
        if after:
            _now.append((after, time.perf_counter()))
        return result

    setattr(owner, name, stamped)


def _install() -> None:
    _stamp(HttpConnection, "data_received", _BEGIN, "HTTP parsed, task made")
    _stamp(HotRoutes, "find", "task started")
    _stamp(Pipeline, "infer", "JSON decoded")
    _stamp(Admission, "admit", "model and prompt found, sizes taken", "admitted")
    _stamp(_Job, "encode", after="tokenised")
    _stamp(_Lane, "submit", "scheduled", "frame sent to the engine")
    _stamp(_Lane, "data_received", "answer read: the hop, with the engine's own work")
    _stamp(Dispatcher, "_done", "frame unpacked", "lane freed, rows delivered")
    _stamp(_Job, "finish", "task resumed", "vector scaled")
    _stamp(HttpConnection, "_send", "JSON written", "head made, reply written")
    _stamp(HttpConnection, "_answered", _END)
    sent = HttpConnection._answered  # noqa: SLF001  see the module

    def keep(*args: Any, **words: Any) -> None:  # noqa: ANN401  as above
        sent(*args, **words)
        _requests.append(list(_now))

    HttpConnection._answered = keep  # type: ignore[method-assign]  # noqa: SLF001


def _medians() -> dict[str, float]:
    """Of requests that went the whole way, as probes do not."""
    ways = [[name for name, _ in request] for request in _requests]
    whole = max(ways, key=len, default=[])
    times = [[at for _, at in request] for request, way in zip(_requests, ways, strict=True) if way == whole]
    return {
        name: statistics.median([(each[index] - each[index - 1]) * 1e6 for each in times])
        for index, name in enumerate(whole)
        if index
    }


if __name__ == "__main__":
    _install()
    sys.argv[1:], [out] = sys.argv[2:], sys.argv[1:2]
    status = bertserve.main()
    Path(out).write_text(json.dumps(_medians()), encoding="utf-8")
    sys.exit(status)
