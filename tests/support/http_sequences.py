"""Sequences of HTTP/1.1 requests that are nearly right, and what h11 makes of them."""

from __future__ import annotations

import contextlib
import random
import socket
from dataclasses import dataclass

import h11

from tests.support.clients import RawConnection

_LIMIT = 16_384

_METHODS = {b"POST": 40, b"GET": 40, b"HEAD": 8, b"OPTIONS": 3, b"DELETE": 2, b"PUT": 1, b"BREW": 0.3, b"get": 0.3}
_METHODS |= {b"G@T": 0.3, b"CONNECT": 0.2, b"TRACE": 0.2, b"PRI": 0.2}
_TARGETS = {b"/livez": 30, b"/v1/models": 5, b"/nothing": 5, b"/livez?x=1": 3, b"/%6civez": 2, b"*": 1, b"//livez": 1}
_TARGETS |= {b"http://x/livez": 1, b"/livez#f": 1, b"/l%zz": 1, b"/\xc3\xa9": 1, b"/a b": 1, b"": 0.5, b"livez": 0.5}
_TARGETS |= {b"x:80": 0.3, b"/" + b"a" * 9000: 0.3, b"/" + b"a" * 17_000: 0.2, b"/v1/models/%00": 1}
_VERSIONS = {b"HTTP/1.1": 90, b"HTTP/1.0": 8, b"HTTP/1.2": 0.4, b"HTTP/2.0": 0.4, b"HTTP/0.9": 0.4, b"http/1.1": 0.4}
_VERSIONS |= {b"HTTP/1.1x": 0.3, b"HTTP/11": 0.3, b"": 0.3}
_SPACES = {b" ": 97, b"  ": 1, b"\t": 1, b"": 1}
_ENDS = {b"\r\n": 980, b"\n": 8, b"\r": 5, b"\r\r\n": 4, b"\r\n ": 3}
_HOSTS = {b"Host: x": 90, b"": 2, b"Host:": 1, b"Host: a b": 1, b"Host: x:80": 3, b"Host: x:y": 1, b"Host: u@x": 1}
_HOSTS |= {b"hOST: [::1]:8": 1}
_OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA"
_FIELDS = {b"Accept: */*": 10, b"Connection: keep-alive": 6, b"Connection: close": 4, b"Connection: Close, x": 2}
_FIELDS |= {_OFFER: 4, b"Connection: upgrade\r\nUpgrade: websocket": 3, b"Upgrade: TLS/1.2": 2, b"Trailer: X": 1}
_FIELDS |= {b"Expect: 100-continue": 4, b"Expect: x": 1, b"Connection: x\r\nConnection: close": 1, b"TE: trailers": 1}
_FIELDS |= {b"Connection: keep-alive, close": 1, b"Host: y": 1, b"X A: b": 1, b"XA": 1, b"X-A : b": 1, b": b": 1}
_FIELDS |= {b"X-A: a\0b": 1, b"X-A: a\rb": 1, b"X-A: \xe4\xff": 1, b"X-A: a\x7f": 1, b"X-A:": 1, b"X-A:   \t y  ": 1}
_FIELDS |= {b"X-A: b\r\n c": 1, b"Content-Type: text/plain": 2, b"Transfer-Encoding": 1, b"Cookie: a\r\nCookie: b": 1}
_FIELDS |= {b"Proxy-Connection: close": 1, b"X-Request-Timeout-Ms: 9999": 1, b"X-A: " + b"v" * 9000: 0.5}
_FIELDS |= {b"X-A: " + b"v" * 17_000: 0.3, b"\r\n".join(b"X-%d: y" % number for number in range(120)): 0.4}
_LENGTHS = {b"%d": 90, b"+%d": 1, b"-1": 1, b"0x%x": 1, b"%d ": 1, b"0%d": 1, b"%d,%d": 1, b"": 1, b"1%d": 1, b"1_0": 1}
_LENGTHS |= {
    b"99999999999999999999": 0.5,
    b"9999999": 0.5,
    b"%d\r\nContent-Length: %d": 1,
    b"%d\r\nContent-Length: 1": 1,
}
_CODINGS = {
    b"chunked": 90,
    b"Chunked": 3,
    b"gzip, chunked": 1,
    b"chunked, chunked": 1,
    b"identity": 1,
    b"\x0bchunked": 1,
}
_CODINGS |= {b"chunked, identity": 1, b"xchunked": 1, b"": 1, b"chunked;q=1": 1, b" chunked ": 1, b'"chunked"': 1}
_CODINGS |= {b"chunked\r\nTransfer-Encoding: chunked": 1, b"gzip\r\nTransfer-Encoding: chunked": 1}
_SIZES = {b"%x": 92, b"%X": 3, b"0%x": 2, b"+%x": 0.5, b"0x%x": 0.5, b"%x ": 0.5, b"1%x": 0.5, b"g": 0.5, b"": 0.5}
_SIZES |= {b"ffffffffffffffffff": 0.5}
_EXTENSIONS = {b"": 92, b";a=b": 3, b';a="x"': 2, b" ;a": 0.7, b";": 0.7, b";a\n=b": 0.7, b";" + b"e" * 200: 0.7}
_TRAILERS = {b"": 85, b"X-T: 1\r\n": 8, b"Content-Length: 5\r\n": 2, b"Bad Trailer: x\r\n": 1, b"X: \0\r\n": 1}
_BODIES = (b'{"inputs":"hi"}', b'{"inputs":["a","b"]}', b'{"inputs":1}', b"{}", b'{"inputs":"hi"}' + b" " * 3000)
_BETWEEN = (b"\r\n", b"\r\n\r\n", b"\0", b"\n", b" ")


