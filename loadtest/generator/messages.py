"""Whom a load test asks, and the requests that it sends there: bytes made beforehand from tasks and texts."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from loadtest.errors import BenchError
from loadtest.generator.forms import FORMS
from loadtest.generator.grpc_messages import METHOD, request_bytes
from loadtest.generator.http1 import HttpWire, post_bytes
from loadtest.generator.http2 import GrpcWire, prefixed
from loadtest.generator.scenario import GRPC_TASKS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadtest.generator.wire import Wire

INFER = "infer"
"""`embed` over the Open Inference Protocol with binary tensors, as Triton is asked; no task of scenarios."""

_QUESTION = "What is this about?"
_PATHS = {
    "embed": "/embed",
    "classify": "/classify",
    "rerank": "/rerank",
    "answer": "/answer",
    "tag": "/tag",
    "fill_mask": "/fill-mask",
}
_PORTS = {"http": 8000, "grpc": 8001}


@dataclass(slots=True, frozen=True)
class Target:
    """A server.

    Attributes:
        protocol: `http` or `grpc`.
        host: Its name or address.
        port: Of that protocol.
        model: What requests over gRPC name; over HTTP the only model of a task answers.
    """

    protocol: str
    host: str
    port: int
    model: str

    @classmethod
    def of(cls, url: str, protocol: str | None, model: str) -> Target:
        """The target that a command line names.

        Args:
            url: `http://host:port`, `grpc://host:port` or `host:port`.
            protocol: Of the scenario; None where the URL or else HTTP decides.
            model: See `model`.

        Raises:
            BenchError: It is no such URL.
        """
        try:
            parts = urlsplit(url if "://" in url else f"{protocol or 'http'}://{url}")
            port = parts.port
        except ValueError as error:
            raise BenchError(f"--target {url}: {error}") from error
        if parts.scheme in {"https", "grpcs"}:
            raise BenchError(f"--target {url}: TLS targets are not supported by the load generator")
        if parts.scheme not in _PORTS or not parts.hostname or parts.path.strip("/"):
            raise BenchError(f"--target {url}: must look like http://host:port or grpc://host:port")
        if protocol == "grpc" and parts.scheme == "http" and "://" in url:
            raise BenchError(f"--target {url}: gRPC has a port of its own; name it as grpc://host:port")
        if protocol == "http" and parts.scheme == "grpc":
            raise BenchError(f"--target {url}: HTTP has a port of its own; name it as http://host:port")
        return cls(parts.scheme, parts.hostname, port or _PORTS[parts.scheme], model)

    @property
    def authority(self) -> str:
        """`host:port`."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def address(self) -> tuple[str, int]:
        """Where to connect to.

        Raises:
            BenchError: The name is not known.
        """
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0][4]
        except OSError as error:
            raise BenchError(f"cannot find {self.host}: {error.strerror}") from error
        return str(found[0]), int(found[1])

    def wire(self) -> Wire:
        """A new connection's."""
        return HttpWire() if self.protocol == "http" else GrpcWire(self.authority, METHOD)


def messages(target: Target, task: str, texts: Sequence[str], identity: str = "") -> list[bytes]:
    """A request for each text.

    Args:
        target: Whom.
        task: What is asked.
        texts: Of what.
        identity: The id that each carries; empty: the server chooses them.

    Raises:
        BenchError: The task is not to be had over this protocol.
    """
    if task == INFER and target.protocol == "http":
        path, requests = f"/v2/models/{target.model}/infer", map(FORMS["v2"].request, texts)
        return [post_bytes(target.authority, path, body, identity, headers) for headers, body in requests]
    if target.protocol == "http":
        return [post_bytes(target.authority, _PATHS[task], _body(task, text), identity) for text in texts]
    if task not in GRPC_TASKS:
        raise BenchError(f"the task {task} has no method of gRPC here; use --protocol http")
    return [prefixed(request_bytes(target.model, text, identity)) for text in texts]


def _body(task: str, text: str) -> object:
    match task:
        case "rerank":
            return {"query": _QUESTION, "texts": [text]}
        case "answer":
            return {"inputs": {"question": _QUESTION, "context": text}}
        case "fill_mask":
            return {"inputs": f"{text} [MASK]"}
        case _:
            return {"inputs": text}
