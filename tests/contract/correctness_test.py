"""Row 52 of the failure modes: no answer goes to the wrong request, and none gets lost, however many ask at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support.clients import BOTH, Grpc, Tei, metric
from tests.support.expected import cosines, fake_answers
from tests.support.texts import mixed

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from tests.support.server import Server

FULL = 10_000
CONNECTIONS = 64
SAME_COSINE = 0.999


def over_http(server: Server, texts: list[str]) -> list[NDArray[np.float32]]:
    """Each text as a request of its own, over 64 keep-alive connections at once."""
    vectors: list[Any] = [None] * len(texts)

    def ask(first: int) -> None:
        with Tei(server) as client:
            for number in range(first, len(texts), CONNECTIONS):
                (vectors[number],) = client.embed([texts[number]], timeout_ms=60_000).vectors

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        list(pool.map(ask, range(CONNECTIONS)))
    return vectors


def over_grpc(server: Server, texts: list[str]) -> list[NDArray[np.float32]]:
    """Each text as a call of its own, 64 at once on one channel."""
    with Grpc(server) as client, ThreadPoolExecutor(CONNECTIONS) as pool:
        return list(pool.map(lambda text: client.embed([text], timeout_ms=60_000).vectors[0], texts))


WIRES = {"http": over_http, "grpc": over_grpc}


@pytest.mark.parametrize(
    ("wire", "count"),
    [
        ("http", FULL // 20),
        pytest.param("http", FULL, marks=pytest.mark.long),
        ("grpc", FULL // 20),
        pytest.param("grpc", FULL, marks=pytest.mark.long),
    ],
)
def test_row_52_every_answer_belongs_to_its_request(fake_server: Server, models: Path, wire: str, count: int) -> None:
    """Of many concurrent requests of mixed lengths, each gets the vector of its own text: none swapped, none lost."""
    texts = mixed(count)
    before = metric(fake_server, "bertserve_requests_total", reason="ok")
    vectors = WIRES[wire](fake_server, texts)
    np.testing.assert_allclose(vectors, fake_answers(models, texts), atol=1e-5)
    assert metric(fake_server, "bertserve_requests_total", reason="ok") == before + count
    assert metric(fake_server, "bertserve_admitted_tokens") == 0


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_row_52_on_the_real_engine(request: pytest.FixtureRequest, precision: str) -> None:
    """The same on the model itself, against the vectors that it answers to each text alone."""
    server = request.getfixturevalue(f"{precision}_server")
    texts = [text[:200] for text in mixed(20, seed=2)]
    with BOTH[0](server) as client:
        alone = np.concatenate([client.embed([text]).vectors for text in texts])
    for ask in WIRES.values():
        asked = texts * 2
        assert cosines(np.stack(ask(server, asked)), np.tile(alone, (2, 1))).min() >= SAME_COSINE


def test_row_52_a_batch_keeps_its_order(fake_server: Server, models: Path) -> None:
    """The vectors of one request stand in the order of its texts, whatever their lengths."""
    texts = mixed(32, seed=3)
    for transport in BOTH:
        with transport(fake_server) as client:
            np.testing.assert_allclose(client.embed(texts).vectors, fake_answers(models, texts), atol=1e-5)
