"""The core's side of a front."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from array import array
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import uvloop

from bertserve.serving.engine.process.wire import FrameReader, pack
from bertserve.serving.errors import InternalError, NotReady
from bertserve.serving.fronts.core import Core, FrontLink
from bertserve.serving.fronts.wire import KINDS, Called, Kind, pack_json, pack_run, unpack_error
from bertserve.serving.inference.answer_cache import AnswerCache
from bertserve.serving.records import DEFAULT_PRIORITY, EncodedText, ModelIndex
from tests.support.dispatching import BATCHED, RAISES, SPECS, Bench, text
from tests.support.virtual_time import asynchronous, now
from tests.support.waiting import turns

if TYPE_CHECKING:
    from collections.abc import Callable

    from bertserve.serving.inference.dispatcher import Dispatcher

MIB = 1 << 20
MANY = 100
"""Answers of a MiB each: more than may wait, and than a socket holds."""


class AtOnce:
    """A dispatcher that answers at once, each text with a row of one MiB.

    Attributes:
        fails_to_start: The number of the request that fails to start, from 1.
        fails_to_pack: The number of the request whose rows cannot be packed.
        releases: How often it was told to choose batches.
    """

    def __init__(self, fails_to_start: int = 0, fails_to_pack: int = 0) -> None:
        self.costs = [None]
        self.permits = 0
        self.started = self.releases = 0
        self.fails_to_start = fails_to_start
        self.fails_to_pack = fails_to_pack
        self.rows: list[weakref.ref[np.ndarray]] = []

    def permit(self, *_: object) -> SimpleNamespace:
        self.permits += 1
        return SimpleNamespace(model=0, release=self.release_permit)

    def release_permit(self) -> None:
        self.permits -= 1

    def start(self, permit: object, texts: list[EncodedText], answered: Any) -> Any:
        self.started += 1
        if self.started == self.fails_to_start:
            raise RuntimeError("cannot start")
        answered.set_result(None)
        rows: list[Any] = [(np.zeros(MIB // 4, np.float32),)] * len(texts)
        self.rows.append(weakref.ref(rows[0][0]))
        if self.started == self.fails_to_pack:
            rows = [None]
        return SimpleNamespace(
            future=answered,
            permit=permit,
            texts=texts,
            rows=rows,
            queue_us=0.0,
            compute_us=0.0,
            submitted=0.0,
            cached=False,
        )

    def hold(self) -> None: ...

    def release(self) -> None:
        self.releases += 1

    def end(self, _: object) -> None: ...


async def link_of(
    dispatcher: AtOnce | Dispatcher, cache: AnswerCache | None = None, call: Callable[..., Any] | None = None
) -> tuple[asyncio.BaseTransport, socket.socket]:
    """The core's end of a front's socket, and the front's."""
    core = SimpleNamespace(
        dispatcher=dispatcher,
        cache=cache,
        outputs={BATCHED: SPECS[BATCHED].outputs},
        padded=set(),
        is_present=lambda _: True,
    )
    ours, front = socket.socketpair()
    ours.setblocking(False)
    link = FrontLink(cast("Core", core), cast("Any", call), {}, lambda: None)
    transport, _ = await asyncio.get_running_loop().create_connection(lambda: link, sock=ours)
    return transport, front


async def front_that_does_not_read() -> None:
    loop, dispatcher = asyncio.get_running_loop(), AtOnce()
    transport, front = await link_of(dispatcher)
    with front:
        for number in range(MANY):
            front.sendall(pack_run(number, ModelIndex(0), [EncodedText(array("i", [1]))], 0.0, None, 1))
            await turns()
        held = dispatcher.started
        assert 1 < held < MANY // 2
        front.setblocking(False)
        received = bytearray()
        while len(received) < MANY * MIB:
            received += await loop.sock_recv(front, MIB)
        assert dispatcher.started == MANY
        assert not any(row() is not None for row in dispatcher.rows[:-1])
        transport.close()
        await turns()


def test_a_front_that_takes_no_answers_starts_no_more_requests() -> None:
    """What it has sent is answered once it takes them, and freed without the garbage collector."""
    gc.disable()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(front_that_does_not_read())
    finally:
        gc.enable()


async def requests_that_fail() -> None:
    loop, dispatcher = asyncio.get_running_loop(), AtOnce(fails_to_start=2, fails_to_pack=3)
    transport, front = await link_of(dispatcher)
    texts = [EncodedText(array("i", [1]))]
    with front:
        front.sendall(b"".join([pack_run(number, ModelIndex(0), texts, 0.0, None, 1) for number in range(1, 5)]))
        front.setblocking(False)
        reader, answers = FrameReader(KINDS), {}
        async with asyncio.timeout(30):
            while len(answers) < 4:
                for kind, _, number, payload in reader.feed(await loop.sock_recv(front, MIB)):
                    answers[number] = kind, payload
        transport.close()
        await turns()
    assert {number: kind for number, (kind, _) in answers.items()} == {
        1: Kind.ROWS,
        2: Kind.ERROR,
        3: Kind.ERROR,
        4: Kind.ROWS,
    }
    assert all(isinstance(unpack_error(answers[number][1]), InternalError) for number in (2, 3))
    assert dispatcher.permits == 0


