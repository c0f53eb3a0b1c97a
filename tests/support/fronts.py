"""Servers with front processes, and clients of whose connections the kernel tells which process has the other end."""

from __future__ import annotations

import contextlib
import http.client
import itertools
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tritonclient.grpc import service_pb2 as pb

from tests.support.clients import Answer, Refused, Tei, Transport, get, infer_request
from tests.support.http2 import RawHttp2
from tests.support.server import START_LIMIT_S
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterable, Sequence

    from tests.support.server import Server

COUNT = 2
FRONTS = ("--front-processes", str(COUNT))
LOST = "lost"
"""The status of a request whose connection ended before its answer."""


class Http(Tei):
    @property
    def address(self) -> str:
        return self.server.http

    @property
    def end(self) -> socket.socket:
        opened: socket.socket = self._connection._connection.sock
        return opened


class Wire(Transport):
    """`ModelInfer` on a connection of its own."""

    name, family = "grpc", "grpc"

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self.connection = RawHttp2(server.grpc)
        self._streams = itertools.count(1, 2)

    @property
    def address(self) -> str:
        return self.server.grpc

    @property
    def end(self) -> socket.socket:
        return self.connection.socket

    def close(self) -> None:
        self.connection.__exit__()

    def embed(self, texts: Sequence[str], *, truncate: bool | None = None, timeout_ms: float | None = None) -> Answer:
        del truncate, timeout_ms
        stream = next(self._streams)
        self.connection.call(stream, infer_request(texts).SerializeToString())
        reply = self.connection.reply(stream)
        if reply.status != 0:
            raise Refused(reply.status, reply.fields.get("grpc-message", ""), reply.fields)
        message = pb.ModelInferResponse.FromString(reply.message)
        vectors = np.frombuffer(message.raw_output_contents[0], "<f4").reshape(message.outputs[0].shape)
        return Answer(vectors, reply.fields, message)


Client = Http | Wire
KINDS: tuple[type[Client], ...] = (Http, Wire)


def listed(server: Server) -> dict[int, int]:
    """The number of connections of each front by its process id, as `/status` tells; none in one process."""
    return {front["pid"]: front["connections"] for front in get(server.metrics, "/status").json()["fronts"] or ()}


def wait_all_logged(server: Server, text: str) -> None:
    """Waits until every process that serves clients has logged a text."""
    count = 1 + len(listed(server))
    wait_for(lambda: server.log.count(text) >= count, f"{text!r} in the log {count} times")


def holder(server: Server, client: Client) -> int | None:
    """The one process of a server that has the other end of a connection; None if the connection has ended."""
    ends = [int(client.address.rpartition(":")[2]), client.end.getsockname()[1]]
    rows = [row.split() for row in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]]
    sockets = {f"socket:[{row[9]}]" for row in rows if [int(end[-4:], 16) for end in row[1:3]] == ends}

    def holders() -> list[int]:
        return [pid for pid in (server.pid, *server.child_pids()) if sockets & _open_files(pid)]

    # A process that is being started is a copy of its parent with all open files, until it runs its own program.
    wait_for(lambda: len(holders()) < 2, "one process alone: the end of a connection of several does not close it")
    return next(iter(holders()), None)


def wait_up(server: Server, without: Iterable[int] = ()) -> None:
    """Waits until both fronts take connections, none of which is one of these processes."""
    wait_for(lambda: len(listed(server).keys() - set(without)) == COUNT, "the fronts", START_LIMIT_S)


def on_each_front(server: Server, kind: type[Client], stack: contextlib.ExitStack) -> dict[int, Client]:
    """A client of each front by the front's process id, until `stack` ends."""
    found: dict[int, Client] = {}
    wait_up(server)

    def all_found() -> bool:
        client = stack.enter_context(kind(server))
        client.embed(["hello"])
        pid = holder(server, client)
        assert pid is not None
        if found.setdefault(pid, client) is not client:
            client.close()
        return found.keys() == listed(server).keys()

    wait_for(all_found, "a connection of each front")
    return found


class Steady:
    """A client that opens another connection where it lost one.

    Attributes:
        losses: The process that had each connection that ended; None if that came before its first answer.
        holder: The process that has the connection now.
    """

    def __init__(self, server: Server, kind: type[Client], number: int) -> None:
        self._server, self._kind = server, kind
        self._texts = (f"client {number} asks for the {count}. time" for count in itertools.count(1))
        self._client: Client | None = None
        self.losses: list[int | None] = []
        self.holder: int | None = None

    def ask(self) -> tuple[str, Answer]:
        """Asks with a text of its own each time, and returns it with the answer.

        Raises:
            Refused: With the status `LOST` if the connection ended.
        """
        text = next(self._texts)
        try:
            if self._client is None:
                self._client = self._kind(self._server)
            answer = self._client.embed([text])
            self.holder = self.holder or holder(self._server, self._client)
        except (ConnectionError, http.client.HTTPException) as error:
            self.losses.append(self.holder)
            self.close()
            raise Refused(LOST, str(error)) from error
        return text, answer

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client = self.holder = None


def _open_files(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):  # it has ended
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                found.add(str(entry.readlink()))
    return found
