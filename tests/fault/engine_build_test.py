"""A node that builds its own TensorRT engine while it serves: real servers and builds, for a simulated GPU."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from serving.errors import EngineFailed
from serving.models.bundle import open_bundle
from serving.models.node_cache import open_entry
from serving.rollout.engine_build import EngineBuilder
from serving.rollout.upgrade import BUILDING
from tests.support.asking import asking, wait_for_more
from tests.support.clients import get, metric, post_json
from tests.support.models import ROOT, cache_key, kept
from tests.support.poison import edit_manifest, sign
from tests.support.server import Server, is_running
from tests.support.simulated_gpus import environment
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.asking import Asker
    from tests.support.clients import HttpReply

MACHINE = {"gpus": [{"name": "Tesla T4", "capability": [7, 5], "memory": 16 << 30}], "missing": ["tensorrt"]}
"""With TensorRT for RTX alone, which builds without a GPU: the builder is the real one."""
BODY = b'{"inputs": ["the server", "a text of it"]}'
ENGINE = "native.sm75.fp16.engine"
BUILD_LIMIT_S = 60.0


def export(folder: Path, seed: int = 0) -> None:
    # PyTorch is slow to import, and nothing else here needs it.
    from export.cli.export import main  # noqa: PLC0415
    from tests.support.checkpoints import write_checkpoint  # noqa: PLC0415

    checkpoint = write_checkpoint(folder / "checkpoint" / "small", layers=1, seed=seed)
    words = ["--out", str(folder / "models"), "--precision", "fp32", "--tensorrt", "graph"]
    assert main([str(checkpoint), *words]) == 0


@pytest.fixture(scope="module")
def exported() -> Path:
    """A repository with a small model that runs on a CPU and brings what an engine is built of."""
    own, checkpoints = Path(__file__), ROOT / "tests" / "support" / "checkpoints.py"
    return kept(f"buildable-{cache_key(own, checkpoints)}", export) / "models"


@pytest.fixture
def models(exported: Path, tmp_path: Path) -> Path:
    return shutil.copytree(exported, tmp_path / "models")


def add_version(models: Path, version: int) -> Path:
    """The first version once more, under another number."""
    place = shutil.copytree(models / "small" / "1", models / "small" / str(version))
    edit_manifest(place, lambda manifest: manifest.update(version=version))
    return place


def building(models: Path, cache: Path, *options: str) -> Server:
    """A server that builds an engine where it finds none."""
    words = ("--build-engine", "true", "--cache-dir", str(cache), *options)
    return Server(models, *words, env=environment(MACHINE))


def choice(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = get(server.http, "/status").json()["choice"]
    return found


def state(server: Server) -> str:
    return str(get(server.http, "/status").json()["state"])


def wait_tensorrt(server: Server) -> None:
    wait_for(lambda: choice(server)["engine"] == "tensorrt", "the engine that was built", BUILD_LIMIT_S)


def builds(server: Server) -> list[int]:
    """The processes of a build: each is its own session's, so that all of them end together."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes()
                session = int((entry / "stat").read_text().rpartition(")")[2].split()[3])
            except OSError:
                continue
            if session != os.getsid(server.pid) and (b"tensorrt_builder" in words or b"bertserve\0build" in words):
                found.append(int(entry.name))
    return found


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def upgraded(exported: Path, cache: Path) -> Iterator[tuple[Server, Asker[HttpReply]]]:
    """A server with an empty cache that has been asked from its start to its change-over, and on."""
    with building(exported, cache) as server:
        with asking(lambda: post_json(server.http, "/embed", BODY), rest_s=0.005) as [asker]:
            wait_for(lambda: BUILDING in str(choice(server)["rejected"]), "the reason")
            assert (choice(server)["engine"], state(server)) == ("ort-cpu", "degraded")
            assert metric(server, "bertserve_engine_rejected", engine="tensorrt") == 1
            assert BUILDING in get(server.http, "/v2/models/small/config").body.decode()
            wait_tensorrt(server)
            wait_for_more([asker], 4)
        yield server, asker


def test_a_first_start_serves_while_it_builds_and_changes_over(upgraded: tuple[Server, Asker[HttpReply]]) -> None:
    """From degraded on the CPU to ready on the GPU: every request is answered, and with the same vectors."""
    server, asker = upgraded
    assert asker.failure is None
    assert {reply.status for reply in asker.answers} == {200}
    vectors = np.array([reply.json() for reply in asker.answers])
    assert np.allclose(vectors, vectors[0], atol=2e-3)
    assert not np.array_equal(vectors[-1], vectors[0])
    assert state(server) == "ready"
    assert choice(server)["rejected"] == []
    assert get(server.http, "/info").json()["engine"]["cards"][0]["name"] == "Tesla T4"
    assert get(server.http, "/status").json()["models"][0]["precision"] == "fp16"
    assert metric(server, "bertserve_engine_rejected", engine="tensorrt") == 0
    assert metric(server, "bertserve_gpus", state="working") == 1
    # Batches of both engines.
    assert get(server.http, "/v2/models/small/stats").json()["model_stats"][0]["execution_count"] >= len(asker.answers)
    assert f"comparing {ENGINE} with PyTorch" in server.log


