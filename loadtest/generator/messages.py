"""The target of a load test, and its requests: bytes built in advance from tasks and texts."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from bertserve.loadtest.errors import BenchError
from bertserve.loadtest.generator.forms import v2_request
from bertserve.loadtest.generator.frames import prefixed
from bertserve.loadtest.generator.grpc_messages import METHOD, infer_bytes
from bertserve.loadtest.generator.http1 import HttpWire, post_bytes
from bertserve.loadtest.generator.http2 import GrpcWire
from bertserve.loadtest.generator.routes import OUTPUTS, PLAIN, route
from bertserve.loadtest.generator.texts import fields_of
from bertserve.loadtest.generator.tls import Tls
from bertserve.serving.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bertserve.loadtest.generator.texts import Text
    from bertserve.loadtest.generator.wire import Wire

KEY_VARIABLE = "LOADTEST_API_KEY"
"""Not `BERTSERVE_...`: that prefix is for the server's settings, and the server rejects unknown ones."""

_MS_US = 1000
_KEY = re.compile(r"[!-~]+")
_PORTS = {"http": 8000, "grpc": 8001}
_SCHEMES = {"http": ("http", False), "https": ("http", True), "grpc": ("grpc", False), "grpcs": ("grpc", True)}
"""Transport of each URL scheme, and whether it uses TLS."""


