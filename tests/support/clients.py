"""Clients of every protocol behind one small interface, so that one case runs on all of them."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import re
import socket
import ssl
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as pb

from tests.support.certificates import client_context, open_channel
from tests.support.models import NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from tests.support.server import Server

TIMEOUT_S = 60.0
_LABEL = re.compile(r'\w+="[^"]*"')
_STATUS_LINE = re.compile(rb"HTTP/1\.1 (\d{3}) ")
MODEL_INFER = "/inference.GRPCInferenceService/ModelInfer"


@dataclass
class Answer:
    """The vectors of a request and what came with them.

    Attributes:
        vectors: float32 [texts, components].
        headers: HTTP headers with lower-case names, or gRPC trailing metadata.
        message: The decoded reply, where it is JSON or a protobuf.
    """

    vectors: NDArray[np.float32]
    headers: dict[str, str]
    message: Any = None


@dataclass
class Refused(Exception):
    """An error reply.

    Attributes:
        status: HTTP status, or the name of the gRPC code.
        text: HTTP body, or the gRPC call's details.
        headers: HTTP headers with lower-case names, or gRPC trailing metadata.
    """

    status: int | str
    text: str
    headers: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.status}: {self.text}"


@dataclass
class HttpReply:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class HttpConnection:
    """One keep-alive connection; use it in a `with` block."""

    def __init__(self, address: str) -> None:
        context = client_context(address, "http/1.1")
        if context is None:
            self._connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
        else:
            self._connection = http.client.HTTPSConnection(address, timeout=TIMEOUT_S, context=context)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def call(
        self,
        method: str,
        path: str,
        body: bytes | Iterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> HttpReply:
        """One request and its reply; a closed connection is opened again. Pieces of a body are sent as chunks."""
        self._connection.request(method, path, body, dict(headers or {}))
        with self._connection.getresponse() as reply:
            return HttpReply(reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read())


def http_call(
    address: str, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
) -> HttpReply:
    with HttpConnection(address) as connection:
        return connection.call(method, path, body, headers)


def get(address: str, path: str) -> HttpReply:
    return http_call(address, "GET", path)


def post_json(address: str, path: str, body: Any, headers: Mapping[str, str] | None = None) -> HttpReply:
    """A POST on a connection of its own, of bytes that claim to be JSON, or of anything else as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return http_call(address, "POST", path, data, {"Content-Type": "application/json", **(headers or {})})


def ask(server: Server, path: str, **message: Any) -> Any:
    reply = post_json(server.http, path, message)
    assert reply.status == 200, reply.body
    return reply.json()


class Transport:
    """A way to ask for embeddings; use it in a `with` block.

    Attributes:
        name: As test ids show it.
        family: Whose statuses it has: `tei`, `openai`, `v2` or `grpc`.
    """

    name: str
    family: str

    def __init__(self, server: Server) -> None:
        self.server = server

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes connections."""

    def embed(self, texts: Sequence[str], *, truncate: bool | None = None, timeout_ms: float | None = None) -> Answer:
        """The texts' vectors; `Refused` where the server answers an error."""
        raise NotImplementedError


class _Http(Transport):
    path: str

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self._connection = HttpConnection(server.http)

    def close(self) -> None:
        self._connection.__exit__(None, None, None)

    def embed(self, texts: Sequence[str], *, truncate: bool | None = None, timeout_ms: float | None = None) -> Answer:
        body, headers = self.encode(list(texts), truncate=truncate)
        if timeout_ms is not None:
            headers["X-Request-Timeout-Ms"] = str(timeout_ms)
        reply = self._connection.call("POST", self.path, body, headers)
        if reply.status != 200:
            raise Refused(reply.status, reply.body.decode("utf-8", "replace"), reply.headers)
        return self.decode(reply)

    def encode(self, texts: list[str], *, truncate: bool | None) -> tuple[bytes, dict[str, str]]:
        raise NotImplementedError

    def decode(self, reply: HttpReply) -> Answer:
        raise NotImplementedError


class Tei(_Http):
    name, family, path = "embed", "tei", "/embed"

    def encode(self, texts: list[str], *, truncate: bool | None) -> tuple[bytes, dict[str, str]]:
        return json.dumps({"inputs": texts, "truncate": truncate}).encode(), {"Content-Type": "application/json"}

    def decode(self, reply: HttpReply) -> Answer:
        return Answer(np.array(reply.json(), np.float32), reply.headers, reply.json())


class OpenAiFloat(_Http):
    name, family, path = "openai-float", "openai", "/v1/embeddings"
    encoding_format = "float"

    def encode(self, texts: list[str], *, truncate: bool | None) -> tuple[bytes, dict[str, str]]:
        del truncate  # this protocol does not know it
        message = {"input": texts, "model": NAME, "encoding_format": self.encoding_format}
        return json.dumps(message).encode(), {"Content-Type": "application/json"}

    def decode(self, reply: HttpReply) -> Answer:
        rows = [self.vector(entry["embedding"]) for entry in reply.json()["data"]]
        return Answer(np.stack(rows), reply.headers, reply.json())

    def vector(self, embedding: Any) -> NDArray[np.float32]:
        return np.array(embedding, np.float32)


