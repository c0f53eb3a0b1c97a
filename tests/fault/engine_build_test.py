"""`bertserve build` before the server starts: real builds and servers, for a simulated GPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.clients import get, post_json
from tests.support.models import ROOT, cache_key, kept
from tests.support.poison import sign
from tests.support.server import FROM_SOURCE, Server
from tests.support.server import environment as variables
from tests.support.simulated_gpus import environment

MACHINE = {"gpus": [{"name": "Tesla T4", "capability": [7, 5], "memory": 16 << 30}], "missing": ["tensorrt"]}
"""With TensorRT for RTX alone, which builds without a GPU: the builder is the real one."""
BODY = b'{"inputs": ["the server", "a text of it"]}'
ENGINE = "native.sm75.fp16.engine"
BUILD_LIMIT_S = 120.0


def export(folder: Path, seed: int = 0) -> None:
    # PyTorch is slow to import, and nothing else here needs it.
    from bertserve.export.cli.export import main  # noqa: PLC0415
    from tests.support.checkpoints import write_checkpoint  # noqa: PLC0415

    checkpoint = write_checkpoint(folder / "checkpoint" / "small", layers=1, seed=seed)
    words = ["--out", str(folder / "models"), "--precision", "fp32", "--tensorrt", "graph"]
    assert main([str(checkpoint), *words]) == 0


@pytest.fixture(scope="module")
def exported() -> Path:
    """A repository with a small model that runs on a CPU and brings what an engine is built of."""
    own, checkpoints = Path(__file__), ROOT / "tests" / "support" / "checkpoints.py"
    return kept(f"buildable-{cache_key(own, checkpoints)}", export) / "models"


def build(bundle: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*FROM_SOURCE, "build", str(bundle), "--cache-dir", str(cache)],
        env=variables(environment(MACHINE)),
        capture_output=True,
        text=True,
        check=False,
        timeout=BUILD_LIMIT_S,
    )


def test_an_engine_that_was_built_serves_the_next_start(exported: Path, tmp_path: Path) -> None:
    """The start before it serves degraded on the CPU, and its log names the command."""
    options, cache = ("--cache-dir", str(tmp_path / "cache")), tmp_path / "cache"
    with Server(exported, *options, env=environment(MACHINE)) as server:
        assert get(server.http, "/status").json()["state"] == "degraded"
        server.wait_logged("build one with `")
        said = server.log.partition("build one with `")[2].partition("`")[0]
        assert said.endswith("build models/small/1 --cache-dir DIR")
    built = build(exported / "small" / "1", cache)
    assert built.returncode == 0, built.stderr
    with Server(exported, *options, env=environment(MACHINE)) as server:
        status = get(server.http, "/status").json()
        assert (status["choice"]["engine"], status["choice"]["rejected"]) == ("tensorrt", [])
        assert (status["state"], status["models"][0]["precision"]) == ("ready", "fp16")
        assert post_json(server.http, "/embed", BODY).status == 200


@pytest.mark.slow
def test_an_engine_that_answers_otherwise_is_not_kept(exported: Path, tmp_path: Path) -> None:
    """The graph is another model's."""
    bundle = shutil.copytree(exported, tmp_path / "models") / "small" / "1"
    export(tmp_path / "other", seed=1)
    shutil.copy(tmp_path / "other" / "models" / "small" / "1" / "engine.fp16.onnx", bundle)
    sign(bundle)
    built = build(bundle, tmp_path / "cache")
    assert built.returncode == 1
    assert "does not match PyTorch" in built.stderr
    assert not list((tmp_path / "cache").rglob(ENGINE))
