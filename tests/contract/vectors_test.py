"""The numbers: whatever the protocol, a client gets PyTorch's vectors, alone and beside others (row 52)."""

from __future__ import annotations

import csv
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support.clients import BOTH, TRANSPORTS, Grpc, Tei, V2Binary, metric, post_json
from tests.support.expected import cosines, fake_answers, sentence_vectors, unit, words
from tests.support.models import HIDDEN_SIZE
from tests.support.server import MEASURED
from tests.support.skips import SHARED, needs_shared
from tests.support.texts import mixed, sample

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from tests.support.clients import Transport
    from tests.support.server import Server


FP32_COSINE = 0.9999
INT8_MEAN_COSINE = 0.99
INT8_COSINE = 0.95
SAME_COSINE = 0.999
MAX_AT_ONCE = 32

each_transport = pytest.mark.parametrize("transport", TRANSPORTS, ids=lambda kind: kind.name)
each_precision = pytest.mark.parametrize("precision", ["fp32", "int8"])


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Some, two of the longest among them."""
    return sample(16)[3:]


@pytest.fixture(scope="module")
def reference(texts: list[str]) -> NDArray[np.float32]:
    return sentence_vectors(texts)


@pytest.fixture
def server(request: pytest.FixtureRequest, precision: str) -> Server:
    found: Server = request.getfixturevalue(f"{precision}_server")
    return found


def some(texts: list[str], transport: type[Transport]) -> slice:
    """All texts over one way on each wire; every third over the others, which only write numbers differently."""
    return slice(0, len(texts), 1 if transport in BOTH else 3)


def embed(server: Server, transport: type[Transport], texts: list[str]) -> NDArray[np.float32]:
    """The texts' vectors, in requests of at most 32."""
    with transport(server) as client:
        parts = [client.embed(texts[at : at + MAX_AT_ONCE]).vectors for at in range(0, len(texts), MAX_AT_ONCE)]
    return np.concatenate(parts)


@pytest.fixture(scope="module")
def alone(models: Path, shared_server: Callable[..., Server], texts: list[str]) -> dict[str, NDArray[np.float32]]:
    """For each precision, the vectors that an idle server answers to each text by itself."""
    answers = {}
    for precision in ("fp32", "int8"):
        with Tei(shared_server(models, "--precision", precision, *MEASURED)) as client:
            answers[precision] = np.concatenate([client.embed([text]).vectors for text in texts])
    return answers


@each_transport
def test_fp32_vectors_are_pytorchs(
    fp32_server: Server, transport: type[Transport], texts: list[str], reference: NDArray[np.float32]
) -> None:
    """Served in fp32, each text has PyTorch's vector, in a request of several."""
    part = some(texts, transport)
    vectors = embed(fp32_server, transport, texts[part])
    assert vectors.shape == (len(texts[part]), HIDDEN_SIZE)
    assert cosines(vectors, reference[part]).min() >= FP32_COSINE


@each_transport
def test_int8_vectors_are_near_pytorchs(
    int8_server: Server, transport: type[Transport], texts: list[str], reference: NDArray[np.float32]
) -> None:
    """Served in INT8, the vectors stay near PyTorch's, in the mean and in the worst case."""
    part = some(texts, transport)
    near = cosines(embed(int8_server, transport, texts[part]), reference[part])
    assert near.mean() >= INT8_MEAN_COSINE
    assert near.min() >= INT8_COSINE


@each_precision
@each_transport
def test_vectors_have_length_1(server: Server, transport: type[Transport], texts: list[str]) -> None:
    """Vectors are normalised unless a request says otherwise."""
    vectors = embed(server, transport, texts[1:5])  # the longest and three others
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)


@each_precision
def test_alone_and_in_a_request_of_several(
    server: Server, precision: str, texts: list[str], alone: dict[str, NDArray[np.float32]]
) -> None:
    """A text's vector does not depend on what else its request holds."""
    together = embed(server, Tei, texts)
    assert cosines(together, alone[precision]).min() >= SAME_COSINE


