"""What the calls of one port share, and how their headers are read and refused."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from serving.errors import (
    BertserveError,
    HeadersTooLarge,
    MalformedRequest,
    MethodNotAllowed,
    RouteNotFound,
    Unauthenticated,
    UnsupportedMediaType,
)
from serving.grpc.calls import CONTENT_TYPE, OK_STATUS, Call, Head, Method, trailers_of
from serving.grpc.conversation import Conversation
from serving.grpc.h2.frames import Code, StreamFault
from serving.grpc.h2.headers import size_of, status_field
from serving.grpc.h2.streams import Stream
from serving.net.requests import request_id
from serving.security.keys import refusal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from serving.grpc.h2.connection import Http2Connection
    from serving.grpc.h2.headers import Fields
    from serving.net.observer import RequestObserver
    from serving.net.requests import RecordError
    from serving.security.keys import ApiKeys
    from serving.settings import Settings

OPEN_BYTES = 4096
"""Of a message of a caller without a key: there is nothing of that size to ask."""

_CONTENT = re.compile(rb"application/grpc(\+proto)?( *;.*)?")
_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_SECONDS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_CONNECTION_FIELDS = {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
_NAME = re.compile(rb":?[!-9;-@[-~]+")  # no capitals
_BAD_VALUE = re.compile(rb"[\0\r\n]")
_PSEUDO = {b":method", b":scheme", b":path", b":authority"}


@dataclass(slots=True)
class Port:
    """What the calls of one port share.

    Attributes:
        methods: By path; an error in place of what is known and not offered.
        settings: Limits.
        record_error: Told of each error.
        keys: What all but the open methods need one of.
        observer: Traces requests; None where nothing reads the traces.
        connections: All that are there.
    """

    methods: Mapping[str, Method | BertserveError]
    settings: Settings
    record_error: RecordError
    keys: ApiKeys | None = None
    observer: RequestObserver | None = None
    connections: set[Http2Connection] = field(default_factory=set)

    def open(self, connection: Http2Connection, number: int, head: Head | BertserveError) -> Stream:
        """A new call."""
        if isinstance(head, Head):
            return (Conversation if head.method.duplex else Call)(self, connection, number, head)
        return _Refused(self, connection, number, head)

    def keys_changed(self) -> None:
        """What connections remember of the keys that there were is true no more."""
        for connection in list(self.connections):
            connection.keys_changed()

    def read_head(self, fields: Fields) -> Head | BertserveError:
        """What a request's fields say, or why nothing is called.

        Raises:
            StreamFault: They are malformed, as RFC 9113, 8.1.1 has it.
        """
        values = dict(reversed(fields))  # of fields that come twice, the first
        _check_fields(fields, values)
        try:
            return self._head(fields, values)
        except (
            *(HeadersTooLarge, MalformedRequest, MethodNotAllowed, RouteNotFound),
            *(Unauthenticated, UnsupportedMediaType),
        ) as error:
            return error.with_traceback(None)

    def _head(self, fields: Fields, values: dict[bytes, bytes]) -> Head | BertserveError:
        settings = self.settings
        if size_of(fields) > settings.header_limit_bytes:
            raise HeadersTooLarge(f"the metadata exceeds {settings.header_limit_bytes} bytes")
        if len(fields) > settings.header_limit_count:
            raise HeadersTooLarge(f"more than {settings.header_limit_count} headers")
        method = self.methods.get(values[b":path"].decode("latin-1"))
        body_limit = settings.body_limit_bytes
        if self.keys is not None and not self.keys.allow(values.get(b"authorization")):
            # Before anything that would tell what there is.
            if not isinstance(method, Method) or not method.open:
                raise refusal(values.get(b"authorization"))
            body_limit = min(body_limit, OPEN_BYTES)
        if not _CONTENT.fullmatch(values.get(b"content-type", b"")):
            raise UnsupportedMediaType("the content-type must be application/grpc")
        if values[b":method"] != b"POST":
            raise MethodNotAllowed("calls are made with POST", allowed="POST")
        if method is None:
            raise RouteNotFound("no such method")
        if isinstance(method, BertserveError):
            return method
        return Head(method, body_limit, _timeout_s(values.get(b"grpc-timeout")), values)


class _Refused(Stream):
    """A call whose headers are enough to refuse it."""

    __slots__ = ("_connection", "_error", "_port")

    def __init__(self, port: Port, connection: Http2Connection, number: int, error: BertserveError) -> None:
        super().__init__(number)
        self._port = port
        self._connection = connection
        self._error = error

    def opened(self) -> None:
        """Refuses; what is no call of gRPC at all also gets HTTP's status."""
        error, identity = self._error, request_id(None)
        self._port.record_error(error, identity)
        status = error.http_status if isinstance(error, UnsupportedMediaType | MethodNotAllowed) else OK_STATUS
        self._connection.refuse(self, status_field(status) + CONTENT_TYPE + trailers_of(error, identity))


def _timeout_s(given: bytes | None) -> float | None:
    if given is None:
        return None
    match = _TIMEOUT.fullmatch(given)
    if match is None:
        raise MalformedRequest("grpc-timeout must be up to eight digits and one of H, M, S, m, u, n")
    return int(match[1]) * _SECONDS[match[2]]


def _check_fields(fields: Fields, values: dict[bytes, bytes]) -> None:
    """Checks a request's fields (RFC 9113, 8.2 and 8.3).

    Raises:
        StreamFault: They are malformed.
    """
    pseudo = [name for name, _ in fields if name.startswith(b":")]
    well = (
        len(set(pseudo)) == len(pseudo)
        and _PSEUDO.issuperset(pseudo)
        and values.keys() >= {b":method", b":scheme", b":path"}
        and all(name.startswith(b":") for name, _ in fields[: len(pseudo)])
        and _CONNECTION_FIELDS.isdisjoint(values)
        and all(_NAME.fullmatch(name) for name, _ in fields)
        and not any(_BAD_VALUE.search(value) for _, value in fields)
    )
    if not well:
        raise StreamFault(Code.PROTOCOL_ERROR)