def test_what_was_built_is_proven_and_serves_the_next_start(
    upgraded: tuple[Server, Asker[HttpReply]], exported: Path, cache: Path
) -> None:
    """It lies in the node's cache with its proof, and nothing is built again."""
    assert upgraded
    entry = open_entry(cache, open_bundle(exported / "small" / "1"))
    assert entry is not None
    assert [engine.file for engine in entry.derived.engines] == [ENGINE]
    assert ENGINE in [proof.file for proof in entry.derived.proofs]
    with building(exported, cache) as server:
        assert (choice(server)["engine"], state(server)) == ("tensorrt", "ready")
        assert "building a TensorRT engine" not in server.log


def test_an_engine_that_ends_soon_after_gives_way_to_the_one_before(upgraded: tuple[Server, Asker[HttpReply]]) -> None:
    """Nothing is refused after it; state, record and metric are those of the engine that serves again."""
    server, _ = upgraded
    served = get(server.http, "/status").json()["engine"]["name"]
    first, serving = sorted(server.engine_pids(), key=lambda pid: pid == _serving(server))
    os.kill(serving, signal.SIGKILL)
    wait_for(lambda: state(server) == "degraded", "the way back")
    assert choice(server)["engine"] == "ort-cpu"
    assert choice(server)["rejected"][0]["reason"] == "its process exited soon after the swap"
    assert get(server.http, "/status").json()["engine"]["name"] != served
    assert post_json(server.http, "/embed", BODY).status == 200
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: server.engine_pid() not in {None, first}, "another process of it")
    wait_for(lambda: post_json(server.http, "/embed", BODY).status == 200, "an answer")
    assert (choice(server)["engine"], state(server)) == ("ort-cpu", "degraded")


def _serving(server: Server) -> int:
    return max(server.engine_pids())


def test_a_server_that_ends_ends_its_build(models: Path, tmp_path: Path) -> None:
    """At SIGTERM at once, and nothing half-written stays in the cache."""
    with building(models, tmp_path / "cache") as server:
        pids = wait_for(lambda: builds(server), "a build")
        wait_for(lambda: list((tmp_path / "cache").rglob(".staging-*/*")), "something half-written", BUILD_LIMIT_S)
        assert os.sched_getscheduler(pids[0]) == os.SCHED_IDLE
        assert Path(f"/proc/{pids[0]}/oom_score_adj").read_text() == "1000\n"
        assert server.stop() == 0
        wait_for(lambda: not any(map(is_running, pids)), "the build's end")
    assert [path for path in (tmp_path / "cache").rglob("*") if "staging" in path.name or path.name == ENGINE] == []


def test_a_build_that_fails_says_why(models: Path, tmp_path: Path) -> None:
    """With the sentence of the command; a bundle without a graph is one reason."""
    bundle = models / "small" / "1"
    (bundle / "engine.fp16.onnx").unlink()
    edit_manifest(bundle, lambda manifest: manifest["files"].pop(2))
    with pytest.raises(
        EngineFailed, match=r"cannot build a TensorRT engine: bundle small/1: .* export it with --tensorrt graph"
    ) as failed:
        EngineBuilder(tmp_path / "cache").build(bundle)
    assert not failed.value.passing
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_an_engine_that_answers_otherwise_never_serves(models: Path, tmp_path: Path) -> None:
    """The graph is another model's: the server goes on as it is, and says so."""
    bundle = models / "small" / "1"
    export(tmp_path / "other", seed=1)
    shutil.copy(tmp_path / "other" / "models" / "small" / "1" / "engine.fp16.onnx", bundle)
    sign(bundle)
    with building(models, tmp_path / "cache") as server:
        wait_for(lambda: "does not match PyTorch" in json.dumps(choice(server)), "the reason", BUILD_LIMIT_S)
        assert (choice(server)["engine"], state(server)) == ("ort-cpu", "degraded")
        assert BUILDING not in json.dumps(choice(server))
        assert str(tmp_path) not in json.dumps(choice(server))
        assert choice(server)["rejected"][0]["reason"].endswith("; the next start retries")
        assert post_json(server.http, "/embed", BODY).status == 200
    assert not list((tmp_path / "cache").rglob(ENGINE))


@pytest.mark.slow
def test_a_version_that_comes_meanwhile_is_built_for_too(models: Path, tmp_path: Path) -> None:
    """One swapped to while the first is built, and one after the change-over; the old build changes nothing."""
    with building(models, tmp_path / "cache", "--model-control", "true", "--keep-version-s", "0") as server:
        wait_for(lambda: builds(server), "a build")
        add_version(models, 2)
        assert post_json(server.http, "/v2/repository/models/small/load", b"{}").status == 200
        assert choice(server)["engine"] == "ort-cpu"
        wait_tensorrt(server)
        assert get(server.http, "/status").json()["models"][0]["version"] == "2"
        assert state(server) == "ready"
        add_version(models, 3)
        assert post_json(server.http, "/v2/repository/models/small/load", b"{}").status == 200
        status = get(server.http, "/status").json()
        assert (status["models"][0]["version"], status["choice"]["engine"]) == ("3", "tensorrt")
        assert {path.parts[-3] for path in (tmp_path / "cache").rglob(ENGINE)} == {"1", "2", "3"}
