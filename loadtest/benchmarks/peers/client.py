"""The one client of all servers: `python -m loadtest.benchmarks.peers.client` measures when asked (see child.py)."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

from loadtest.benchmarks.peers.forms import FORMS, request_bytes
from loadtest.benchmarks.server_process import HOST
from loadtest.generator.child import answer
from loadtest.generator.closed_loop import Lane, connect, measure
from loadtest.generator.grpc_client import GrpcClient
from loadtest.generator.http1 import HttpWire

if TYPE_CHECKING:
    from collections.abc import Sequence

    Texts = dict[str, list[str]]

GRPC = "grpc"
"""The form that is none of HTTP's."""


class _Http:
    """Requests to one server over HTTP."""

    def __init__(self, form: str, port: int, path: str, hidden_size: int, texts: Texts) -> None:
        self._port = port
        self._form = FORMS[form]
        self._hidden_size = hidden_size
        self._requests = {
            int(tokens): [request_bytes(self._form, port, path, text) for text in group]
            for tokens, group in texts.items()
        }

    def vectors(self, tokens: int, count: int) -> list[list[float]]:
        with contextlib.ExitStack() as stack:
            lane = self._lane(stack)
            bodies = [lane.exchange(request).body for request in self._requests[tokens][:count]]
        return [self._form.vector(body, self._hidden_size) for body in bodies]

    def measure(self, connections: int, tokens: int, warm_up_s: float, seconds: float) -> dict[str, Any]:
        requests = self._requests[tokens]
        with contextlib.ExitStack() as stack:
            lanes = [self._lane(stack) for _ in range(connections)]
            return dataclasses.asdict(measure(lanes, requests, connections, warm_up_s, seconds))

    def _lane(self, stack: contextlib.ExitStack) -> Lane:
        return Lane(stack.enter_context(connect(HOST, self._port)), HttpWire(), self._form.check(self._hidden_size))


class _Grpc:
    """Requests to one model of a server over gRPC."""

    def __init__(self, port: int, model: str, hidden_size: int, texts: Texts) -> None:
        self._place = (f"{HOST}:{port}", model, hidden_size)
        self._texts = texts
        self._client = self._opened(texts)

    def vectors(self, tokens: int, count: int) -> list[list[float]]:
        texts = self._texts[str(tokens)][:count]
        return [self._opened({str(tokens): [text]}).vector(tokens) for text in texts]

    def measure(self, connections: int, tokens: int, warm_up_s: float, seconds: float) -> dict[str, Any]:
        return self._client.measure(connections, tokens, warm_up_s, seconds)

    def _opened(self, texts: Texts) -> GrpcClient:
        client = GrpcClient()
        client.open(*self._place, texts)
        return client


class Clients:
    """A client for each way to each server."""

    def __init__(self) -> None:
        """Starts with none; see `open`."""
        self._clients: dict[str, _Http | _Grpc] = {}

    def open(self, way: str, form: str, port: int, place: str, hidden_size: int, texts: Texts) -> None:
        """Makes the requests of a way.

        Args:
            way: Its name, for `vectors` and `measure`.
            form: `grpc` or one of `FORMS`.
            port: Of the server.
            place: The path of HTTP, the model of gRPC.
            hidden_size: Numbers in an embedding.
            texts: Texts by their number of tokens.
        """
        self._clients[way] = (
            _Grpc(port, place, hidden_size, texts) if form == GRPC else _Http(form, port, place, hidden_size, texts)
        )

    def vectors(self, way: str, tokens: int, count: int) -> Sequence[Sequence[float]]:
        """The embeddings of the first `count` texts of that length."""
        return self._clients[way].vectors(tokens, count)

    def measure(self, way: str, connections: int, tokens: int, warm_up_s: float, seconds: float) -> dict[str, Any]:
        """Keeps one request under way on each connection; returns a `Sample`'s fields."""
        return self._clients[way].measure(connections, tokens, warm_up_s, seconds)


if __name__ == "__main__":
    clients = Clients()
    answer({"open": clients.open, "vectors": clients.vectors, "measure": clients.measure})
