"""A round of the comparison with the real server in every server's place."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

import pytest

from loadtest.benchmarks import turns
from loadtest.benchmarks.drive import Workload
from loadtest.benchmarks.peers import closed_loop
from loadtest.benchmarks.peers.who import MANY, ONE, ORT, RAW, Peer, find
from loadtest.benchmarks.server_process import BertServer
from loadtest.errors import BenchError
from loadtest.generator.child import Child
from loadtest.generator.workload import find_bundle, make_texts
from tests.support.models import NAME

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from loadtest.generator.workload import Text

SUBJECTS = (RAW, find(NAME, "bertserve", ORT, "HTTP"), find(NAME, "bertserve", ORT, "gRPC"))
TOKENS = 8


@pytest.fixture(scope="module")
def texts(models: Path) -> dict[int, list[Text]]:
    """A few texts of one length."""
    return {TOKENS: make_texts(find_bundle(models).path, TOKENS, 10)}


@pytest.fixture(scope="module")
def running(models: Path) -> Iterator[tuple[dict[str, Peer], dict[str, Child]]]:
    """A server and the measuring processes."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(BertServer(models, "int8", 1))
        peer = Peer(server, server.http_port, server.grpc_port)
        modules = {
            "fp32": "loadtest.benchmarks.raw_engine",
            "raw": "loadtest.benchmarks.raw_engine",
            "client": "loadtest.generator.client",
        }
        yield {"ours-ort-cpu": peer}, {name: stack.enter_context(Child(module)) for name, module in modules.items()}


@pytest.mark.long
def test_a_round_measures_everybody_and_wakes_who_is_asked(
    running: tuple[dict[str, Peer], dict[str, Child]],
    models: Path,
    texts: dict[int, list[Text]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every subject has a sample at both numbers of connections, though its server sleeps between its turns."""
    monkeypatch.setattr(turns, "_SETTLE_S", 0.05)
    monkeypatch.setattr(closed_loop, "_FROZEN_FROM_PERCENT", -1.0)
    peers, children = running
    measuring = closed_loop.Rounds(SUBJECTS, peers, children)
    try:
        measuring.open(find_bundle(models, "fp32"), find_bundle(models, "int8"), texts, 1)
        samples = measuring.run(TOKENS, 1.0, lambda _: None)
    finally:
        for pid in peers["ours-ort-cpu"].process.pids():
            os.kill(pid, signal.SIGCONT)
    assert samples.keys() == {subject.key(count) for subject in SUBJECTS for count in (ONE, MANY)}
    assert all(sample["requests"] > 0 for sample in samples.values())
    assert all(0.95 < cosine <= 1.00001 for cosine in measuring.likeness.values())


def test_texts_that_repeat_are_asked_for_as_zipf_has_it(models: Path) -> None:
    """The most frequent comes first, and each has the tokens that the model takes."""
    bundle = find_bundle(models)
    workload = Workload.of_repeated(bundle.path / "tokenizer.json", 16, 4, 24, 40)
    assert [kind.weight for kind in workload.kinds[:3]] == [1, 1 / 2, 1 / 3]
    assert len({kind.texts[0] for kind in workload.kinds}) == 40
    assert 4 < min(workload.tokens) < max(workload.tokens) == 16


def test_a_server_with_another_file_is_no_peer(
    running: tuple[dict[str, Peer], dict[str, Child]], models: Path, texts: dict[int, list[Text]]
) -> None:
    """Who computes something else is not compared: here the raw engine has the fp32 file."""
    fp32 = find_bundle(models, "fp32")
    with pytest.raises(BenchError, match="another artifact than the raw engine's"):
        closed_loop.Rounds(SUBJECTS, *running).open(fp32, fp32, texts, 1)
