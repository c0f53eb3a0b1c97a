"""An empty handler in other servers: `python libraries.py SUBJECT PORT`, in an environment without this project."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

HOST = "127.0.0.1"
REPLY = b"x" * 5120
METHOD = "Echo"
SERVICE = "wires.Wires"
_OCTETS = "application/octet-stream"


def _uvicorn(app: Any, port: int) -> None:  # noqa: ANN401  ASGI
    import uvicorn  # noqa: PLC0415  each subject loads its own library

    uvicorn.run(app, host=HOST, port=port, loop="uvloop", http="httptools", access_log=False, log_level="warning")


async def _bare(scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401  ASGI
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    headers = [(b"content-type", _OCTETS.encode()), (b"content-length", b"%d" % len(REPLY))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": REPLY})


def asgi(port: int) -> None:
    """ASGI without a framework."""
    _uvicorn(_bare, port)


def fastapi(port: int) -> None:
    """A FastAPI route whose body is a pydantic model."""
    from fastapi import FastAPI, Response  # noqa: PLC0415
    from pydantic import create_model  # noqa: PLC0415

    app = FastAPI()

    async def empty(body: Any) -> Response:  # noqa: ANN401, ARG001
        return Response(REPLY, media_type=_OCTETS)

    empty.__annotations__ = {"body": create_model("Body", inputs=(str, ...)), "return": Response}
    app.post("/")(empty)
    _uvicorn(app, port)


def grpc_aio(port: int) -> None:
    """grpc.aio on asyncio."""
    import grpc.aio  # noqa: PLC0415

    async def empty(_: bytes, __: object) -> bytes:
        return REPLY

    async def serve() -> None:
        server = grpc.aio.server()
        methods: dict[str, Any] = {METHOD: grpc.unary_unary_rpc_method_handler(empty)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        server.add_insecure_port(f"{HOST}:{port}")
        await server.start()
        await server.wait_for_termination()

    asyncio.run(serve())


def grpclib(port: int) -> None:
    """Grpclib on uvloop."""
    import uvloop  # noqa: PLC0415
    from grpclib.const import Cardinality, Handler  # noqa: PLC0415
    from grpclib.encoding.base import CodecBase  # noqa: PLC0415
    from grpclib.server import Server  # noqa: PLC0415

    class Bytes(CodecBase):  # type: ignore[misc]  # it has no types
        """Messages as raw bytes."""

        __content_subtype__ = "proto"

        def encode(self, message: Any, message_type: Any) -> bytes:  # noqa: ANN401, ARG002
            return bytes(message)

        def decode(self, data: bytes, message_type: Any) -> Any:  # noqa: ANN401, ARG002
            return data

    class Wires:
        async def echo(self, stream: Any) -> None:  # noqa: ANN401  a class of grpclib
            await stream.recv_message()
            await stream.send_message(REPLY)

        def __mapping__(self) -> dict[str, Any]:
            return {f"/{SERVICE}/{METHOD}": Handler(self.echo, Cardinality.UNARY_UNARY, bytes, bytes)}

    async def serve() -> None:
        server = Server([Wires()], codec=Bytes())
        await server.start(HOST, port)
        await server.wait_closed()

    uvloop.run(serve())


SUBJECTS: dict[str, Callable[[int], None]] = {
    "asgi": asgi,
    "fastapi": fastapi,
    "grpc-aio": grpc_aio,
    "grpclib": grpclib,
}

if __name__ == "__main__":
    SUBJECTS[sys.argv[1]](int(sys.argv[2]))
