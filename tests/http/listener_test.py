"""A port that ends, or whose loop stood still, answers what came in time; what is refused can be read."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import uvloop

from bertserve.serving.http.app import App
from bertserve.serving.http.exchange import HttpReply
from bertserve.serving.http.routes import Router
from bertserve.serving.net.connection_limiter import ConnectionLimiter
from bertserve.serving.settings import Settings
from tests.support import http_app
from tests.support.http_app import ready_api
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from bertserve.serving.http.app_context import AppContext
    from bertserve.serving.http.exchange import HttpRequest
    from bertserve.serving.http.listener import HttpListener

REQUEST = b"POST /echo HTTP/1.1\r\nHost: test\r\nContent-Length: 4\r\n\r\nbody"
ANSWERED = b"HTTP/1.1 200 OK"
LIMITS = ("--models", "models", "--keep-alive-s", "0.1")
router = Router("Test")


@router.post("/echo")
async def echo(_: AppContext, http: HttpRequest) -> HttpReply:
    return HttpReply(http.body)


def in_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Runs a test in the server's own kind of loop."""

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(test())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@asynccontextmanager
async def listening(limiter: ConnectionLimiter | None = None) -> AsyncIterator[HttpListener]:
    app = App(ready_api(Settings.load(LIMITS, {})), [router], documented=False)
    async with http_app.listening(app, limiter=limiter) as listener:
        listener._port.header_timeout_s = listener._port.body_timeout_s = 0.5
        yield listener


def connect(listener: HttpListener) -> socket.socket:
    """A connection, which is complete for its client though the port's loop does not run meanwhile."""
    client = socket.create_connection(listener.address, timeout=10)
    client.setblocking(False)
    return client


async def received(client: socket.socket) -> bytes:
    return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1 << 16), 10)


async def stand_still(seconds: float, client: socket.socket, data: bytes) -> None:
    """Has a client send something while the loop is held where it reads: timers are due before it reads again."""
    loop = asyncio.get_running_loop()
    ours, other = socket.socketpair()
    with ours, other:

        def hold() -> None:
            loop.remove_reader(ours)
            client.send(data)
            time.sleep(seconds)

        loop.add_reader(ours, hold)
        other.send(b"x")
        await asyncio.sleep(0.01)


async def used(listener: HttpListener) -> socket.socket:
    client = connect(listener)
    client.send(REQUEST)
    assert (await received(client)).startswith(ANSWERED)
    return client


@in_loop
async def test_connections_that_wait_to_be_accepted_are_taken_when_the_port_closes() -> None:
    """Their requests are answered; the port is closed to later ones."""
    async with listening() as listener:
        clients = [connect(listener) for _ in range(300)]
        for client in clients[::2]:
            client.send(REQUEST)
        address = listener.address
        listener.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        for client in clients[1::2]:
            client.send(REQUEST)
        for client in clients:
            assert (await received(client)).startswith(ANSWERED)
            client.close()


@in_loop
async def test_a_loop_that_stands_still_while_the_port_closes_reads_what_came() -> None:
    """A request that came before its connection was closed is answered, however late that was."""
    async with listening() as listener:
        client = await used(listener)
        listener.close()
        await stand_still(0.4, client, REQUEST)
        assert (await received(client)).startswith(ANSWERED)
        client.close()


@in_loop
async def test_an_idle_connection_is_closed_with_its_port() -> None:
    """One that was never used too."""
    async with listening() as listener:
        clients = [await used(listener), connect(listener)]
        listener.close()
        await listener.emptied()
        for client in clients:
            assert await received(client) == b""
            client.close()


@pytest.mark.parametrize(("cut", "seconds"), [(0, 1.1), (10, 0.6), (len(REQUEST) - 2, 0.6)])
def test_a_loop_that_stands_still_blames_no_client(cut: int, seconds: float) -> None:
    """Headers, bodies and next requests that came in time are read before their time is over."""

    @in_loop
    async def run() -> None:
        async with listening() as listener:
            client = await used(listener)
            if cut:
                client.send(REQUEST[:cut])
                await asyncio.sleep(0.05)
            await stand_still(seconds, client, REQUEST[cut:])  # past every limit, or a look at what is idle
            assert (await received(client)).startswith(ANSWERED)
            client.close()

    run()


@in_loop
async def test_a_refused_client_that_sends_on_can_read_why() -> None:
    """It has 503 to read, and nothing that it sends meanwhile is reset."""
    limiter = ConnectionLimiter(0)
    async with listening(limiter) as listener:
        clients = [connect(listener) for _ in range(40)]
        await until(lambda: limiter.refused == len(clients), "the refusals")
        told = clients[:16]
        for _ in range(3):
            for client in told:
                client.send(REQUEST)
            await asyncio.sleep(0.01)
        for client in clients:
            assert (await received(client)).startswith(b"HTTP/1.1 503")
        for client in clients:
            assert await received(client) == b""
            client.close()
