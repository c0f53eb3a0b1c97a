"""The accounts of a rolling restart: what counts as an answer, and what is found missing."""

from __future__ import annotations

import json
import struct
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from loadtest.generator.grpc_messages import request_bytes
from loadtest.generator.messages import Target
from loadtest.generator.open_loop import Job, Request
from loadtest.generator.wire import Reply
from tests.support.rolling.accounting import AccountingGenerator, identity
from tests.support.rolling.drive import Found, Restart
from tests.support.rolling.parts import Replica

if TYPE_CHECKING:
    from pathlib import Path

EVEN = {"name": "", "purpose": "", "phases": [{"seconds": 1, "begin": 1, "end": 1}], "lengths": {}}
ONE, OTHER = [1.0, 2.0, 3.0], [3.0, -2.0, 1.0]


def generator(protocol: str) -> AccountingGenerator:
    """One that asks for two texts in turn."""
    target = {"protocol": protocol, "host": "127.0.0.1", "port": 1, "model": "m"}
    kinds = [("embed", 1.0, ["one text", "another text"])]
    return AccountingGenerator(Job(target, EVEN, 10.0, 1, 0, 1, 1.0, kinds), lambda _: None)


def field(number: int, data: bytes) -> bytes:
    """A field of protobuf, shorter than 128 bytes."""
    return bytes([number << 3 | 2, len(data)]) + data


def reply(protocol: str, name: str, vector: list[float], fault: str = "") -> Reply:
    """As a server gives it."""
    if protocol == "http":
        head = f"HTTP/1.1 200 OK\r\nx-request-id: {name}\r\n\r\n".lower().encode()
        return Reply(None, fault, head, json.dumps([vector]).encode())
    raw = struct.pack(f"<{len(vector)}f", *vector)
    return Reply(None, fault, b"", field(1, b"m") + field(3, name.encode()) + field(6, raw))


def asked(made: AccountingGenerator, times: int) -> tuple[Request, str]:
    """The last of so many requests, and its id."""
    for _ in range(times):
        request = Request(0.0, 0.0, 0)
        made._message(request)
    return request, made._asked[request][0].decode()


protocols = pytest.mark.parametrize("protocol", ["http", "grpc"])


@protocols
def test_every_request_has_an_id_of_its_own(protocol: str) -> None:
    """It stands in the message, and the texts take turns."""
    made = generator(protocol)
    sent = [made._message(Request(0.0, 0.0, 0)) for _ in range(4)]
    for number, message in enumerate(sent):
        assert message.count(identity(protocol, 0, number).encode()) == 1
        assert (b"another text" in message) is bool(number % 2)
    assert len({len(message) for message in sent[::2]}) == 1


@protocols
def test_an_answer_is_what_it_was_before(protocol: str) -> None:
    """To the bit, or nearly: the same artifact in other company may round otherwise."""
    made = generator(protocol)
    for vector in (ONE, ONE, [1.00001, 2.0, 3.0]):
        request, name = asked(made, 2)
        assert made._judge(request, reply(protocol, name, vector)) == ""


@protocols
def test_what_is_no_answer(protocol: str) -> None:
    """Another request's id, another text's vector, a fault: each is told apart."""
    made = generator(protocol)
    request, name = asked(made, 1)
    assert made._judge(request, reply(protocol, name, ONE)) == ""
    request, name = asked(made, 2)
    assert "text's" in made._judge(request, reply(protocol, name, OTHER))
    request, _ = asked(made, 2)
    assert "id" in made._judge(request, reply(protocol, identity(protocol, 0, 0), ONE))
    request, name = asked(made, 2)
    assert made._judge(request, reply(protocol, name, ONE, "503 Service Unavailable")) == "503 Service Unavailable"


def test_a_request_of_grpc_carries_its_id() -> None:
    """As field 3, where the protocol has it."""
    assert field(3, b"an-id") in request_bytes("m", "text", "an-id")
    assert b"an-id" not in request_bytes("m", "text")


def test_requests_over_http_carry_their_id() -> None:
    """As a header of its own line."""
    (message, _) = generator("http")._halves[0]
    assert message[0].endswith(b"\r\nX-Request-Id: ")
    assert message[1].startswith(b"\r\nContent-Type: ")
    assert Target("http", "h", 1, "m").authority == "h:1"


def test_a_log_is_read(tmp_path: Path) -> None:
    """Answers count, refusals and other lines do not; errors are found."""
    replica = Replica("a", tmp_path, tmp_path, ())
    lines: list[object] = [
        {"level": "info", "logger": "bertserve.access", "request_id": "rolling-http-00-00000000", "reason": "ok"},
        {"level": "info", "logger": "bertserve.access", "request_id": "rolling-http-00-00000000", "reason": "ok"},
        {
            "level": "info",
            "logger": "bertserve.access",
            "request_id": "rolling-http-00-00000001",
            "reason": "overloaded",
        },
        {"level": "error", "logger": "bertserve", "message": "unhandled exception"},
    ]
    replica.log.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines) + "no JSON\n")
    assert replica.answered() == Counter({"rolling-http-00-00000000": 2})
    assert len(replica.faults()) == 1


def found() -> Found:
    """A run without a blemish."""
    return Found(
        rate=10.0,
        capacity=None,
        seconds=4.0,
        restarts=[Restart("a", 1.0, 2.0, 3.0, 0)],
        offered={"http": 20, "grpc": 20},
        proxy={"requests": 40, "replies broken": 0, "replies 5xx": 0},
    )


def test_a_verdict_names_every_broken_promise() -> None:
    """And none where all were kept."""
    assert found().verdict() == []
    broken = found()
    broken.faults["503 Service Unavailable"] = 2
    broken.unaccounted = ["rolling-http-00-00000007"]
    broken.restarts += [Restart("b", 3.0, 3.5, 9.0, 1)]
    broken.proxy["replies broken"] = 1
    broken.errors = ["Traceback"]
    told = "\n".join(broken.verdict())
    for words in ("503", "00000007", "exit code 1", "after the load", "1 replies broken", "Traceback"):
        assert words in told
