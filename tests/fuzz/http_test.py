"""The HTTP port beside a reader by others, h11.

A sequence is some requests that are nearly right, in pieces, with an end behind them. Every reply must parse, each must
be that of its request, and the port must take what h11 takes, but where a table below says why not.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.clients import RawConnection
from tests.support.http_sequences import (
    Reading,
    Reply,
    Request,
    Sequence,
    exchanged,
    read_by_h11,
    replies_in,
)

if TYPE_CHECKING:
    from tests.support.server import Server

_SIDE_BY_SIDE = 25
_PART = 5000

_REFUSALS = {400, 413, 421, 431, 501, 505}
"""What is said to bytes that are no request here; the connection ends with it."""

_METHODS = rb"GET|HEAD|POST|PUT|DELETE|OPTIONS|TRACE|CONNECT|PATCH"
_LARGEST = 16_384
_MAX_FIELDS = 100

_STRICTER = {
    # RFC 9112, 2.2, lets servers take LF alone, and requests were smuggled so.
    "CRLF ends a line": rb"(?<!\r)\n|\r(?!\n)",
    "no control character is in a field, DEL neither: RFC 9110, 5.5": rb"[\0-\x08\x0b\x0c\x0e-\x1f\x7f]",
    "a folded line is obsolete: RFC 9112, 5.2": rb"\r\n[ \t]",
    "a method is one that a standard has": rb"\A(?!(?:GET|HEAD|POST|PUT|DELETE|OPTIONS|TRACE|CONNECT|PATCH) )",
    "a target is a path or a whole address: RFC 9112, 3.2": rb"\A\S+ +(?![/*]|http://[\w.]+/)",
    "only OPTIONS asks for all: RFC 9112, 3.2.4": rb"\A(?!OPTIONS)\S+ +\*",
    "a percent sign is followed by two digits: RFC 3986, 2.1": rb"\A\S+ +\S*%(?![0-9a-fA-F]{2})",
    "a Host has no space and no user: RFC 9112, 3.2": rb"(?i)\r\nhost:[^\r]*(?:[^\w.:\[\]\r\t -]|\S[ \t]+\S)",
    "a Host's port is a number: RFC 9112, 3.2": rb"(?i)\r\nhost:[^\r]*:[^\r:\]]*[^\r\d\]:]",
    "a Host in a domain is another server: SECURITY.md": rb"(?i)\r\nhost:[ \t]*(?:[^\r\ta-z ]|[^\r]*\.)",
    "a version is 1.0 or 1.1: RFC 9112, 2.3": rb"\A[^\r\n]*HTTP/(?!1\.[01]\r)",
    "a length comes once: RFC 9110, 8.6": rb"(?i)content-length:(?:[^\r]*,|(?s:.*)content-length:)",
    "a body has a length or chunks: RFC 9112, 6.1": rb"(?i)content-length:(?s:.*)transfer-enc",
    "a body has chunks or a length: RFC 9112, 6.1": rb"(?i)transfer-enc(?s:.*)content-length:",
    "what is no list comes once: RFC 9110, 5.3": rb"(?i)\n(content-type|x-[a-z-]*): *([^\r]*)\r(?s:.*)\n\1:(?! *\2\r)",
    "an extension of a chunk has a name: RFC 9112, 7.1.1": rb"\r\n[0-9a-fA-F]+[^\r\n]*;\r\n",
    "its name is a token: RFC 9112, 7.1.1": rb"\r\n[0-9a-fA-F]+;[^\r\n=]*[^\w!#$%&'*+.^`|~;=\r\n-]",
    "the size of a chunk is digits alone: RFC 9112, 7.1": rb"\r\n[0-9a-fA-F]+[ \t]",
    "HTTP/1.0 has no chunks: RFC 9112, 6.1": rb"(?i)\A[^\r]*HTTP/1\.0\r(?s:.*)transfer-encoding",
}
"""What h11 takes and the port does not: why, and what in the request's bytes shows it."""

_LOOSER = {
    "empty lines before a request are passed over: RFC 9112, 2.2": rb"no request line received",
    "a request's line is split at any number of spaces: RFC 9112, 3": rb"illegal request line.*(?:  )",
}
"""What h11 does not take and the port does: why, and what of h11's words shows it."""

_SOONER = {"llhttp takes Proxy-Connection for Connection": rb"(?i)\r\nproxy-connection:[^\r]*close"}
"""Where the port ends a connection that h11 would keep: why, and what in the last request's bytes shows it."""


