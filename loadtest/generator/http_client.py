"""Measures `/embed` in a closed loop: `python -m loadtest.generator.http_client` does so when asked (see child.py)."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import TYPE_CHECKING, Any

from loadtest.errors import BenchError
from loadtest.generator.child import answer
from loadtest.generator.closed_loop import Lane, connect, measure
from loadtest.generator.http1 import HttpWire, post_bytes

if TYPE_CHECKING:
    from loadtest.generator.wire import Reply


@dataclasses.dataclass(slots=True, frozen=True)
class Expected:
    """What every reply must look like.

    Attributes:
        header: A header line that must be there, in small letters; empty for none.
        least_bytes: The body has at least so many.
    """

    header: bytes
    least_bytes: int

    @classmethod
    def embedding(cls, tokens: int, hidden_size: int) -> Expected:
        """The embedding of one text of so many tokens."""
        return cls(b"\r\nx-compute-tokens: %d\r\n" % tokens, 2 * hidden_size)

    def check(self, reply: Reply) -> None:
        """Checks a reply.

        Raises:
            BenchError: It is a failure, or no embedding of that text.
        """
        body = reply.body
        if (
            reply.fault
            or len(body) < self.least_bytes
            or not body.startswith(b"[[")
            or not body.endswith(b"]]")
            or self.header not in reply.head
        ):
            shown = (reply.head + body)[:400].decode("utf-8", "replace")
            raise BenchError(f"a wrong reply over HTTP ({len(body)} bytes, expected an embedding):\n{shown}")


class HttpClient:
    """Requests to one server, by length of their texts."""

    def __init__(self) -> None:
        """Starts with nothing; see `open`."""
        self._address = ("", 0)
        self._requests: dict[int, list[bytes]] = {}
        self._hidden_size = 0

    def open(self, host: str, port: int, hidden_size: int, texts: dict[str, list[str]]) -> None:
        """Makes the requests.

        Args:
            host: Of the server.
            port: Its HTTP port.
            hidden_size: Numbers in an embedding.
            texts: Texts by their number of tokens.
        """
        self._address = (host, port)
        self._hidden_size = hidden_size
        self._requests = {
            int(tokens): [post_bytes(f"{host}:{port}", "/embed", {"inputs": text}) for text in group]
            for tokens, group in texts.items()
        }

    def vector(self, tokens: int) -> list[float]:
        """The server's embedding of the first text of that length."""
        with contextlib.ExitStack() as stack:
            [vector] = json.loads(self._lane(stack, tokens).exchange(self._requests[tokens][0]).body)
        return list(vector)

    def measure(self, connections: int, tokens: int, warm_up_s: float, seconds: float) -> dict[str, Any]:
        """Keeps one request under way on each connection; returns a `Sample`'s fields."""
        requests = self._requests[tokens]
        with contextlib.ExitStack() as stack:
            lanes = [self._lane(stack, tokens) for _ in range(connections)]
            return dataclasses.asdict(measure(lanes, requests, connections, warm_up_s, seconds))

    def _lane(self, stack: contextlib.ExitStack, tokens: int) -> Lane:
        connection = stack.enter_context(connect(*self._address))
        return Lane(connection, HttpWire(), Expected.embedding(tokens, self._hidden_size).check)


if __name__ == "__main__":
    client = HttpClient()
    answer({"open": client.open, "vector": client.vector, "measure": client.measure})
