"""An empty handler behind our own connections: `python ours.py http|grpc PORT`.

The only file of this package that knows the server's internals: it runs in a process of its own and is never imported.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from types import SimpleNamespace
from typing import Any

import uvloop

from serving.grpc.calls import Method
from serving.grpc.connection import GrpcConnection
from serving.grpc.dispatch import CallDispatch
from serving.http.app import App
from serving.http.app_context import AppContext
from serving.http.exchange import OCTETS, HttpReply, HttpRequest
from serving.http.listener import HttpListener
from serving.http.routes import Docs, Router
from serving.net.buffers import BufferBudget
from serving.net.listener import Listener
from serving.settings import Settings

HOST = "127.0.0.1"
REPLY = b"x" * 5120


def _ignored(*_: object, **__: object) -> None:
    """Counts and logs no error: there are none."""


async def http(port: int) -> None:
    """A hot route, which the connection calls without ASGI."""
    router = Router("wires")

    async def empty(_: AppContext, __: HttpRequest) -> HttpReply:
        return HttpReply(REPLY, content_type=OCTETS)

    router.hot("/", Docs(), summary="nothing")(empty)
    nothing: Any = SimpleNamespace(closing=False)  # all that an empty handler asks
    settings = Settings.load([], {})
    context = AppContext(nothing, nothing, nothing, settings, nothing, nothing, dict, bytes, "", _ignored)
    app = App(context, [router], documented=False)
    await HttpListener(app, _opened(port), settings, budget=BufferBudget.of(settings)).start()
    await asyncio.Event().wait()


class _Bytes:
    """A message that is its bytes."""

    data = b""

    def ParseFromString(self, data: bytes) -> None:  # noqa: N802  protobuf's names
        self.data = data

    def SerializeToString(self) -> bytes:  # noqa: N802
        return REPLY


async def grpc(port: int) -> None:
    """A unary method."""

    async def empty(message: _Bytes, _: object) -> _Bytes:
        return message

    kind: Any = _Bytes
    unary: Any = empty
    settings = Settings.load([], {})
    methods = {"/wires.Wires/Echo": Method(kind, unary=unary)}
    dispatch = CallDispatch(methods, settings, _ignored, BufferBudget.of(settings))
    await Listener(_opened(port), lambda: GrpcConnection(dispatch), None, "h2").start()
    await asyncio.Event().wait()


def _opened(port: int) -> socket.socket:
    return socket.create_server((HOST, port))


if __name__ == "__main__":
    uvloop.run({"http": http, "grpc": grpc}[sys.argv[1]](int(sys.argv[2])))
