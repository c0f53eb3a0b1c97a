"""The numbers: whatever the protocol, a client gets PyTorch's vectors, alone and beside others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.support.clients import BOTH, TRANSPORTS, Tei, post_json
from tests.support.expected import cosines, sentence_vectors, unit, words
from tests.support.models import HIDDEN_SIZE
from tests.support.texts import sample

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from tests.support.clients import Transport
    from tests.support.server import Server

FP32_COSINE = 0.9999
INT8_MEAN_COSINE = 0.99
INT8_COSINE = 0.95
SAME_COSINE = 0.999
MOST_AT_ONCE = 32

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
        parts = [client.embed(texts[at : at + MOST_AT_ONCE]).vectors for at in range(0, len(texts), MOST_AT_ONCE)]
    return np.concatenate(parts)


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest, texts: list[str]) -> dict[str, NDArray[np.float32]]:
    """For each precision, the vectors that an idle server answers to each text by itself."""
    answers = {}
    for precision in ("fp32", "int8"):
        with Tei(request.getfixturevalue(f"{precision}_server")) as client:
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
    """A text's vector does not depend on what other clients ask at the same time."""

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


def test_200_tokens_are_read_whole(fp32_server: Server, models: Path) -> None:
    """A text below the model's length loses nothing."""
    with Tei(fp32_server) as client:
        answer = client.embed([words(models, 200)])
    assert answer.headers["x-truncated-tokens"] == "0"
    assert answer.headers["x-compute-tokens"] == "200"


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
