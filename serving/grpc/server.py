"""The gRPC port: which method a call is for, or why it is refused; how the port opens, closes and drains."""

from __future__ import annotations

import asyncio
import re
from types import MappingProxyType
from typing import TYPE_CHECKING

from google.protobuf.message import Message

from serving.errors import (
    BertserveError,
    HeadersTooLarge,
    MalformedRequest,
    MethodNotAllowed,
    RouteNotFound,
    Unsupported,
    UnsupportedMediaType,
)
from serving.grpc.call_kinds import BidirectionalCall, GatheredCall, UnaryCall
from serving.grpc.calls import Call, CallHead, Method
from serving.grpc.connection import GrpcConnection, GrpcPort
from serving.grpc.services.inference import SERVICE, InferenceService
from serving.grpc.services.standard import SERVICE as HEALTH
from serving.grpc.services.standard import HealthService, OrcaService, ReflectionService
from serving.grpc.services.tei import SERVICES as TEI
from serving.grpc.services.tei import TeiServices
from serving.lifecycle import State
from serving.net.listener import Listener
from serving.net.ports import keep_alive
from serving.net.requests import gathered
from serving.security.keys import refusal
from serving.unawaited import guarded

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

    from serving.grpc.h2 import Headers, Stream
    from serving.net.buffers import BufferBudget
    from serving.net.connection_limiter import ConnectionLimiter
    from serving.net.observer import RequestObserver
    from serving.net.orca import LoadReports
    from serving.net.requests import RecordError
    from serving.oip.service import V2Service
    from serving.security.keys import ApiKeys
    from serving.security.tls import Tls
    from serving.settings import Settings
    from serving.tei.service import TeiService

OPEN_BYTES = 4096
"""Of a message of a caller without a key: there is nothing of that size to ask."""

_NO_METHOD = Method(Message)
"""Of calls that are refused before a method is asked."""

_CONTENT_TYPE = re.compile(rb"application/grpc(?:\+([^;]*?))?(?: *;.*)?", re.IGNORECASE)
_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_SECONDS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}


class CallDispatch(GrpcPort):
    """The calls of one port.

    Attributes:
        methods: By path; an error in place of a method that is not offered.
    """

    methods: Mapping[str, Method | BertserveError]

    def open(
        self, connection: GrpcConnection, stream: Stream, headers: Headers
    ) -> UnaryCall | BidirectionalCall | None:
        """The call on a new stream; None if its headers are enough to refuse it."""
        head = headers.memo
        if head is None:
            head = headers.memo = self._read_head(headers)
        if head.error is not None:
            Call(connection, stream, head).refuse(head.error)
            return None
        kind = _kind(head.method)
        deadline = None if head.timeout_s is None else connection.loop.time() + head.timeout_s
        return kind(connection, stream, head, deadline)

    def keys_changed(self) -> None:
        for connection in list(self.connections):
            connection.keys_changed()

    def _read_head(self, headers: Headers) -> CallHead:
        values = MappingProxyType(gathered(headers.fields))
        path = values.get(b":path", b"").decode("latin-1")
        route = path if path in self.methods else "?"
        head = self._checked(headers, route, values)
        if isinstance(head, BertserveError):
            return CallHead(_NO_METHOD, route, 0, None, values, head)
        return head

    def _checked(  # noqa: PLR0911  as many refusals
        self, headers: Headers, route: str, values: Mapping[bytes, bytes]
    ) -> CallHead | BertserveError:
        settings, keys = self.settings, self.keys
        if headers.size > settings.header_limit_bytes:
            return HeadersTooLarge(f"the metadata exceeds {settings.header_limit_bytes} bytes (--header-limit-bytes)")
        if headers.count > settings.header_limit_count:
            return HeadersTooLarge(f"more than {settings.header_limit_count} headers (--header-limit-count)")
        method = self.methods.get(route, RouteNotFound("no such method"))
        body_limit = settings.body_limit_bytes
        if keys is not None and not keys.allow(values.get(b"authorization")):
            # Before anything that would tell what there is.
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
                return MalformedRequest("grpc-timeout must be up to eight digits and one of H, M, S, m, u, n")
            timeout_s = int(match[1]) * _SECONDS[match[2]]
        return CallHead(method, route, body_limit, timeout_s, values)


def _not_a_call(values: Mapping[bytes, bytes]) -> BertserveError | None:
    """Why a request is no call of gRPC in protobuf, whatever it asks for."""
    kind = _CONTENT_TYPE.fullmatch(values.get(b"content-type", b""))
    if kind is None:
        return UnsupportedMediaType("the content-type must be application/grpc")
    if values[b":method"] != b"POST":
        return MethodNotAllowed("calls are made with POST", allowed="POST")
    if (kind[1] or b"proto").lower() != b"proto":
        return Unsupported("messages are protobuf; the content-type must be application/grpc or application/grpc+proto")
    return None


def _kind(method: Method) -> type[UnaryCall | BidirectionalCall]:
    if method.duplex is not None:
        return BidirectionalCall
    return UnaryCall if method.gathered is None else GatheredCall


class GrpcListener(Listener):
    def __init__(
        self,
        opened: socket.socket,
        v2_service: V2Service,
        tei_service: TeiService,
        settings: Settings,
        record_error: RecordError,
        *,
        budget: BufferBudget,
        load_reports: LoadReports,
        keys: ApiKeys | None = None,
        tls: Tls | None = None,
        limiter: ConnectionLimiter | None = None,
        observer: RequestObserver | None = None,
    ) -> None:
        """Prepares; nothing is accepted before `start`. The listening socket is owned from here on.

        `budget` is what its connections may hold, together with those of other ports.
        """
        self.health = HealthService([SERVICE, *TEI])
        methods = InferenceService(v2_service).methods() | TeiServices(tei_service).methods()
        self._orca = OrcaService(load_reports)
        reflection = ReflectionService([SERVICE, *TEI, HEALTH])
        methods |= {**self.health.methods(), **reflection.methods(), **self._orca.methods()}
        self._calls = CallDispatch(methods, settings, record_error, budget, keys, observer, load_reports)
        super().__init__(
            *(opened, lambda: GrpcConnection(self._calls), tls, "h2"),
            ports=[self._calls],
            limiter=limiter,
        )
        keep_alive(opened)
        v2_service.lifecycle.subscribe(self._follow)

    async def finish(self, drain_s: float, grace_s: float) -> None:
        """Accepts no more, answers what clients send before they know, then ends their connections.

        Args:
            drain_s: How long clients may take to hear of the end; then further calls are refused.
            grace_s: How long, after that, the calls that are there may take.
        """
        self.health.close()
        self._orca.close()
        self._calls.ending = True  # for connections whose handshake has not ended
        self.close()
        limit = asyncio.get_running_loop().time() + drain_s
        self._calls.drain()
        try:
            await self.emptied(limit)
            for connection in list(self._calls.connections):
                guarded(connection.abort, connection.refuse_more)
            await self.emptied(limit + grace_s)
        finally:
            for connection in list(self._calls.connections):
                guarded(connection.abort, connection.end)

    def keys_changed(self) -> None:
        self._calls.keys_changed()

    def _follow(self, state: State) -> None:
        self.health.set(serving=state in {State.READY, State.DEGRADED})
