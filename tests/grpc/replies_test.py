"""Every reply of gRPC can be read by another's HTTP/2, and what is recorded of it is what that reads."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

import h2.connection
from google.protobuf.wrappers_pb2 import BytesValue
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from bertserve.loadtest.generator.frames import prefixed
from bertserve.serving.errors import InvalidRequest
from bertserve.serving.grpc.calls import Method
from bertserve.serving.grpc.connection import GrpcConnection
from bertserve.serving.grpc.dispatch import CallDispatch
from bertserve.serving.grpc.status import STATUS
from bertserve.serving.net.buffers import BufferBudget
from bertserve.serving.net.observer import RequestObserver
from bertserve.serving.settings import Settings
from tests.support.grpc_peer import Wire, said
from tests.support.http2 import Reply, hear, request_fields

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import pytest

    from bertserve.serving.errors import BertserveError
    from bertserve.serving.grpc.calls import Call
    from bertserve.serving.inference.requests import RequestTrace

SETTINGS = Settings.load(["--models", "models"], {})
NAMES = {number: name for name, number in STATUS.items()}


async def answer(request: BytesValue, call: Call, _: object = None) -> BytesValue:
    """As many bytes as it is asked for, or what goes wrong."""
    wanted = request.value.decode()
    if wanted == "refuse":
        raise InvalidRequest("wrong")
    if wanted == "fail":
        raise ValueError("a bug")
    if wanted == "spoil":
        broken: Any = None
        call.set_trailing_metadata((("a", broken),))
        return request
    return BytesValue(value=bytes(int(wanted)))


async def several(request: BytesValue, call: Call) -> AsyncIterator[BytesValue]:
    """Three times the same."""
    for _ in range(3):
        yield await answer(request, call)


METHODS = {
    "/one": Method(BytesValue, unary=answer),
    "/talk": Method(BytesValue, duplex=answer),
    "/several": Method(BytesValue, streaming=several),
}


class Case(NamedTuple):
    """A call, and the status that it ends with."""

    path: str
    wanted: str
    status: str
    fields: tuple[tuple[str, str], ...] = ()
    data: bytes | None = None


CALLS = st.sampled_from([Case(path, size, "OK") for path in METHODS for size in ("0", "300", "20000")])
REFUSED = st.sampled_from(
    [
        *(Case(path, "refuse", "INVALID_ARGUMENT") for path in METHODS),
        *(Case(path, "fail", "INTERNAL") for path in METHODS),
        *(Case(path, "spoil", "INTERNAL") for path in ("/one", "/several")),
        *(Case(path, "0", "INVALID_ARGUMENT", data=prefixed(b"\xff\xff")) for path in METHODS),
        Case("/nothing", "0", "UNIMPLEMENTED"),
        Case("/one", "0", "RESOURCE_EXHAUSTED", fields=(("x", "v" * 20_000),)),
        Case("/one", "0", "INVALID_ARGUMENT", fields=(("grpc-timeout", "soon"),)),
    ]
)


class Client:
    """`h2` on the other side of a connection of ours."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.traces: list[RequestTrace] = []
        budget = BufferBudget(64 << 20, 64 << 20)
        self._dispatch = CallDispatch(
            *(METHODS, SETTINGS, self._record, budget),
            observer=RequestObserver(lambda _: None, [self.traces.append]),
        )
        self._connection = GrpcConnection(self._dispatch)
        self._wire = Wire()
        self._connection.connection_made(self._wire)
        self._h2 = h2.connection.H2Connection()
        self._h2.initiate_connection()

    def _record(self, error: BertserveError, *_: str) -> None:
        self.errors.append(error.reason)

    async def call(self, case: Case) -> Reply:
        """One call, whose reply must be well-formed to the library."""
        stream = self._h2.get_next_available_stream_id()
        mine = [("x-request-id", f"r{stream}")]
        self._h2.send_headers(stream, [*request_fields(case.path), *mine, *case.fields])
        data = said(case.wanted.encode()) if case.data is None else case.data
        self._h2.send_data(stream, data, end_stream=True)
        replies: dict[int, Reply] = {}
        for _ in range(100):
            if out := self._h2.data_to_send():
                self._connection.data_received(out)
            await asyncio.sleep(0)
            written, self._wire.written = self._wire.written, b""
            hear(self._h2, written, replies)
            assert all(reply.reset is None for reply in replies.values())
            if stream in replies and replies[stream].ended:
                await asyncio.sleep(0)
                return replies[stream]
        raise AssertionError(f"the call of {case} has no end")


@settings(max_examples=60, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(cases=st.lists(st.one_of(CALLS, REFUSED), min_size=1, max_size=4))
def test_replies_are_what_is_recorded_of_them(cases: list[Case]) -> None:
    """Calls of every kind, refused by every layer: each is one status, one line, one count, with its id and report."""

    async def converse() -> None:
        client = Client()
        for case in cases:
            client.traces.clear()
            client.errors.clear()
            reply = await client.call(case)
            fields, data = reply.fields, reply.data
            assert NAMES[int(fields["grpc-status"])] == case.status
            (trace,) = client.traces
            assert trace.status == case.status
            if case.status == "OK":
                count = 3 if case.path == "/several" else 1
                assert client.errors == []
                assert trace.bytes_out == len(data) - 5 * count
            else:
                assert client.errors == [trace.reason] == [fields["bertserve-reason"]]
                assert trace.request_id == fields["x-request-id"]
                assert fields["x-request-id"].startswith("r") or case.fields[:1] == (("x", "v" * 20_000),)
                assert trace.route == (case.path if case.path in METHODS else "?")
                assert trace.bytes_out == 0

    asyncio.run(converse())


def test_what_cannot_even_be_refused_is_reset(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call whose refusal fails too leaves no stream without an end."""

    def fail(*_: object) -> bytes:
        raise MemoryError

    async def converse() -> bytes:
        client = Client()
        monkeypatch.setattr("bertserve.serving.grpc.calls.error_trailers", fail)
        stream = client._h2.get_next_available_stream_id()
        client._h2.send_headers(stream, request_fields("/one"))
        client._h2.send_data(stream, said(b"refuse"), end_stream=True)
        client._connection.data_received(client._h2.data_to_send())
        for _ in range(5):
            await asyncio.sleep(0)
        events = client._h2.receive_data(client._wire.written)
        return b"".join(type(event).__name__.encode() for event in events)

    assert b"StreamReset" in asyncio.run(converse())
    assert "a callback failed" in caplog.text
