"""The client that asks every peer in its own form, against the real server with the fake engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bertserve.loadtest.generator.client import Clients
from tests.support.expected import cosines, fake_answers
from tests.support.models import HIDDEN_SIZE, NAME

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.server import Server

TEXTS = ["What is a T4?", "Eine Grafikkarte."]


@pytest.mark.parametrize(
    ("form", "endpoint"),
    [("embed", "/embed"), ("v2", f"/v2/models/{NAME}/infer"), ("openai", "/v1/embeddings"), ("grpc", NAME)],
)
def test_the_client_of_the_peers_speaks_as_they_do(fake_server: Server, models: Path, form: str, endpoint: str) -> None:
    """Every form that a peer is asked in reads the vectors, and measures."""
    port = int((fake_server.grpc if form == "grpc" else fake_server.http).rpartition(":")[2])
    clients = Clients()
    clients.open("way", form, port, endpoint, HIDDEN_SIZE, {"8": TEXTS})
    assert cosines(clients.vectors("way", 8, len(TEXTS)), fake_answers(models, TEXTS)).min() > 0.9999
    for connections in (1, 4):
        assert clients.measure("way", connections, 8, 0.0, 0.5)["requests"] > 0
