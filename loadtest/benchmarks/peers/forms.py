"""How each server is asked for an embedding over HTTP, and where the vector stands in its reply."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loadtest.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Callable

    from loadtest.generator.wire import Reply

_FLOAT_BYTES = 4
_SHOWN_BYTES = 400


@dataclass(slots=True, frozen=True)
class Form:
    """A way to ask.

    Attributes:
        body: The headers of its own, each line with its end, and the body that ask for a text's embedding.
        vector: The embedding in the body of a reply, given the number of its numbers.
        edges: What the body of a reply begins and ends with.
        number_bytes: A reply has at least so many for each number.
    """

    body: Callable[[str], tuple[str, bytes]]
    vector: Callable[[bytes, int], list[float]]
    edges: tuple[bytes, bytes]
    number_bytes: int

    def check(self, hidden_size: int) -> Callable[[Reply], None]:
        """What raises BenchError for a reply that holds no embedding."""
        least, (begin, end) = self.number_bytes * hidden_size, self.edges

        def check(reply: Reply) -> None:
            body = reply.body
            if reply.fault or len(body) < least or not body.startswith(begin) or not body.endswith(end):
                shown = (reply.head + body)[:_SHOWN_BYTES].decode("utf-8", "replace")
                raise BenchError(f"a wrong reply over HTTP ({len(body)} bytes, expected an embedding):\n{shown}")

        return check


def request_bytes(form: Form, port: int, path: str, text: str) -> bytes:
    """A whole POST of one text on a connection that stays open."""
    headers, body = form.body(text)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n{headers}"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _embed_body(text: str) -> tuple[str, bytes]:
    return "", json.dumps({"inputs": text}).encode()


def _embed_vector(body: bytes, _: int) -> list[float]:
    [vector] = json.loads(body)
    return list(vector)


def _v2_body(text: str) -> tuple[str, bytes]:
    """Tensors behind the JSON in both directions, as Triton's own client has it by default."""
    data = text.encode()
    tensor = struct.pack("<I", len(data)) + data
    head = json.dumps(
        {
            "inputs": [
                {
                    "name": "text",
                    "shape": [1, 1],
                    "datatype": "BYTES",
                    "parameters": {"binary_data_size": len(tensor)},
                }
            ],
            "outputs": [{"name": "embedding", "parameters": {"binary_data": True}}],
        }
    ).encode()
    return f"Inference-Header-Content-Length: {len(head)}\r\n", head + tensor


def _v2_vector(body: bytes, hidden_size: int) -> list[float]:
    return list(struct.unpack(f"<{hidden_size}f", body[-_FLOAT_BYTES * hidden_size :]))


def _openai_body(text: str) -> tuple[str, bytes]:
    return "", json.dumps({"model": "minilm", "input": text}).encode()


def _openai_vector(body: bytes, _: int) -> list[float]:
    [entry] = json.loads(body)["data"]
    return list(entry["embedding"])


FORMS = {
    "embed": Form(_embed_body, _embed_vector, (b"[[", b"]]"), 2),
    "v2": Form(_v2_body, _v2_vector, (b"{", b""), _FLOAT_BYTES),
    "openai": Form(_openai_body, _openai_vector, (b"{", b"}"), 2),
}
"""The forms by name: `POST /embed` as ours and a plain application have it, the Open Inference Protocol with
binary tensors, and the OpenAI API."""