class Alone:
    """What the port answers to requests as h11 has read them, each said plainly on a connection of its own."""

    _LEFT_OUT = frozenset(
        b"connection content-length expect http2-settings keep-alive proxy-connection te trailer transfer-encoding"
        b" upgrade x-request-id".split()
    )

    def __init__(self, server: Server) -> None:
        self._server = server
        self._known: dict[bytes, tuple[int, bool]] = {}

    def status(self, request: Request) -> tuple[int, bool]:
        """The status, and whether the connection is kept."""
        fields = [(b"host", b"x")] if request.value(b"host") is None else []  # HTTP/1.0 needs none
        fields += [pair for pair in request.headers if pair[0] not in self._LEFT_OUT]
        if request.body:
            fields.append((b"content-length", b"%d" % len(request.body)))
        lines = b"".join(b"%b: %b\r\n" % pair for pair in fields)
        said = b"%b %b HTTP/1.1\r\n%b\r\n%b" % (request.method, request.target, lines, request.body)
        if said not in self._known:
            with RawConnection(self._server.http) as connection:
                connection.send(said + b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                first, *more = replies_in(connection.read_to_end(), [request.method])
            self._known[said] = first.status, bool(more)
        return self._known[said]


def _told(table: dict[str, bytes], data: bytes) -> bool:
    return any(re.search(pattern, data) for pattern in table.values())


def difference(read: Reading, replies: list[Reply], alone: Alone) -> str:
    """How the port's replies differ from what h11 has read; empty where they do not, or a table says why."""
    for at, request in enumerate(read.requests):
        if at >= len(replies):
            sooner = at > 0 and replies[-1].closes and _told(_SOONER, read.requests[at - 1].sent)
            return "" if sooner else "no answer"
        status, kept = alone.status(request)
        reply = replies[at]
        identity = request.value(b"x-request-id") or b"?"
        its_own = reply.request_id == identity or not re.fullmatch(rb"[\w.-]+", identity)
        if reply.status in _REFUSALS and reply.closes and not (kept and its_own and reply.status == status):
            too_large = len(request.sent) - len(request.body) > _LARGEST or request.sent.count(b"\r\n") > _MAX_FIELDS
            return "" if at == len(replies) - 1 and (too_large or _told(_STRICTER, request.sent)) else "stricter"
        if at == len(replies) - 1 and reply.closes and reply.status in _REFUSALS and _told(_STRICTER, request.sent):
            return ""  # whichever of two reasons there is to refuse it
        if (reply.status, its_own) != (status, True):
            return f"{reply.status} for {status}" if its_own else "the answer to another request"
    return _difference_behind(read, replies[len(read.requests) :])


def _difference_behind(read: Reading, replies: list[Reply]) -> str:
    """The same of what follows the last request, which is no request for h11."""
    if len(replies) == 1 and replies[0].closes and read.rest.startswith(b"CONNECT "):
        return ""  # h11 waits for a body, which has no meaning there: RFC 9110, 9.3.6
    if replies and (len(replies) > 1 or replies[0].status not in _REFUSALS):
        return "" if _told(_LOOSER, read.error.encode()) else "looser: " + read.error[:60]
    sooner = bool(read.requests) and _told(_SOONER, read.requests[-1].sent)
    unfinished = _told(_LOOSER, read.error.encode())
    return "" if replies or read.closed or sooner or unfinished or not read.error else "silence: " + read.error[:60]


def _parts() -> list[Any]:
    """Seeds: the few of every run, those of the slow tests, and 200,000 in parts."""
    slow = pytest.param(range(1000, 5000), marks=pytest.mark.slow)
    rest = [range(first, first + _PART) for first in range(5000, 200_000, _PART)]
    return [range(1000), slow, *[pytest.param(part, marks=pytest.mark.endurance) for part in rest]]


@pytest.mark.parametrize("seeds", _parts(), ids=lambda seeds: f"{seeds.start}-{seeds.stop}")
def test_requests(target: Server, seeds: range) -> None:
    """The port answers what h11 reads as requests, each with its own answer, and refuses what h11 refuses."""
    alone, found, taken = Alone(target), Counter[int](), 0
    for first in range(seeds.start, seeds.stop, _SIDE_BY_SIDE):
        sequences = [Sequence(seed) for seed in range(first, first + _SIDE_BY_SIDE)]
        for sequence, sent in zip(sequences, exchanged(target.http, sequences), strict=True):
            read = read_by_h11(sequence.data)
            replies = replies_in(sent, [request.method for request in read.requests])
            found.update(reply.status for reply in replies)
            taken += len(read.requests)
            assert not (wrong := difference(read, replies, alone)), (sequence.seed, wrong, sequence.data, sent)
    assert {200, 400, 404, 405, 422, 431} <= found.keys(), "the requests are too wrong, or not wrong enough"
    assert found.keys() <= {*range(200, 500), 501, 505}
    assert taken > len(seeds)
