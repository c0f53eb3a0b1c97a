"""A normal request to a fake server, asked after every abuse."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.support.clients import Grpc, Tei
from tests.support.expected import fake_answers

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.server import Server
CANARY = ["a normal request", "and one more, somewhat longer than the first"]


def sing(server: Server, models: Path) -> None:
    """Checks that a normal request to a fake server is answered right over HTTP and gRPC."""
    expected = fake_answers(models, CANARY)
    for transport in (Tei, Grpc):
        with transport(server) as client:
            np.testing.assert_allclose(client.embed(CANARY).vectors, expected, atol=1e-5)
