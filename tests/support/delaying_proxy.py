"""A network with a round trip: a TCP proxy that hands on bytes, ends and resets a while after they came."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Self

_RESET = None


class DelayingProxy:
    """Runs in a thread of its own; use it in a `with` block.

    Attributes:
        sent: What clients sent on each connection.
    """

    def __init__(self, target: str, delay_s: float) -> None:
        """`delay_s` is for one direction: a round trip takes twice as long."""
        self.target = target
        self.sent: list[bytearray] = []
        self._delay_s = delay_s
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()

    def hold(self) -> None:
        """Hands nothing on from now on: what is sent, either way, is on its way until `go_on`."""
        self._loop.call_soon_threadsafe(self._passing.clear)

    def go_on(self) -> None:
        self._loop.call_soon_threadsafe(self._passing.set)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._passing = asyncio.Event()
        self._passing.set()
        server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        self.address = "{}:{}".format(*server.sockets[0].getsockname())
        self._started.set()
        await self._ended.wait()
        server.close()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(self._delay_s)
        host, _, port = self.target.rpartition(":")
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        sent = bytearray()
        self.sent.append(sent)
        await asyncio.gather(self._pass(reader, far_writer, sent), self._pass(far_reader, writer, bytearray()))
        writer.close()
        far_writer.close()

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, passed: bytearray) -> None:
        on_the_way: asyncio.Queue[tuple[float, bytes | None]] = asyncio.Queue()
        arriving = asyncio.create_task(self._arrive(on_the_way, sink))
        try:
            while data := await source.read(1 << 16):
                passed += data
                on_the_way.put_nowait((self._loop.time(), data))
            on_the_way.put_nowait((self._loop.time(), b""))
        except OSError:
            on_the_way.put_nowait((self._loop.time(), _RESET))
        await arriving

    async def _arrive(self, on_the_way: asyncio.Queue[tuple[float, bytes | None]], sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while True:
                sent, data = await on_the_way.get()
                await asyncio.sleep(sent + self._delay_s - self._loop.time())
                await self._passing.wait()
                if data is _RESET:
                    sink.transport.abort()
                    return
                if not data:
                    sink.write_eof()
                    return
                sink.write(data)
                await sink.drain()