def test_an_unexpected_error_costs_one_request(caplog: pytest.LogCaptureFixture) -> None:
    """Its front gets an internal error; requests of the same frame are answered, and no tokens stay reserved."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(requests_that_fail())
    assert [record.message for record in caplog.records] == ["a request failed"] * 2


def run_frame(number: int, first_id: int, timeout_ms: float | None = None) -> bytes:
    return pack_run(number, BATCHED, [text(first_id)], now(), timeout_ms, DEFAULT_PRIORITY)


def leave_frame(number: int) -> bytes:
    return pack(Kind.LEAVE, bytes(1), batch=number)


@pytest.mark.parametrize("how", ["leaves", "is killed"])
@asynchronous
async def test_a_text_that_its_front_has_left_is_not_retried(how: str) -> None:
    """After the end of its engine: it would run as a suspect, and could end another engine for nobody."""
    bench = Bench()
    transport, front = await link_of(bench.dispatcher)
    with front:
        front.sendall(run_frame(1, 1, timeout_ms=1000.0))
        await turns()
        assert bench.engine.seen == [1]
        if how == "leaves":
            front.sendall(leave_frame(1))
        else:
            front.close()
        await turns()
        bench.dispatcher.engine_restarts(1.0)
        bench.engine.lose()
        bench.assert_nothing_is_left()
        transport.close()
        await turns()


@asynchronous
async def test_a_text_that_its_front_has_left_is_not_retried_beside_one_that_failed() -> None:
    """Of their batch only the text runs again that somebody waits for."""
    bench = Bench()
    transport, front = await link_of(bench.dispatcher)
    with front:
        front.sendall(run_frame(1, 0))
        await turns()
        front.sendall(run_frame(2, 1) + run_frame(3, RAISES))
        await turns()
        bench.engine.finish()
        assert bench.engine.seen == [0, 1, RAISES]
        front.sendall(leave_frame(2))
        await turns()
        bench.engine.finish_all()
        assert bench.engine.seen == [0, 1, RAISES, RAISES]
        transport.close()
        await turns()


@asynchronous
async def test_a_request_that_its_front_leaves_at_once_holds_no_tokens() -> None:
    """With a cache, too, where a task of its own would answer it."""
    bench = Bench()
    transport, front = await link_of(bench.dispatcher, AnswerCache(MIB))
    with front:
        front.sendall(run_frame(1, 1) + leave_frame(1))
        await turns()
        assert bench.dispatcher.load().admitted_tokens == 0
        bench.assert_nothing_is_left()
        transport.close()
        await turns()


class BrokenCache(AnswerCache):
    async def run(self, *_: object) -> Any:
        raise RuntimeError("broken")


async def breaks(*_: object) -> None:
    raise RuntimeError("broken")


async def is_cancelled(*_: object) -> None:
    cancelled = asyncio.get_running_loop().create_future()
    cancelled.cancel()
    await cancelled


@pytest.mark.parametrize(
    ("call", "error", "logged"),
    [(None, InternalError, [{}]), (breaks, InternalError, [{"request_id": "its id"}]), (is_cancelled, NotReady, [])],
)
@asynchronous
async def test_what_fails_in_a_task_is_answered(
    call: Callable[..., Any] | None,
    error: type[Exception],
    logged: list[dict[str, str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Otherwise its client would wait forever. A call is logged with the id that its client is told."""
    bench = Bench()
    transport, front = await link_of(bench.dispatcher, BrokenCache(MIB), call)
    with front:
        called = pack_json(Kind.CALL, Called("/status", request_id="its id"), number=1)
        front.sendall(run_frame(1, 1) if call is None else called)
        await turns()
        front.setblocking(False)
        ((kind, _, number, payload),) = FrameReader(KINDS).feed(front.recv(MIB))
        assert (kind, number, type(unpack_error(payload))) == (Kind.ERROR, 1, error)
        assert bench.dispatcher.load().admitted_tokens == 0
        transport.close()
        await turns()
    assert [getattr(record, "fields", {}) for record in caplog.records] == logged


async def reads() -> list[int]:
    dispatcher = AtOnce()
    transport, front = await link_of(dispatcher)
    request = pack_run(1, ModelIndex(0), [EncodedText(array("i", [1]))], 0.0, None, 1)
    leave = pack(Kind.LEAVE, b"\0", batch=1)
    releases = []
    with front:
        for read in (request, leave, request + request, request[:20], request[20:]):
            before = dispatcher.releases
            front.sendall(read)
            await turns()
            releases.append(dispatcher.releases - before)
        transport.close()
        await turns()
    return releases


def test_batches_are_chosen_after_a_read_except_after_a_single_request() -> None:
    """It has chosen one as it started; what leaves may let others start."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(reads()) == [0, 1, 1, 1, 0]
