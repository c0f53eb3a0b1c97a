"""A model whose tokenizer has a rule of its own that some text makes slow: that text alone pays for it."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from serving.models.manifest import TOKENIZER
from tests.support.clients import get, post_json
from tests.support.models import NAME
from tests.support.poison import edit_manifest, sign, tiny_bundle
from tests.support.server import FAKE, Server

if TYPE_CHECKING:
    from pathlib import Path

OWN = "own"
QUADRATIC = {"type": "Replace", "pattern": {"Regex": " +▁"}, "content": "▁"}
BOMB = json.dumps({"model": OWN, "input": " " * 200_000}).encode()
"""The rule takes minutes on it."""


@pytest.fixture
def server(models: Path, tmp_path: Path) -> Server:
    """A server of two models, of which one has the rule."""
    honest = tiny_bundle(models, tmp_path)
    own = tmp_path / OWN / "1"
    shutil.copytree(honest, own)
    tokenizer = json.loads((own / TOKENIZER).read_bytes())
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [QUADRATIC, tokenizer["normalizer"]]}
    (own / TOKENIZER).write_text(json.dumps(tokenizer), encoding="utf-8")
    edit_manifest(own, lambda manifest: manifest.update(model=OWN))
    sign(own)
    return Server(tmp_path, *FAKE)


def test_a_text_that_hurts_costs_its_own_request(server: Server) -> None:
    """Others are answered meanwhile, the same model's behind it, and SIGTERM ends the server while one runs."""
    with server, ThreadPoolExecutor() as pool:
        slow = pool.submit(post_json, server.http, "/v1/embeddings", BOMB)
        for path in ("/livez", "/readyz") * 5:
            assert get(server.http, path).status == 200
        for text in ("short", "long " * 1000):
            body = json.dumps({"model": NAME, "input": text}).encode()
            assert post_json(server.http, "/v1/embeddings", body).status == 200
        assert not slow.done()
        behind = post_json(server.http, "/v1/embeddings", json.dumps({"model": OWN, "input": "short"}).encode())
        assert (slow.result().status, behind.status) == (504, 200)
        assert "rules for tokens" in slow.result().body.decode()
        assert "Traceback" not in server.log
        ended = pool.submit(post_json, server.http, "/v1/embeddings", BOMB)
        assert server.stop() == 0
        assert ended.exception() is not None or ended.result().status in {503, 504}