class Sequence:
    """Requests as bytes, and where a client cuts them; the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.seed = seed
        count = self._random.choice((1, 1, 2, 2, 3, 4))
        data = b""
        for number in range(count):
            data += self._request(number)
            if self._random.random() < 0.03:
                data += self._random.choice(_BETWEEN)
        if self._random.random() < 0.25:
            data = self._mutated(bytearray(data))
        self.data = data + b"GET /livez HTTP/1.1\r\nHost: x\r\nX-Request-Id: last\r\n\r\n"
        many = self._random.choice((0, 0, 1, 2, 5, len(self.data) if len(self.data) < 400 else 9))
        cuts = sorted(self._random.randrange(len(self.data)) for _ in range(many))
        self.pieces = [self.data[a:b] for a, b in zip([0, *cuts], [*cuts, len(self.data)], strict=True) if a < b]

    def _one(self, choices: dict[bytes, float]) -> bytes:
        return self._random.choices(list(choices), list(choices.values()))[0]

    def _request(self, number: int) -> bytes:
        method, target = self._one(_METHODS), self._one(_TARGETS)
        if method == b"POST" and self._random.random() < 0.8:
            target = b"/embed"
        fields = [self._one(_HOSTS), b"X-Request-Id: %d-%d" % (self.seed, number)]
        fields += [self._one(_FIELDS) for _ in range(self._random.choice((0, 0, 0, 1, 1, 2, 3)))]
        content = b""
        if method in {b"POST", b"PUT"} or self._random.random() < 0.05:
            framing, content = self._content(self._random.choice(_BODIES))
            fields += [b"Content-Type: application/json", *framing]
        self._random.shuffle(fields)
        line = method + self._one(_SPACES) + target + self._one(_SPACES) + self._one(_VERSIONS) + self._one(_ENDS)
        return line + b"".join(field + self._one(_ENDS) for field in fields if field) + self._one(_ENDS) + content

    def _content(self, body: bytes) -> tuple[list[bytes], bytes]:
        how = self._random.random()
        length = self._one(_LENGTHS)
        length = b"Content-Length: " + (length % ((len(body),) * length.count(b"%")))
        coding = b"Transfer-Encoding: " + self._one(_CODINGS)
        if how < 0.55:
            return [length], body
        if how < 0.95:
            return [coding], self._chunks(body)
        return ([length, coding], self._chunks(body)) if how < 0.98 else ([], body)

    def _chunks(self, body: bytes) -> bytes:
        sent, at = b"", 0
        while at < len(body):
            chunk = body[at : at + self._random.choice((1, 2, 5, 4000))]
            at += len(chunk)
            size = self._one(_SIZES)
            sent += size % ((len(chunk),) * size.count(b"%")) + self._one(_EXTENSIONS) + self._one(_ENDS)
            sent += chunk + self._one(_ENDS)
            if len(sent) > 1000:
                size = b"%x" % (len(body) - at)
                sent, at = sent + (size + b"\r\n" + body[at:] + b"\r\n" if at < len(body) else b""), len(body)
        return sent + b"0" + self._one(_ENDS) + self._one(_TRAILERS) + self._one(_ENDS)

    def _mutated(self, data: bytearray) -> bytes:
        for _ in range(self._random.choice((1, 1, 2, 4))):
            at, how = self._random.randrange(len(data)), self._random.random()
            if how < 0.4:
                data[at] = self._random.randrange(256)
            elif how < 0.6:
                del data[at : at + self._random.choice((1, 1, 3, 20))]
            elif how < 0.8:
                data[at:at] = bytes([self._random.randrange(256)]) * self._random.choice((1, 1, 2))
            else:
                other = self._random.randrange(len(data))
                data[at:at] = data[other : other + self._random.randrange(1, 40)]
        return bytes(data)


@dataclass
class Request:
    """A request as h11 reads it, from its bytes."""

    method: bytes
    target: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    sent: bytes

    def value(self, name: bytes) -> bytes | None:
        """Of a field that it has once."""
        values = [value for field, value in self.headers if field == name]
        return values[0] if len(values) == 1 else None


@dataclass
class Reading:
    """What a reader makes of a sequence.

    Attributes:
        requests: Those that are whole.
        error: Why the rest is none; empty where it has no end yet, or is not read since the connection ends.
        rest: What is left.
        closed: Whether the last request ends the connection.
    """

    requests: list[Request]
    error: str
    rest: bytes
    closed: bool = False


def read_by_h11(data: bytes) -> Reading:
    """The requests in the bytes of a connection, by RFC 9112 as h11 has it."""
    found = Reading([], "", data)
    while found.rest and not found.closed:
        parser = h11.Connection(h11.SERVER, max_incomplete_event_size=_LIMIT)
        parser.receive_data(found.rest)
        request, body = None, b""
        try:
            while not isinstance(event := parser.next_event(), h11.EndOfMessage):
                if event is h11.NEED_DATA or event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
                    return found
                if isinstance(event, h11.Request):
                    request = event
                elif isinstance(event, h11.Data):
                    body += bytes(event.data)
        except h11.RemoteProtocolError as error:
            found.error = str(error)
            return found
        assert request is not None
        left = parser.trailing_data[0]
        sent = found.rest[: len(found.rest) - len(left)]
        found.requests.append(Request(request.method, request.target, list(request.headers), body, sent))
        found.rest, found.closed = left, not _is_kept(request)
    return found


def _is_kept(request: h11.Request) -> bool:
    """RFC 9112, 9.3; h11 itself keeps no connection of HTTP/1.0."""
    words = b",".join(value for name, value in request.headers if name == b"connection").lower().split(b",")
    words = [word.strip() for word in words]
    if b"close" in words or request.method == b"CONNECT":
        return False
    return request.http_version >= b"1.1" or b"keep-alive" in words


@dataclass
class Reply:
    status: int
    request_id: bytes
    closes: bool


CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def replies_in(data: bytes, methods: list[bytes]) -> list[Reply]:
    """The replies in what a server has sent, to requests with these methods, and to what is none behind them."""
    if data in {b"", CONTINUE}:  # the latter to a request whose body never came
        return []
    # Of a request that h11 refuses nobody knows the method: the reading that fits what follows is right.
    for to_head in [methods[0] == b"HEAD"] if methods else [False, True]:
        try:
            head, _, rest = reply_in(data, to_head=to_head)
            behind = replies_in(rest, methods[1:])
        except h11.RemoteProtocolError:
            if methods or to_head:
                raise
        else:
            break
    fields = dict(head.headers)
    reply = Reply(head.status_code, fields.get(b"x-request-id", b""), fields.get(b"connection") == b"close")
    return [reply, *behind]


def reply_in(data: bytes, *, to_head: bool) -> tuple[h11.Response, bytes, bytes]:
    """A reply, its body, and what lies behind it; `h11.RemoteProtocolError` where there is none."""
    parser = h11.Connection(h11.CLIENT)
    parser.send(h11.Request(method="HEAD" if to_head else "GET", target="/", headers=[("Host", "x")]))
    parser.send(h11.EndOfMessage())
    parser.receive_data(data)
    parser.receive_data(b"")
    head, body = None, b""
    while not isinstance(event := parser.next_event(), h11.EndOfMessage):
        if event is h11.NEED_DATA or isinstance(event, h11.ConnectionClosed):
            raise h11.RemoteProtocolError("a reply has no end")
        if isinstance(event, h11.Response):
            head = event
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
    assert head is not None
    return head, body, parser.trailing_data[0]


def exchanged(address: str, sequences: list[Sequence]) -> list[bytes]:
    """What a server sends to clients side by side, each with a sequence in its pieces and an end behind it."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(RawConnection(address)) for _ in sequences]
        for client in clients:
            client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for turn in range(max(len(sequence.pieces) for sequence in sequences)):
            for client, sequence in zip(clients, sequences, strict=True):
                if turn < len(sequence.pieces):
                    client.send(sequence.pieces[turn])
        for client in clients:
            with contextlib.suppress(OSError):
                client.end()
        return [client.read_to_end() for client in clients]
