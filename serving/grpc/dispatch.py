"""Turns the headers of a stream into a call, or refuses the stream with an error."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import TYPE_CHECKING

from google.protobuf.message import Message

from bertserve.serving.errors import (
    BertserveError,
    HeadersTooLarge,
    MalformedRequest,
    MethodNotAllowed,
    Unsupported,
    UnsupportedMediaType,
    route_not_found,
)
from bertserve.serving.grpc.call_kinds import BidirectionalCall, UnaryCall
from bertserve.serving.grpc.calls import Call, CallHead, Method
from bertserve.serving.grpc.connection import GrpcPort
from bertserve.serving.net.requests import MAX_HEADER_BYTES, MAX_HEADERS, gather_fields
from bertserve.serving.security.keys import refusal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bertserve.serving.grpc.connection import GrpcConnection
    from bertserve.serving.grpc.h2 import Headers, Stream

OPEN_BYTES = 4096
"""Maximum size in bytes of a message from a caller without an API key. Open methods need no larger ones."""

_NO_METHOD = Method(Message)
"""The method of calls that are refused before any method runs."""

_CONTENT_TYPE = re.compile(rb"application/grpc(?:\+([^;]*?))?(?: *;.*)?", re.IGNORECASE)
_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_SECONDS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}


class CallDispatch(GrpcPort):
    """Opens the calls of one port.

    Attributes:
        methods: By path. An error stands for a method that is not offered.
    """

    methods: Mapping[str, Method | BertserveError]

    def open(
        self, connection: GrpcConnection, stream: Stream, headers: Headers
    ) -> UnaryCall | BidirectionalCall | None:
        """The call on a new stream; None if its headers suffice to refuse it."""
        head = headers.memo
        if head is None:
            head = headers.memo = self._read_head(headers)
        if head.error is not None:
            Call(connection, stream, head).refuse(head.error)
            return None
        kind = UnaryCall if head.method.duplex is None else BidirectionalCall
        deadline = None if head.timeout_s is None else connection.loop.time() + head.timeout_s
        return kind(connection, stream, head, deadline)

    def keys_changed(self) -> None:
        for connection in list(self.connections):
            connection.keys_changed()

    def _read_head(self, headers: Headers) -> CallHead:
        values = MappingProxyType(gather_fields(headers.fields))
        path = values.get(b":path", b"").decode("latin-1")
        route = path if path in self.methods else "?"
        head = self._checked(headers, route, values)
        if isinstance(head, BertserveError):
            return CallHead(_NO_METHOD, route, 0, None, values, head)
        return head

    def _checked(  # noqa: PLR0911  one for each refusal
        self, headers: Headers, route: str, values: Mapping[bytes, bytes]
    ) -> CallHead | BertserveError:
        settings, keys = self.settings, self.keys
        if headers.size > MAX_HEADER_BYTES:
            return HeadersTooLarge(f"the metadata exceeds {MAX_HEADER_BYTES} bytes")
        if headers.count > MAX_HEADERS:
            return HeadersTooLarge(f"more than {MAX_HEADERS} headers")
        if (method := self.methods.get(route)) is None:
            method = route_not_found(values.get(b":path", b"").decode("latin-1"), "unknown method")
        body_limit = settings.body_limit_bytes
        if keys is not None and not keys.allow(values.get(b"authorization")):
            # Checked before anything that would reveal which methods exist.
            if not isinstance(method, Method) or not method.open:
                return refusal(values.get(b"authorization"))
            body_limit = min(body_limit, OPEN_BYTES)
        if (refused := _not_a_call(values)) is not None:
            return refused
        if isinstance(method, BertserveError):
            return method
        timeout_s = None
        if (timeout := values.get(b"grpc-timeout")) is not None:
            match = _TIMEOUT.fullmatch(timeout)
            if match is None:
                return MalformedRequest("grpc-timeout must be 1 to 8 digits and a unit: H, M, S, m, u or n")
            timeout_s = int(match[1]) * _SECONDS[match[2]]
        return CallHead(method, route, body_limit, timeout_s, values)


def _not_a_call(values: Mapping[bytes, bytes]) -> BertserveError | None:
    """The error for a request that is not a gRPC call with protobuf messages; None if it is one."""
    kind = _CONTENT_TYPE.fullmatch(values.get(b"content-type", b""))
    if kind is None:
        return UnsupportedMediaType("the content-type must be application/grpc")
    if values[b":method"] != b"POST":
        return MethodNotAllowed("the HTTP method must be POST", allowed="POST")
    if (kind[1] or b"proto").lower() != b"proto":
        return Unsupported(
            "unsupported message format; the content-type must be application/grpc or application/grpc+proto"
        )
    return None