class OpenAiBase64(OpenAiFloat):
    name, encoding_format = "openai-base64", "base64"

    def vector(self, embedding: Any) -> NDArray[np.float32]:
        return np.frombuffer(base64.b64decode(embedding), "<f4")


class V2Json(_Http):
    """`/v2/models/.../infer` with JSON both ways."""

    name, family, path = "v2-json", "v2", f"/v2/models/{NAME}/infer"

    def encode(self, texts: list[str], *, truncate: bool | None) -> tuple[bytes, dict[str, str]]:
        tensor = {"name": "text", "datatype": "BYTES", "shape": [len(texts), 1], "data": texts}
        return json.dumps({"inputs": [tensor], "parameters": _parameters(truncate=truncate)}).encode(), {}

    def decode(self, reply: HttpReply) -> Answer:
        (output,) = reply.json()["outputs"]
        return Answer(np.array(output["data"], np.float32).reshape(output["shape"]), reply.headers, reply.json())


class V2Binary(_Http):
    """`/v2/models/.../infer` with the binary data extension both ways."""

    name, family, path = "v2-binary", "v2", f"/v2/models/{NAME}/versions/1/infer"

    def encode(self, texts: list[str], *, truncate: bool | None) -> tuple[bytes, dict[str, str]]:
        blob = bytes_tensor(texts)
        size = {"binary_data_size": len(blob)}
        tensor = {"name": "text", "datatype": "BYTES", "shape": [len(texts)], "parameters": size}
        parameters = {"binary_data_output": True, **_parameters(truncate=truncate)}
        head = json.dumps({"inputs": [tensor], "parameters": parameters}).encode()
        return head + blob, {"Inference-Header-Content-Length": str(len(head))}

    def decode(self, reply: HttpReply) -> Answer:
        size = int(reply.headers["inference-header-content-length"])
        message = json.loads(reply.body[:size])
        (output,) = message["outputs"]
        vectors = np.frombuffer(reply.body[size:], "<f4").reshape(output["shape"])
        return Answer(vectors, reply.headers, message)


class Grpc(Transport):
    """`ModelInfer` with raw contents."""

    name, family = "grpc", "grpc"

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self.channel = open_channel(server.grpc)
        self.infer = self.channel.unary_unary(
            MODEL_INFER,
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelInferResponse.FromString,
        )

    def close(self) -> None:
        self.channel.close()

    def embed(self, texts: Sequence[str], *, truncate: bool | None = None, timeout_ms: float | None = None) -> Answer:
        request = self.request(texts, truncate=truncate)
        if timeout_ms is not None:
            request.parameters["timeout"].int64_param = round(timeout_ms * 1000)
        try:
            reply, call = self.infer.with_call(request, timeout=TIMEOUT_S, wait_for_ready=False)
        except grpc.RpcError as error:
            raise refusal(error) from error
        vectors = np.frombuffer(reply.raw_output_contents[0], "<f4").reshape(reply.outputs[0].shape)
        return Answer(vectors, metadata(call), reply)

    def request(self, texts: Sequence[str], *, truncate: bool | None = None) -> pb.ModelInferRequest:
        request = infer_request(texts)
        if truncate is not None:
            request.parameters["truncate"].bool_param = truncate
        return request


class GrpcContents(Grpc):
    """`ModelInfer` with typed contents."""

    name = "grpc-contents"

    def request(self, texts: Sequence[str], *, truncate: bool | None = None) -> pb.ModelInferRequest:
        request = super().request(texts, truncate=truncate)
        del request.raw_input_contents[:]
        request.inputs[0].contents.bytes_contents.extend(text.encode() for text in texts)
        return request


TRANSPORTS: tuple[type[Transport], ...] = (Tei, OpenAiFloat, OpenAiBase64, V2Json, V2Binary, Grpc, GrpcContents)
"""Every way to ask."""

BOTH: tuple[type[Transport], ...] = (Tei, Grpc)
"""One way over each wire."""

STATUS: Mapping[str, Mapping[str, int | str]] = {
    # What goes wrong:  tei, openai, v2, gRPC
    name: dict(zip(("tei", "openai", "v2", "grpc"), row, strict=True))
    for name, row in {
        "malformed": (400, 400, 400, "INVALID_ARGUMENT"),
        "invalid": (422, 400, 400, "INVALID_ARGUMENT"),
        "empty": (400, 400, 400, "INVALID_ARGUMENT"),
        "overloaded": (429, 429, 429, "RESOURCE_EXHAUSTED"),
        "too late": (504, 504, 504, "DEADLINE_EXCEEDED"),
        "unavailable": (503, 503, 503, "UNAVAILABLE"),
        "internal": (500, 500, 500, "INTERNAL"),
    }.items()
}
"""The status of an error on each protocol family."""


