"""Closed-loop client for every server.

`python -m bertserve.loadtest.generator.client` measures on request (see child.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

from bertserve.loadtest.generator.child import answer
from bertserve.loadtest.generator.closed_loop import Lane, connect, measure
from bertserve.loadtest.generator.forms import FORMS
from bertserve.loadtest.generator.frames import prefixed
from bertserve.loadtest.generator.grpc_messages import METHOD, ReplyCheck, request_bytes
from bertserve.loadtest.generator.http1 import HttpWire, post_bytes
from bertserve.loadtest.generator.http2 import GrpcWire

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bertserve.loadtest.generator.wire import Reply

    Texts = dict[str, list[str]]

HOST = "127.0.0.1"
GRPC = "grpc"
_GRPC_CONNECTIONS = 4
"""Concurrent calls share this many connections, as in gRPC clients."""


class _Http:
    """HTTP requests to one server."""

    def __init__(self, form: str, port: int, path: str, hidden_size: int, texts: Texts) -> None:
        self._port = port
        self._form = FORMS[form]
        self._hidden_size = hidden_size
        self._requests = {int(tokens): [self._request(path, text) for text in texts[tokens]] for tokens in texts}
        self._supplies = {tokens: itertools.cycle(requests) for tokens, requests in self._requests.items()}

    def vectors(self, tokens: int, count: int) -> list[list[float]]:
        with contextlib.ExitStack() as stack:
            lane = self._lane(stack, tokens)
            bodies = [lane.exchange(request).body for request in self._requests[tokens][:count]]
        return [self._form.vector(body, self._hidden_size) for body in bodies]

    def measure(self, connections: int, tokens: int, warm_up_s: float, seconds: float) -> dict[str, Any]:
        with contextlib.ExitStack() as stack:
            lanes = [self._lane(stack, tokens) for _ in range(connections)]
            return dataclasses.asdict(measure(lanes, self._supplies[tokens], connections, warm_up_s, seconds))

    def _request(self, path: str, text: str) -> bytes:
        headers, body = self._form.request(text)
        return post_bytes(f"{HOST}:{self._port}", path, body, headers=headers)

    def _lane(self, stack: contextlib.ExitStack, tokens: int) -> Lane:
        check = self._form.check(self._hidden_size, tokens)
        return Lane(stack.enter_context(connect(HOST, self._port)), HttpWire(), check)


class _Grpc:
    """`ModelInfer` calls to one model."""

    def __init__(self, _: str, port: int, model: str, hidden_size: int, texts: Texts) -> None:
        self._port = port
        self._size = hidden_size
        self._messages = {
            int(tokens): [prefixed(request_bytes(model, text)) for text in group] for tokens, group in texts.items()
        }

    def vectors(self, tokens: int, count: int) -> list[list[float]]:
        vectors = []
        for message in self._messages[tokens][:count]:
            check = ReplyCheck(self._size)  # texts of one length may have ids of several
            with contextlib.ExitStack() as stack:
                vectors.append(check.vector(self._lane(stack, check.check).exchange(message).body))
        return vectors

    def measure(self, connections: int, tokens: int, warm_up_s: float, seconds: float) -> dict[str, Any]:
        messages = self._messages[tokens]
        check = ReplyCheck(self._size).check
        with contextlib.ExitStack() as stack:
            lanes = [self._lane(stack, check) for _ in range(min(connections, _GRPC_CONNECTIONS))]
            for lane in lanes:
                lane.exchange(messages[0])  # exchanges the HTTP/2 settings of both sides
            supply = itertools.cycle(messages)
            return dataclasses.asdict(measure(lanes, supply, connections, warm_up_s, seconds))

    def _lane(self, stack: contextlib.ExitStack, check: Callable[[Reply], None]) -> Lane:
        wire = GrpcWire(f"{HOST}:{self._port}", METHOD)
        return Lane(stack.enter_context(connect(HOST, self._port)), wire, check)


class Clients:
    """Clients by name, each for one server and protocol."""

    def __init__(self) -> None:
        self._clients: dict[str, _Http | _Grpc] = {}

    def open(self, way: str, form: str, port: int, endpoint: str, hidden_size: int, texts: Texts) -> None:
        """Creates the requests of a client.

        Args:
            way: Name for `vectors` and `measure`.
            form: `grpc` or one of `FORMS`.
            port: The server's port.
            endpoint: HTTP path; for gRPC the model.
            hidden_size: Size of an embedding.
            texts: Texts by number of tokens.
        """
        kind = _Grpc if form == GRPC else _Http
        self._clients[way] = kind(form, port, endpoint, hidden_size, texts)

    def vectors(self, way: str, tokens: int, count: int) -> Sequence[Sequence[float]]:
        """The embeddings of the first `count` texts of that length."""
        return self._clients[way].vectors(tokens, count)

    def measure(self, way: str, connections: int, tokens: int, warm_up_s: float, seconds: float) -> dict[str, Any]:
        """Keeps one request in flight on each connection; returns the fields of a `Sample`.

        Over HTTP, the texts continue where the last measurement of the same client and length ended.
        """
        return self._clients[way].measure(connections, tokens, warm_up_s, seconds)


if __name__ == "__main__":
    clients = Clients()
    answer({"open": clients.open, "vectors": clients.vectors, "measure": clients.measure})