@dataclass(slots=True, frozen=True)
class Target:
    """A server and how to reach it.

    Attributes:
        protocol: One of `routes.PROTOCOLS`.
        host: Name or address.
        port: Port of the protocol.
        model: Model name in requests, if the protocol has one.
        in_path: Whether the path names the model if the protocol does not.
        api_key: Sent with every request; empty for none.
        tls: None without TLS.
        timeout_ms: Deadline of each request, in milliseconds: v2's parameter `timeout`, else `X-Request-Timeout-Ms`; 0
            for none.
        endpoint: HTTP path that replaces the protocol's own; empty for no replacement.
    """

    protocol: str
    host: str
    port: int
    model: str
    in_path: bool = False
    api_key: str = field(default="", repr=False)
    tls: Tls | None = None
    timeout_ms: int = 0
    endpoint: str = ""

    @classmethod
    def of(cls, url: str, protocol: str | None, model: str, api_key: str = "", tls: Tls | None = None) -> Target:
        """The target of a command line.

        Args:
            url: `http://host:port`, `https://`, `grpc://`, `grpcs://` or `host:port`.
            protocol: None: the URL's scheme decides between the plain HTTP routes and gRPC.
            model: See `model`.
            api_key: See `api_key`.
            tls: TLS files for a secure URL; None: the system's trust store.

        Raises:
            BenchError: The URL is invalid, or does not fit the protocol or the TLS files.
        """
        transport = "grpc" if protocol == "grpc" else "http"
        try:
            parts = urlsplit(url if "://" in url else f"{transport}://{url}")
            port = parts.port
        except ValueError as error:
            raise BenchError(f"--target {url}: {error}") from error
        if parts.scheme not in _SCHEMES or not parts.hostname or parts.path.strip("/"):
            raise BenchError(f"--target {url}: must look like http://host:port or grpc://host:port (https, grpcs)")
        named, secured = _SCHEMES[parts.scheme]
        end = "s" if secured else ""
        if protocol == "grpc" and named == "http":
            raise BenchError(f"--target {url}: gRPC has its own port; use grpc{end}://host:port")
        if protocol not in {None, "grpc"} and named == "grpc":
            raise BenchError(f"--target {url}: HTTP has its own port; use http{end}://host:port")
        if tls is not None and not secured:
            secure = f"{named}s://{parts.netloc}"
            raise BenchError(f"--target {url}: --ca, --cert and --key need TLS; use {secure}")
        return cls(
            protocol or named,
            parts.hostname,
            port or _PORTS[named],
            model,
            api_key=api_key,
            tls=(tls or Tls()) if secured else None,
        )

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Target:
        """The inverse of `dataclasses.asdict`."""
        return cls(**{**values, "tls": Tls(**tls) if (tls := values.get("tls")) else None})

    @property
    def transport(self) -> str:
        """`http` or `grpc`."""
        return "grpc" if self.protocol == "grpc" else "http"

    @property
    def url(self) -> str:
        """`scheme://host:port`."""
        return f"{self.transport}{'s' if self.tls else ''}://{self.authority}"

    @property
    def authority(self) -> str:
        """`host:port`."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def credentials(self) -> str:
        """Value of the `authorization` header or gRPC metadata; empty for none."""
        return f"Bearer {self.api_key}" if self.api_key else ""

    def address(self) -> tuple[str, int]:
        """The address to connect to.

        Raises:
            BenchError: The name cannot be resolved.
        """
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0][4]
        except OSError as error:
            raise BenchError(f"cannot resolve {self.host}: {error.strerror}") from error
        return str(found[0]), int(found[1])

    def path(self, task: str) -> str:
        """The path of a task.

        Raises:
            BenchError: The protocol does not support the task.
        """
        if self.endpoint:
            return self.endpoint
        found = route(self.protocol, task).format(model=self.model)
        return f"/models/{self.model}{found}" if self.in_path and self.protocol in PLAIN else found

    def wire(self, method: str = METHOD) -> Wire:
        """The wire of a new connection.

        Args:
            method: The gRPC method.

        Raises:
            BenchError: A TLS file cannot be used.
        """
        if self.transport == "http":
            return self.tls.wrap(HttpWire(), self.host, "http/1.1") if self.tls else HttpWire()
        metadata = [("authorization", self.credentials)] if self.credentials else []
        wire = GrpcWire(self.authority, method, metadata, "https" if self.tls else "http")
        return self.tls.wrap(wire, self.host, "h2") if self.tls else wire


def api_key() -> str:
    """The API key in the environment; empty for none.

    Raises:
        BenchError: The key cannot be part of a header.
    """
    key = os.environ.get(KEY_VARIABLE, "")
    if key and not _KEY.fullmatch(key):
        raise BenchError(f"{KEY_VARIABLE} must be one word of ASCII characters")
    return key


def messages(target: Target, task: str, texts: Sequence[Text]) -> list[bytes]:
    """One request for each text.

    Raises:
        BenchError: The protocol does not support the task.
    """
    path = target.path(task)
    items = [fields_of(task, text) for text in texts]
    if target.protocol == "grpc":
        timeout_us = _MS_US * target.timeout_ms
        tensors = map(TASKS[task].load.tensors, items)
        return [prefixed(infer_bytes(target.model, rows, timeout_us)) for rows in tensors]
    common = _authorization(target)
    if target.timeout_ms and target.protocol != "v2":
        common += f"X-Request-Timeout-Ms: {target.timeout_ms}\r\n"
    made = []
    for item in items:
        headers, body = _request(target, task, item)
        made.append(post_bytes(target.authority, path, body, headers + common))
    return made


def batch_message(target: Target, task: str, texts: Sequence[Text]) -> bytes:
    """One request with several texts, over the Open Inference Protocol with binary tensors."""
    rows = [TASKS[task].load.tensors(fields_of(task, text)) for text in texts]
    tensors = {name: [text for row in rows for text in row[name]] for name in rows[0]}
    headers, body = v2_request(tensors, OUTPUTS[task], _MS_US * target.timeout_ms)
    return post_bytes(target.authority, target.path(task), body, headers=headers + _authorization(target))


def _authorization(target: Target) -> str:
    return f"Authorization: {target.credentials}\r\n" if target.credentials else ""


def _request(target: Target, task: str, item: Mapping[str, Any]) -> tuple[str, object]:
    """Header lines and body of a request over HTTP."""
    match target.protocol:
        case "v2":
            return v2_request(TASKS[task].load.tensors(item), OUTPUTS[task], _MS_US * target.timeout_ms)
        case "openai":
            return "", {"model": target.model, "input": item["text"]}
        case "cohere-v1" | "cohere-v2":
            return "", {"model": target.model, "query": item["query"], "documents": item["texts"]}
        case protocol:
            return "", _plain(protocol, task, item)


def _plain(protocol: str, task: str, item: Mapping[str, Any]) -> object:
    if "text_pair" in item:
        pair = [item["text"], item["text_pair"]]
        return {"inputs": pair if protocol == "tei" else dict(zip(("text", "text_pair"), pair, strict=True))}
    return TASKS[task].load.body(item)
