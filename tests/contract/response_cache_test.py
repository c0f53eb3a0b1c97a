"""A server with a cache of answers, beside one without."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.support.clients import BOTH, Grpc, OpenAiFloat, Tei, V2Json, get, metric, metrics, post_json
from tests.support.console import ask, visit
from tests.support.expected import fake_answers
from tests.support.models import NAME
from tests.support.server import FAKE, Server
from tests.support.texts import mixed
from tests.support.versions import CONTROLLED, Readers, Shelf, load

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.browser import Page

CACHE = ("--response-cache-mb", "8")


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[Server]:
    """A server with a cache of 8 MiB."""
    with Server(models, *FAKE, *CACHE) as running:
        yield running


def statistics(server: Server) -> dict[str, dict[str, int]]:
    """The stages of v2's statistics."""
    (model,) = get(server.http, f"/v2/models/{NAME}/stats").json()["model_stats"]
    return dict(model["inference_stats"])


def test_an_answer_is_the_same_the_second_time_over_every_protocol(server: Server, models: Path) -> None:
    """Whichever protocol asked first, and whatever the request asks of the vector."""
    texts = mixed(12, seed=7)
    expected = fake_answers(models, texts)
    for transport in (Tei, Grpc, V2Json, OpenAiFloat, *BOTH):
        with transport(server) as client:
            np.testing.assert_allclose(client.embed(texts).vectors, expected, atol=1e-5)
    body = b'{"inputs": "short vectors", "dimensions": 8}'
    first, second = (post_json(server.http, "/embed", body) for _ in range(2))
    assert first.body == second.body
    assert ("x-cache" in first.headers, second.headers["x-cache"]) == (False, "hit")
    whole = post_json(server.http, "/embed", b'{"inputs": "short vectors"}')
    assert whole.headers["x-cache"] == "hit"
    assert len(whole.json()[0]) > 8


def test_hits_are_counted(server: Server) -> None:
    """By texts in our metrics, by requests in v2's statistics, which count their stages without them."""
    body = b'{"inputs": ["counted", "and counted"]}'
    before, stages = metrics(server), statistics(server)
    for _ in range(3):
        post_json(server.http, "/embed", body)
    after, later = metrics(server), statistics(server)
    name = "bertserve_cache_texts_total"
    counted = {kind: metric(server, name, result=kind) for kind in ("hit", "shared", "miss")}
    assert sum(counted.values()) >= 6
    grown = {key: after[key] - before.get(key, 0) for key in after if key.startswith(name)}
    assert sorted(grown.values()) == [0, 2, 4]
    counts = {stage: later[stage]["count"] - stages[stage]["count"] for stage in later}
    assert (counts["success"], counts["cache_hit"], counts["cache_miss"]) == (3, 2, 1)
    assert (counts["queue"], counts["compute_infer"]) == (1, 1)


def test_hits_are_told_over_grpc(server: Server) -> None:
    """In the call's trailers."""
    with Grpc(server) as client:
        request = client.request(["told over gRPC"])
        trailers = [dict(client.infer.with_call(request)[1].trailing_metadata()) for _ in range(2)]
    assert [each.get("bertserve-cache") for each in trailers] == [None, "hit"]


def test_the_console_tells_of_hits(server: Server, page: Page) -> None:
    """Below the stages, of which none took time in an engine."""
    visit(page, server)
    for was_cached in (False, True):
        ask(page, NAME, texts="asked in the console")
        shown = page.run("document.getElementById('timing').innerText")
        assert ("from the answer cache" in shown) is was_cached


def test_without_a_cache_every_text_is_computed(fake_server: Server) -> None:
    """That is the default."""
    for _ in range(2):
        assert "x-cache" not in post_json(fake_server.http, "/embed", b'{"inputs": "twice"}').headers
    assert metric(fake_server, "bertserve_cache_texts_total", result="hit") == 0
    assert statistics(fake_server)["cache_miss"]["count"] == 0


def test_a_swap_under_load_leaves_no_answer_of_the_version_before(models: Path, tmp_path: Path) -> None:
    """Each request is answered by one version whole, and those after the load call's reply by the new one."""
    shelf = Shelf(models, tmp_path)
    engine = ("--engine", "ort-cpu", "--precision", "fp32", "--default-timeout-ms", "30000")
    with Server(shelf.root, *engine, *CONTROLLED, *CACHE) as server:
        with Readers(server, shelf, Tei, V2Json, Grpc) as readers:
            for _ in range(2):
                version = shelf.add()
                assert load(server).status == 200
                seen = len(readers.asked)
                readers.wait_for_more()
        readers.assert_nothing_was_lost()
        # Each client had at most one request under way when the reply came.
        assert {one.version for one in readers.asked[seen + 3 :]} == {version}
        assert metric(server, "bertserve_cache_texts_total", result="hit") > len(readers.asked) // 2
