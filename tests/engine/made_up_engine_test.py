"""An engine is one file: put among the others, everything else knows of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING

import pytest
import torch

from tests.support import made_up_engine
from tests.support.clients import get, metric, post_json
from tests.support.models import ROOT
from tests.support.server import START_LIMIT_S, Server, environment
from tests.support.tasks import tiny_model, write_bundle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TEXT = "the cat sat on the mat"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's own files and one more, with a model to serve."""
    tree = tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / "src" / "bertserve", tree / "bertserve", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(made_up_engine.__file__, tree / "bertserve/serving/engine/kinds/reference.py")
    write_bundle(tree / "models", tiny_model("classify"))
    return tree


@pytest.fixture(scope="module")
def serve(tree: Path) -> Callable[..., Server]:
    def server(*options: str) -> Server:
        program = (sys.executable, "-P", "-m", "bertserve")
        env = {"PYTHONPATH": str(tree)}
        return Server(tree / "models", "--threads", "1", *options, program=program, cwd=tree, env=env)

    return server


@pytest.fixture(scope="module")
def chosen_by_auto(serve: Callable[..., Server]) -> Iterator[Server]:
    """One that was told nothing of an engine."""
    with serve() as server:
        yield server


def test_auto_takes_a_made_up_engine_before_those_of_a_higher_rank(chosen_by_auto: Server) -> None:
    """Metrics and the console's data name it, with its version."""
    status = json.loads(get(chosen_by_auto.metrics, "/status").body)
    assert (status["engine"]["name"], status["engine"]["version"]) == ("reference", version("onnx"))
    assert status["choice"]["engine"] == "reference"
    assert [each["engine"] for each in status["choice"]["rejected"]] == ["tensorrt", "ort-cuda"]
    assert metric(chosen_by_auto, "bertserve_engine_info", engine="reference", version=version("onnx")) == 1
    assert "engine: reference" in chosen_by_auto.log


def test_a_made_up_engine_answers(chosen_by_auto: Server) -> None:
    """As PyTorch does, and a reply says what computed it."""
    reply = post_json(chosen_by_auto.http, "/predict", json.dumps({"inputs": TEXT}).encode())
    assert reply.status == 200
    assert reply.headers["x-compute-type"] == "cpu+reference"
    tiny = tiny_model("classify")
    with torch.inference_mode():
        scores = tiny.model(**tiny.tokenizer(TEXT, return_tensors="pt")).logits.softmax(-1)[0].tolist()
    found = {each["label"]: each["score"] for each in json.loads(reply.body)}
    assert found == pytest.approx(dict(zip(tiny.labels, scores, strict=True)), abs=1e-5)


def test_a_made_up_engine_is_taken_by_its_name_with_settings_of_its_own(serve: Callable[..., Server]) -> None:
    """The engine process has them."""
    with serve("--engine", "reference", "--reference-ms", "40") as server:
        reply = post_json(server.http, "/predict", json.dumps({"inputs": TEXT}).encode())
        computed = re.search(r"compute;dur=([0-9.]+)", reply.headers["server-timing"])
        assert float(computed[1]) >= 40


def test_doctor_and_help_know_a_made_up_engine(tree: Path) -> None:
    """Whether it is installed, and what it is asked for by."""

    def run(*words: str) -> str:
        command = [sys.executable, "-m", "bertserve", *words]
        env = environment({"PYTHONPATH": str(tree), "COLUMNS": "200"})
        done = subprocess.run(
            command, cwd=tree, env=env, capture_output=True, text=True, check=True, timeout=START_LIMIT_S
        )
        return done.stdout

    ports = [word for name in ("http", "grpc", "metrics") for word in (f"--{name}-port", "0")]
    report = json.loads(run("doctor", "--json", "--models", str(tree / "models"), *ports))
    found = {finding["name"]: finding["value"] for finding in report["findings"]}
    assert found["engine reference"] == f"onnx {version('onnx')}, which --engine auto uses"
    assert "which --engine auto uses" not in found["engine ort-cpu"]
    shown = run("serve", "--help")
    assert "{auto,tensorrt,ort-cuda,reference,cpu,openvino,ort-cpu}" in shown
    assert "`reference` is slow." in shown
