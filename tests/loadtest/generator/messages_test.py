from __future__ import annotations

import json
from typing import Any

import pytest

from loadtest.errors import BenchError
from loadtest.generator.http1 import HttpWire
from loadtest.generator.http2 import GrpcWire
from loadtest.generator.messages import Target, messages


@pytest.mark.parametrize(
    ("url", "protocol", "found"),
    [
        ("http://host:1234", None, ("http", "host", 1234)),
        ("grpc://host:1234/", None, ("grpc", "host", 1234)),
        ("host:1234", "grpc", ("grpc", "host", 1234)),
        ("host:1234", None, ("http", "host", 1234)),
        ("http://host", "http", ("http", "host", 8000)),
        ("grpc://host", None, ("grpc", "host", 8001)),
        ("http://[::1]:1234", None, ("http", "::1", 1234)),
    ],
)
def test_a_target_is_read_as_it_is_written(url: str, protocol: str | None, found: tuple[str, str, int]) -> None:
    """A scheme decides the protocol, then the option, then HTTP; a port may be left out."""
    target = Target.of(url, protocol, "minilm")
    assert (target.protocol, target.host, target.port) == found


def test_an_address_of_version_6_stays_in_its_brackets() -> None:
    """What stands in the Host header is what the URL had."""
    assert Target.of("http://[::1]:1234", None, "").authority == "[::1]:1234"


@pytest.mark.parametrize("url", ["https://host", "http://", "http://host:99999", "http://host/path"])
def test_what_is_no_target_is_named(url: str) -> None:
    """A URL that means nothing here comes back in the message."""
    with pytest.raises(BenchError, match=f"--target {url}"):
        Target.of(url, None, "")


def test_a_name_that_nobody_knows_is_a_sentence() -> None:
    """A host that cannot be found is said to be that."""
    with pytest.raises(BenchError, match=r"cannot find nowhere\.invalid"):
        Target.of("nowhere.invalid:1", None, "").address()


@pytest.mark.parametrize(
    ("task", "path", "body"),
    [
        ("embed", "/embed", {"inputs": "a text"}),
        ("classify", "/classify", {"inputs": "a text"}),
        ("tag", "/tag", {"inputs": "a text"}),
        ("fill_mask", "/fill-mask", {"inputs": "a text [MASK]"}),
        ("rerank", "/rerank", {"query": "What is this about?", "texts": ["a text"]}),
        ("answer", "/answer", {"inputs": {"question": "What is this about?", "context": "a text"}}),
    ],
)
def test_every_task_has_its_route(task: str, path: str, body: dict[str, Any]) -> None:
    """Over HTTP a task is a route and a body."""
    target = Target("http", "host", 1, "")
    assert isinstance(target.wire(), HttpWire)
    [message] = messages(target, task, ["a text"])
    head, _, data = message.partition(b"\r\n\r\n")
    assert head.startswith(f"POST {path} HTTP/1.1\r\nHost: host:1\r\n".encode())
    assert json.loads(data) == body


def test_grpc_embeds_alone() -> None:
    """A task that has no method is refused before anything is sent."""
    target = Target("grpc", "host", 1, "minilm")
    assert isinstance(target.wire(), GrpcWire)
    assert b"minilm" in messages(target, "embed", ["a text"])[0]
    with pytest.raises(BenchError, match="classify has no method of gRPC"):
        messages(target, "classify", ["a text"])
