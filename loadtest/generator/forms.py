"""Embedding requests over HTTP in several formats, and where each reply holds the vector."""

from __future__ import annotations

import dataclasses
import json
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bertserve.loadtest.errors import BenchError
from bertserve.loadtest.generator.grpc_messages import bytes_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from bertserve.loadtest.generator.wire import Reply

_FLOAT_BYTES = 4
_SHOWN_BYTES = 400


@dataclass(slots=True, frozen=True)
class Form:
    """A request and reply format over HTTP.

    Attributes:
        request: Header lines and body of a request for the embedding of a text.
        vector: The embedding in a reply's body; takes the body and the size of the embedding.
        edges: First and last bytes of a reply's body.
        number_bytes: Minimum bytes per number in a reply.
        counts: Whether a reply's header must state the number of tokens.
    """

    request: Callable[[str], tuple[str, bytes]]
    vector: Callable[[bytes, int], list[float]]
    edges: tuple[bytes, bytes]
    number_bytes: int
    counts: bool = False

    def check(self, size: int, tokens: int) -> Callable[[Reply], None]:
        """A function that raises BenchError if a reply holds no embedding of `size` numbers."""
        least, (begin, end) = self.number_bytes * size, self.edges
        header = b"\r\nx-compute-tokens: %d\r\n" % tokens if self.counts else b""

        def check(reply: Reply) -> None:
            body = reply.body
            is_right = not reply.fault and len(body) >= least and body.startswith(begin) and body.endswith(end)
            if not is_right or header not in reply.head:
                shown = (reply.head + body)[:_SHOWN_BYTES].decode("utf-8", "replace")
                raise BenchError(f"wrong HTTP reply ({len(body)} bytes, expected an embedding):\n{shown}")

        return check


def _json(body: object) -> tuple[str, bytes]:
    return "", json.dumps(body).encode()


def v2_request(tensors: Mapping[str, Sequence[str]], outputs: Sequence[str], timeout_us: int = 0) -> tuple[str, bytes]:
    """A request with binary tensors after the JSON in both directions, the default of Triton's client.

    Args:
        tensors: The texts of each input.
        outputs: Names of the requested outputs.
        timeout_us: The deadline, in microseconds; 0 for none.

    Returns:
        The required header line, and the body.
    """
    blobs = [bytes_tensor(texts) for texts in tensors.values()]
    inputs = [
        {
            "name": name,
            "shape": [len(texts), 1],
            "datatype": "BYTES",
            "parameters": {"binary_data_size": len(blob)},
        }
        for (name, texts), blob in zip(tensors.items(), blobs, strict=True)
    ]
    wanted = [{"name": name, "parameters": {"binary_data": True}} for name in outputs]
    limits = {"parameters": {"timeout": timeout_us}} if timeout_us else {}
    head = json.dumps({"inputs": inputs, "outputs": wanted, **limits}).encode()
    return f"Inference-Header-Content-Length: {len(head)}\r\n", b"".join((head, *blobs))


def _v2_vector(body: bytes, hidden_size: int) -> list[float]:
    return list(struct.unpack(f"<{hidden_size}f", body[-_FLOAT_BYTES * hidden_size :]))


def _sparse_vector(body: bytes, size: int) -> list[float]:
    vector = [0.0] * size
    for weight in json.loads(body)[0]:
        vector[weight["index"]] = weight["value"]
    return vector


_EMBED = Form(lambda text: _json({"inputs": text}), lambda body, _: list(json.loads(body)[0]), (b"[[", b"]]"), 2)
FORMS = {
    "ours": dataclasses.replace(_EMBED, counts=True),
    "embed": _EMBED,
    "v2": Form(lambda text: v2_request({"text": [text]}, ["embedding"]), _v2_vector, (b"{", b""), _FLOAT_BYTES),
    "openai": Form(
        lambda text: _json({"model": "minilm", "input": text}),
        lambda body, _: list(json.loads(body)["data"][0]["embedding"]),
        (b"{", b"}"),
        2,
    ),
    "sparse": Form(lambda text: _json({"inputs": text}), _sparse_vector, (b'[[{"index":', b"}]]"), 0),
    "bytes": Form(lambda text: ("", text.encode()), lambda _, __: [], (b"", b""), 1),
}
"""Request formats by name.

`ours` and `embed` are `POST /embed` of this server and of a plain application, `v2` is the Open Inference Protocol with
binary tensors, `openai` is the OpenAI API. `sparse` is `POST /embed_sparse`; its replies leave out zeros. `bytes` is an
arbitrary body for no-op servers: only the size of the reply is checked.
"""