@each_precision
def test_alone_and_among_other_clients(
    server: Server, precision: str, texts: list[str], alone: dict[str, NDArray[np.float32]]
) -> None:
    """A text's vector does not depend on what other clients ask at the same time, nor goes to one of them (row 52)."""

    def ask(number: int) -> NDArray[np.float32]:
        return embed(server, BOTH[number % 2], [texts[number]])[0]

    with ThreadPoolExecutor(16) as pool:
        busy = np.stack(list(pool.map(ask, range(len(texts)))))
    assert cosines(busy, alone[precision]).min() >= SAME_COSINE


def test_a_long_text_is_its_beginning(fp32_server: Server, models: Path) -> None:
    """A text that is too long has the vector of the part that fits."""
    long, cut = words(models, 400), words(models, 256)
    vectors = embed(fp32_server, Tei, [long, cut])
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-6)
    assert cosines(vectors[:1], sentence_vectors([long])).min() >= FP32_COSINE


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dimensions", [None, 1, 64, HIDDEN_SIZE])
@pytest.mark.parametrize("count", [1, 3])
def test_dimensions_and_normalize(fp32_server: Server, normalize: bool, dimensions: int | None, count: int) -> None:  # noqa: FBT001
    """`dimensions` keeps the first components, before `normalize` scales what is left to length 1."""
    asked = ["first text", "second text", "third one"][:count]

    def vectors(**options: object) -> NDArray[np.float32]:
        reply = post_json(fp32_server.http, "/embed", {"inputs": asked, **options})
        assert reply.status == 200, reply.body
        return np.array(reply.json(), np.float32)

    expected = vectors(normalize=False)[:, :dimensions]
    if normalize:
        expected = unit(expected)
    np.testing.assert_allclose(vectors(normalize=normalize, dimensions=dimensions), expected, rtol=1e-5, atol=1e-7)


FULL = 10_000
CONNECTIONS = 64


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
        pytest.param("http", FULL, marks=pytest.mark.slow),
        ("grpc", FULL // 20),
        pytest.param("grpc", FULL, marks=pytest.mark.slow),
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


def test_row_52_a_batch_keeps_its_order(fake_server: Server, models: Path) -> None:
    """The vectors of one request stand in the order of its texts, whatever their lengths."""
    texts = mixed(32, seed=3)
    for transport in BOTH:
        with transport(fake_server) as client:
            np.testing.assert_allclose(client.embed(texts).vectors, fake_answers(models, texts), atol=1e-5)


DATA = SHARED / "data" / "stsb-test.csv"
PUBLISHED = 82.0
"""Spearman x 100 of the checkpoint itself."""
FP32_TOLERANCE = 0.1
INT8_LOSS = 0.5
_AT_ONCE = 64


def score(server: Server) -> float:
    """Spearman's rank correlation x 100."""
    from scipy.stats import spearmanr  # noqa: PLC0415  slow to import

    with DATA.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    texts = sorted({text for row in rows for text in row[:2]}, key=len)
    place = {text: number for number, text in enumerate(texts)}
    with V2Binary(server) as client:
        parts = [
            client.embed(texts[at : at + _AT_ONCE], timeout_ms=60_000).vectors for at in range(0, len(texts), _AT_ONCE)
        ]
    vectors = np.concatenate(parts)
    found = [vectors[place[left]] @ vectors[place[right]] for left, right, _ in rows]
    return 100 * float(spearmanr(found, [float(row[2]) for row in rows]).statistic)


needs_data = needs_shared(DATA)


@pytest.mark.slow
@needs_data
@pytest.mark.parametrize(
    ("precision", "least"), [("fp32", PUBLISHED - FP32_TOLERANCE), ("int8", PUBLISHED - INT8_LOSS)]
)
def test_stsb(server: Server, least: float) -> None:
    """Served in fp32 the model scores what its checkpoint scores; in INT8 it loses at most half a point."""
    found = score(server)
    assert found >= least
    assert least < PUBLISHED - FP32_TOLERANCE or found <= PUBLISHED + FP32_TOLERANCE
