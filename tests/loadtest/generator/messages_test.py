from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from bertserve.loadtest.errors import BenchError
from bertserve.loadtest.generator.http1 import HttpWire
from bertserve.loadtest.generator.messages import Target, messages
from bertserve.loadtest.generator.routes import PROTOCOLS, ROUTES
from bertserve.loadtest.generator.tls import Tls
from bertserve.serving.tasks import TASKS


@pytest.mark.parametrize(
    ("url", "protocol", "found"),
    [
        ("http://host:1234", None, ("http", "host:1234")),
        ("grpc://host:1234/", None, ("grpc", "host:1234")),
        ("host:1234", "grpc", ("grpc", "host:1234")),
        ("host:1234", None, ("http", "host:1234")),
        ("http://host", "http", ("http", "host:8000")),
        ("grpc://host", None, ("grpc", "host:8001")),
        ("http://[::1]:1234", None, ("http", "[::1]:1234")),
        ("http://host:1", "v2", ("v2", "host:1")),
        ("https://host:1", "openai", ("openai", "host:1")),
        ("grpcs://host", None, ("grpc", "host:8001")),
    ],
)
def test_a_target_is_read_as_it_is_written(url: str, protocol: str | None, found: tuple[str, str]) -> None:
    """A scheme decides the protocol, then the option, then HTTP; a port may be left out.

    What stands in the Host header is what the URL had: an address of version 6 stays in its brackets.
    """
    target = Target.of(url, protocol, "minilm")
    assert (target.protocol, target.authority) == found
    assert target.host == found[1].rpartition(":")[0].strip("[]")


@pytest.mark.parametrize(
    ("url", "protocol", "tls", "sentence"),
    [
        *(
            (url, None, Tls(), f"--target {url}")
            for url in ("ftp://host", "http://", "http://host:99999", "http://a/b")
        ),
        ("nowhere.invalid:1", None, None, r"cannot resolve nowhere\.invalid"),
        # A port of the other protocol, or files for TLS without TLS.
        ("https://host:1", "grpc", Tls(ca="ca.pem"), "use grpcs://host:port"),
        ("grpcs://host:1", "v2", Tls(ca="ca.pem"), "use https://host:port"),
        ("http://host:1", "http", Tls(ca="ca.pem"), "use https://host:1"),
    ],
)
def test_what_is_no_target_is_named(url: str, protocol: str | None, tls: Tls | None, sentence: str) -> None:
    """With what would be right, where there is something."""
    with pytest.raises(BenchError, match=sentence):
        Target.of(url, protocol, "", tls=tls).address()


QUERY = "What is this about?"
BODIES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("http", "embed", "/embed", {"inputs": "a text"}),
    ("http", "embed_tokens", "/embed_all", {"inputs": "a text"}),
    ("tei", "embed_sparse", "/embed_sparse", {"inputs": "a text"}),
    ("http", "classify", "/classify", {"inputs": "a text"}),
    ("http", "tag", "/tag", {"inputs": "a text"}),
    ("http", "fill_mask", "/fill-mask", {"inputs": "[MASK] a text"}),
    ("http", "rerank", "/rerank", {"query": QUERY, "texts": ["a text"]}),
    ("http", "answer", "/answer", {"inputs": {"question": QUERY, "context": "a text"}}),
    ("tei", "classify", "/predict", {"inputs": "a text"}),
    ("openai", "embed", "/v1/embeddings", {"model": "mine", "input": "a text"}),
    ("cohere-v1", "rerank", "/v1/rerank", {"model": "mine", "query": QUERY, "documents": ["a text"]}),
    ("cohere-v2", "rerank", "/v2/rerank", {"model": "mine", "query": QUERY, "documents": ["a text"]}),
]


@pytest.mark.parametrize(("protocol", "task", "path", "body"), BODIES)
def test_every_task_has_its_route_and_body(protocol: str, task: str, path: str, body: dict[str, Any]) -> None:
    """What other APIs are asked is what their own clients send."""
    target = Target(protocol, "host", 1, "mine")
    assert isinstance(target.wire(), HttpWire)
    [message] = messages(target, task, ["a text"])
    head, _, data = message.partition(b"\r\n\r\n")
    assert head.startswith(f"POST {path} HTTP/1.1\r\nHost: host:1\r\n".encode())
    assert json.loads(data) == body


def test_a_chosen_model_stands_in_the_path() -> None:
    """Where the protocol names no model, the path does; where it names one, the path stays."""
    plain, named = (Target(protocol, "host", 1, "mine", in_path=True) for protocol in ("http", "openai"))
    assert plain.path("tag") == "/models/mine/tag"
    assert named.path("embed") == "/v1/embeddings"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_protocol_refuses_the_tasks_that_it_lacks(protocol: str) -> None:
    """A request that cannot be made is refused with the protocols that have the task."""
    for task in set(TASKS) - set(ROUTES[protocol]):
        with pytest.raises(BenchError, match=f"{protocol} does not support the task {task}; use http, .*grpc"):
            messages(Target(protocol, "host", 1, "mine"), task, ["a text"])


def test_a_key_travels_and_is_not_shown() -> None:
    """It stands in the header and in gRPC's metadata, and in nothing that is printed."""
    for protocol in ("http", "grpc"):
        target = Target(protocol, "host", 1, "mine", api_key="my-secret-key")
        assert "my-secret-key" not in repr(target)
        [message] = messages(target, "embed", ["a text"])
        assert b"Bearer my-secret-key" in target.wire().request(message, None)


def test_a_target_survives_its_journey_to_a_generator() -> None:
    """What another process reads from JSON is the same target."""
    target = Target.of("grpcs://host:1", None, "mine", "key", Tls("ca.pem", "cert.pem"))
    assert Target.read(json.loads(json.dumps(dataclasses.asdict(target)))) == target
