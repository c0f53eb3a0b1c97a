"""A task is one module: one that nothing else knows of is exported, proven, served, run in bulk and loaded."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
import transformers

from bertserve.serving.tasks import TASKS
from tests.support.checkpoints import write_checkpoint
from tests.support.clients import get, post_json
from tests.support.server import ROOT, Server

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

TEXTS = ["the server", "it is a text and not on the server", "a"]
V2 = "/v2/models/small/infer"
SCENARIO = "rate = 40\nlengths = { 8 = 1, 16 = 1 }\n[[phases]]\nseconds = 0.5\nfrom = 1\nto = 1\n"
IN_BULK = """
import sys
from bertserve.serving.bulk.predictor import Model, Predictor
model = Model(sys.argv[1], "norm", threads=1, options={"factor": 2})
answers = [one.answer for one in Predictor(model).predict(sys.argv[2:])]
print(model.column.name, *model.column.array(answers).to_pylist())
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """In which each process imports the task; this one does not."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text("import tests.support.made_up_task\n")
    return {"PYTHONPATH": os.pathsep.join(map(str, (folder, ROOT)))}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "small")


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[float]:
    model = transformers.AutoModel.from_pretrained(checkpoint).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    with torch.inference_mode():
        return [float(model(**tokenizer(t, return_tensors="pt")).last_hidden_state[0].mean(0).norm()) for t in TEXTS]


@pytest.fixture(scope="module")
def models(checkpoint: Path, expected: Sequence[float], environment: dict[str, str]) -> Path:
    folder, labelled = checkpoint.with_name("models"), checkpoint.with_name("labelled.csv")
    with labelled.open("w") as file:
        csv.writer(file).writerows([text, "", value] for text, value in zip(TEXTS, expected, strict=True))
    words = ("--out", str(folder), "--task", "norm", "--precision", "fp32", "--reference", str(labelled))
    run(environment, "export", str(checkpoint), *words)
    return folder


def run(environment: dict[str, str], *words: str, program: Sequence[str] = ("-m", "bertserve")) -> str:
    command, variables = [sys.executable, *program, *words], os.environ | environment
    ended = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr + ended.stdout
    return ended.stdout


def test_it_is_exported_and_proven(models: Path, environment: dict[str, str]) -> None:
    """With its own head, measure, metric and reference library; `verify` compares it once more."""
    manifest = json.loads((models / "small" / "1" / "manifest.json").read_text())
    (artifact,) = manifest["artifacts"]
    (output,) = manifest["outputs"]
    assert (manifest["task"], output["name"], output["shape"]) == ("norm", "length", [-1, 1])
    assert artifact["parity"]["agreement"] == 1
    assert artifact["end_to_end"]["texts"] > 10
    (accuracy,) = artifact["accuracy"]
    assert (accuracy["metric"], round(accuracy["artifact"])) == ("spearman", 100)
    assert "fp32" in run(environment, "verify", str(models / "small" / "1"))


def test_it_is_served(models: Path, environment: dict[str, str], expected: list[float]) -> None:
    """On routes of its own, on the Open Inference Protocol, and in the API's document."""
    with Server(models, env=environment, cold=True) as server:
        for path in ("/norm", "/models/small/norm", "/"):
            reply = post_json(server.http, path, json.dumps({"inputs": TEXTS}).encode())
            assert reply.json() == pytest.approx(expected, rel=1e-4)
        assert post_json(server.http, "/norm", b'{"inputs": "a", "factor": 3}').json() == pytest.approx(
            [3 * expected[2]], rel=1e-4
        )
        assert post_json(server.http, "/embed", b'{"inputs": "a"}').status == 424
        tensor = {"name": "text", "datatype": "BYTES", "shape": [len(TEXTS), 1], "data": TEXTS}
        (output,) = post_json(server.http, V2, json.dumps({"inputs": [tensor]}).encode()).json()["outputs"]
        assert (output["name"], output["shape"]) == ("norm", [len(TEXTS)])
        assert output["data"] == pytest.approx(expected, rel=1e-4)
        operation = get(server.http, "/openapi.json").json()["paths"]["/norm"]["post"]
        assert operation["summary"] == "The lengths of texts' mean vectors."
        assert operation["responses"]["200"]["content"]["application/json"]["example"] == [2.5, 2.5]


@pytest.mark.slow
def test_it_is_measured(models: Path, environment: dict[str, str], tmp_path: Path) -> None:
    """By `bertserve load`, over both protocols."""
    scenario = tmp_path / "short.toml"
    scenario.write_text(SCENARIO)
    with Server(models, env=environment, cold=True) as server:
        words = ("--target", f"http://{server.http}", "--model", "small", "--scenario", str(scenario))
        for protocol in ("http", "v2"):
            run(environment, "load", *words, "--protocol", protocol, "--slo", "errors=0%", "--out", str(tmp_path))
            assert json.loads((tmp_path / "report.json").read_text())["facts"]["task"] == "norm"


def test_it_runs_in_bulk(models: Path, environment: dict[str, str], expected: list[float]) -> None:
    """With its options, in a column of its own."""
    name, *numbers = run(environment, "-c", IN_BULK, str(models), *TEXTS, program=()).split()
    assert name == "norm"
    assert list(map(float, numbers)) == pytest.approx([2 * value for value in expected], rel=1e-4)


def test_it_is_known_to_those_alone_that_import_it() -> None:
    """Nothing in the tree names it."""
    assert "norm" not in TASKS
