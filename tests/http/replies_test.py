"""Every reply that is written can be read by others' parsers, and what is recorded of it is what they read."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple, Self

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bertserve.serving.errors import InvalidRequest, NotReady
from bertserve.serving.http.app import App
from bertserve.serving.http.exchange import HttpReply
from bertserve.serving.http.routes import Router
from bertserve.serving.net.buffers import FREE_BYTES, BufferBudget
from bertserve.serving.net.observer import RequestObserver
from bertserve.serving.settings import Settings
from tests.support.clients import RawConnection
from tests.support.http_app import listening_beside, ready_api
from tests.support.http_sequences import reply_in
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import h11

    from bertserve.serving.http.app_context import AppContext
    from bertserve.serving.http.exchange import HttpRequest
    from bertserve.serving.inference.requests import RequestTrace

PAGE = "https://app.example"
router = Router("Test")
MADE: dict[bytes, HttpReply | Exception] = {}
"""What the endpoint answers to a request with this number."""


@router.get("/made")
async def made(_: AppContext, http: HttpRequest) -> HttpReply:
    reply = MADE[http.headers[b"x-number"]]
    if isinstance(reply, Exception):
        raise copy.copy(reply)  # each has a traceback of its own
    return reply


@router.post("/posted")
async def posted(context: AppContext, http: HttpRequest) -> HttpReply:
    return await made(context, http)


class Heavy(bytes):
    """A body for which there is no memory when it is written."""

    def __len__(self) -> int:
        raise MemoryError


class Case(NamedTuple):
    method: str
    path: str
    reply: HttpReply | Exception

    def request(self, number: int, *fields: str) -> bytes:
        MADE[b"%d" % number] = self.reply
        lines = [f"{self.method} {self.path} HTTP/1.1", "Host: test", f"X-Number: {number}", f"X-Request-Id: r{number}"]
        return "\r\n".join([*lines, *fields, "", ""]).encode()


class Running:
    """A listener with these routes.

    Attributes:
        budget: What its connections may hold.
        traces: Of the requests that have ended.
        errors: Reasons that were counted.
    """

    def __init__(self) -> None:
        self.traces: list[RequestTrace] = []
        self.errors: list[str] = []
        # A connection that had an age would draw it, and so change the random numbers of the strategies.
        words = ["--models", "models", "--cors-origins", PAGE, "--max-connection-age-s", "0"]
        self.budget = BufferBudget(1 << 20, 1 << 20)
        context = ready_api(
            Settings.load(words, {}),
            record_error=lambda error, *_: self.errors.append(error.reason),
            observer=RequestObserver(lambda *_: None, [self.traces.append]),
            repository=SimpleNamespace(models=[]),
            v2=SimpleNamespace(names=[]),
        )
        self._port = listening_beside(App(context, [router], documented=False), self.budget)

    def __enter__(self) -> Self:
        self.address = self._port.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._port.__exit__(*error)

    def exchange(self, sent: bytes, methods: Sequence[str]) -> list[tuple[h11.Response, bytes]]:
        """The replies to requests that are sent together, strictly parsed; nothing lies between or behind them."""
        with RawConnection(self.address) as client:
            client.send(sent)
            client.end()
            received, replies = client.read_to_end(), []
        for method in methods:
            head, body, received = reply_in(received, to_head=method == "HEAD")
            replies.append((head, body))
        assert received == b""
        return replies


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with Running() as listener:
        yield listener


SIZES = st.sampled_from([0, 1, 300, FREE_BYTES, FREE_BYTES + 1, 3 * FREE_BYTES])
BODIES = st.builds(
    HttpReply,
    body=SIZES.map(bytes),
    status=st.sampled_from([200, 201, 206, 304, 404, 422, 503]),
    content_type=st.sampled_from([b"application/json", b"text/plain"]),
    head=st.sampled_from([b"", b"etag: a\r\n", b"x-a: b\r\nx-c: d\r\n"]),
)
ERRORS = st.sampled_from([InvalidRequest("wrong"), NotReady("later", retry_after_s=1), ValueError("a bug")])
CASES = st.builds(
    Case,
    st.sampled_from(["GET", "HEAD", "POST"]),
    st.sampled_from(["/made", "/posted", "/nothing"]),
    st.one_of(BODIES, ERRORS),
)


def wanted(case: Case, *, spent: bool, size: int) -> tuple[int, str, int]:
    """The status, the reason and the bytes of the body that a request gets; -1 where its error decides."""
    allowed = {"/made": {"GET", "HEAD"}, "/posted": {"POST"}}.get(case.path)
    if allowed is None:
        return 404, "not_found", -1
    if case.method not in allowed:
        return 405, "method_not_allowed", -1
    if isinstance(case.reply, InvalidRequest | NotReady):
        return case.reply.http_status, case.reply.reason, -1
    if isinstance(case.reply, Exception):
        return 500, "internal", -1
    bodiless = case.method == "HEAD" or case.reply.status == 304
    if spent and not bodiless and size > FREE_BYTES:
        return 503, "buffers_full", -1
    return case.reply.status, "ok", 0 if bodiless else size


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases=st.lists(CASES, min_size=1, max_size=4), spent=st.booleans())
def test_replies_are_what_is_recorded_of_them(running: Running, cases: list[Case], *, spent: bool) -> None:
    """Whatever is answered, sent ahead or not, with room or without: each is one reply, one line, one count."""
    share = running.budget.share()
    assert share.take(running.budget.limit_bytes - running.budget.used if spent else 0)
    running.traces.clear()
    running.errors.clear()
    try:
        sent = b"".join(case.request(number, "Origin: " + PAGE) for number, case in enumerate(cases))
        replies = running.exchange(sent, [case.method for case in cases])
        wait_for(lambda: len(running.traces) == len(cases), "the traces")
    finally:
        share.close()
    reasons = []
    for number, (case, (head, body), trace) in enumerate(zip(cases, replies, running.traces, strict=True)):
        size = 0 if isinstance(case.reply, Exception) else len(case.reply.body)
        status, reason, length = wanted(case, spent=spent, size=size)
        fields = dict(head.headers)
        assert head.status_code == status
        assert fields[b"x-request-id"] == b"r%d" % number
        assert fields[b"access-control-allow-origin"] == PAGE.encode()
        assert len(fields) == len(head.headers)
        assert length in {-1, len(body)}
        assert case.method == "HEAD" or status == 304 or int(fields[b"content-length"]) == len(body)
        assert (trace.request_id, trace.status, trace.reason, trace.bytes_out) == (
            f"r{number}",
            status,
            reason,
            len(body),
        )
        reasons += [] if reason == "ok" else [reason]
    assert running.errors == reasons


@pytest.mark.parametrize("path", ["/made", "/posted"])
def test_a_reply_that_cannot_be_written_ends_in_another(
    running: Running, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As for want of memory: a short one says so, the log too, and the connection ends."""
    running.traces.clear()
    case = Case("GET" if path == "/made" else "POST", path, HttpReply(Heavy(b"a")))
    with RawConnection(running.address) as client:
        client.send(case.request(0))
        received = client.read_to_end()
    assert received.startswith(b"HTTP/1.1 500 ")
    assert b"\r\nconnection: close\r\n" in received
    wait_for(lambda: running.traces, "the trace")
    assert [(trace.status, trace.reason) for trace in running.traces] == [(500, "internal")]
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [MemoryError]
