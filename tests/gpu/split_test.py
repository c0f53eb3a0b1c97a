"""A model in two parts on a real GPU: two processes that share the card."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.support.clients import get, post_json
from tests.support.expected import cosines
from tests.support.server import Server, child_pids
from tests.support.skips import excused

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from serving.engine.gpu.discovery import Machine

pytestmark = pytest.mark.gpu

INPUTS = ["What is a T4?", "the server answers", "a " * 40]
COSINE = 0.999


@pytest.fixture(scope="module")
def models(export_demo: Callable[..., Path]) -> Path:
    return export_demo("--split", "2")


@pytest.mark.parametrize(("engine", "precision"), [("ort-cuda", "fp32"), ("ort-cuda", "fp16"), ("tensorrt", "fp16")])
def test_parts_that_share_a_card_answer_as_the_cpu(models: Path, machine: Machine, engine: str, precision: str) -> None:
    """Alone and together; the second part is a process of the engine's."""
    if engine == "tensorrt" and not list(models.rglob(f"*{machine.gpus[0].target}*.engine")):
        pytest.skip(excused(f"TensorRT builds nothing for {machine.gpus[0].target} here"))
    body = json.dumps({"inputs": INPUTS}).encode()
    with Server(models, "--engine", "ort-cpu", "--precision", "fp32") as server:
        expected = np.array(post_json(server.http, "/embed", body).json())
    with Server(models, "--engine", engine, "--precision", precision, "--allow-unproven") as server:
        assert get(server.http, "/status").json()["choice"]["engine"] == engine
        engine_pid = server.engine_pid()
        assert len(child_pids(engine_pid)) == 1
        alone = [post_json(server.http, "/embed", json.dumps({"inputs": text}).encode()).json()[0] for text in INPUTS]
        for found in (np.array(alone), np.array(post_json(server.http, "/embed", body).json())):
            assert cosines(found, expected).min() >= COSINE