def bytes_tensor(texts: Sequence[str]) -> bytes:
    encoded = [text.encode() for text in texts]
    return b"".join(struct.pack("<I", len(value)) + value for value in encoded)


def infer_request(texts: Sequence[str], identity: str = "", model: str = NAME) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=model, id=identity)
    request.inputs.add(name="text", datatype="BYTES", shape=[len(texts), 1])
    request.raw_input_contents.append(bytes_tensor(texts))
    return request


def refusal(error: grpc.RpcError) -> Refused:
    return Refused(error.code().name, error.details() or "", metadata(error))


def metadata(call: Any) -> dict[str, str]:
    return dict(call.trailing_metadata() or ())


def grpc_raw(address: str, method: str, data: bytes, *, headers: Sequence[tuple[str, str]] = ()) -> bytes:
    """A unary call with bytes as they are; `Refused` where it fails."""
    with open_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
        try:
            return bytes(channel.unary_unary(method)(data, timeout=TIMEOUT_S, metadata=headers))
        except grpc.RpcError as error:
            raise refusal(error) from error


class _TlsSocket(socket.socket):
    """A socket over TLS that says farewell and goes on reading, as `ssl.SSLSocket` does not."""

    def __init__(self, opened: socket.socket, context: ssl.SSLContext, name: str) -> None:
        super().__init__(opened.family, opened.type, opened.proto, opened.detach())
        self.settimeout(opened.gettimeout())
        self._received, self._made = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._made, server_hostname=name)
        self._call(self._tls.do_handshake)
        super().sendall(self._made.read())

    def sendall(self, data: Any, flags: int = 0) -> None:
        self._tls.write(data)
        super().sendall(self._made.read(), flags)

    def recv(self, size: int, flags: int = 0) -> bytes:
        return self._call(lambda: self._tls.read(size), flags)

    def shutdown(self, _: int) -> None:
        with contextlib.suppress(ssl.SSLWantReadError):
            self._tls.unwrap()
        super().sendall(self._made.read())

    def _call(self, step: Callable[[], Any], flags: int = 0) -> Any:
        """What a step of TLS gives once it has all that it wants to read."""
        while True:
            try:
                return step()
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return b""
            except ssl.SSLWantReadError:
                if made := self._made.read():
                    super().sendall(made)
                data = super().recv(1 << 16, flags)
                if data:
                    self._received.write(data)
                else:
                    self._received.write_eof()


class RawConnection:
    """A connection on which anything can be said; use it in a `with` block."""

    def __init__(
        self,
        address: str,
        timeout_s: float = 15.0,
        protocol: str = "http/1.1",
        *,
        receive_bytes: int = 0,
        opened: socket.socket | None = None,
    ) -> None:
        """`receive_bytes` bounds what the system receives ahead; `opened` is connected already."""
        host, _, port = address.rpartition(":")
        self.socket = opened or socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.socket.settimeout(timeout_s)
        if receive_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        if opened is None:
            self.socket.connect((host.strip("[]"), int(port)))
        if (context := client_context(address, protocol)) is not None:
            self.socket = _TlsSocket(self.socket, context, host)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        """Sends all of it; a server that has already answered and closed is no failure."""
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError, ssl.SSLError) as error:
            if isinstance(error, TimeoutError):
                raise

    def end(self) -> None:
        """Sends no more (FIN, over TLS its own farewell alone), and goes on reading."""
        self.socket.shutdown(socket.SHUT_WR)

    def read_to_end(self) -> bytes:
        """Everything until the server closes; `TimeoutError` where it does not."""
        parts = []
        while True:
            try:
                part = self.socket.recv(1 << 16)
            except ConnectionResetError:
                break
            if not part:
                break
            parts.append(part)
        return b"".join(parts)

    def status(self) -> int:
        """The status of the only reply that comes before the server closes; 0 if none comes."""
        reply = self.read_to_end()
        if not reply:
            return 0
        statuses = _STATUS_LINE.findall(reply)
        if len(statuses) != 1:
            raise AssertionError(f"not one reply: {reply[:200]!r}")
        return int(statuses[0])


def metrics(server: Server) -> dict[str, float]:
    """Every sample of the server's metrics as of one moment, by name and labels as they are written."""
    lines = get(server.metrics, "/metrics").body.decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {sample: float(value) for sample, _, value in pairs}


def metric(server: Server, name: str, **labels: str) -> float:
    """The sum of the server's samples of that name that have these labels, as `sum(name{...})`; 0 without any."""
    asked = {f'{key}="{value}"' for key, value in labels.items()}
    return sum(
        value
        for sample, value in metrics(server).items()
        if sample.partition("{")[0] == name and asked <= set(_LABEL.findall(sample))
    )


def _parameters(*, truncate: bool | None) -> dict[str, bool]:
    return {} if truncate is None else {"truncate": truncate}
