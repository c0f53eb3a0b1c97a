"""Trained checkpoints, from their folder to the reply: the server answers what PyTorch and transformers answer."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers

from bertserve.serving.models.bundle import open_bundle
from tests.support.clients import ask, post_json
from tests.support.console import answered, visit
from tests.support.models import ROOT
from tests.support.pipelines import pipeline_answers
from tests.support.server import Server
from tests.support.skips import SHARED, needs_shared
from tests.support.tasks import TinyModel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.browser import Page

NAMES = ("minilm-sst2", "minilm-squad", "minilm-wnut17")
EXAMPLES = 100
SAME_SCORE = 1e-4

pytestmark = [pytest.mark.slow, needs_shared(SHARED / "models")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of all of them, as `bertserve export` makes them."""
    repository = tmp_path_factory.mktemp("real")
    for name in NAMES:
        command = [sys.executable, "-m", "bertserve", "export", str(SHARED / "models" / name), "--precision", "fp32"]
        subprocess.run([*command, "--out", str(repository)], cwd=ROOT, capture_output=True, check=True)
    command = [sys.executable, "-m", "bertserve", "export", str(SHARED / "models" / NAMES[0]), "--precision", "fp32"]
    command += ["--task", "embed_tokens", "--name", "tokens", "--out", str(repository)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    with Server(repository) as running:
        yield running


LABELLED = {
    "demo": "stsb-test.csv",
    "minilm-sst2": "sst2-test.tsv",
    "minilm-squad": "xquad-heldout.json",
    "minilm-wnut17": "wnut17-test.conll",
}


@pytest.mark.parametrize("name", LABELLED)
def test_int8_keeps_its_limits_on_labelled_text(tmp_path: Path, name: str) -> None:
    """An export that is given labelled text stops at a lost point; INT8 with fixed ranges passes, and is batched."""
    source = name if name == "demo" else str(SHARED / "models" / name)
    command = [sys.executable, "-m", "bertserve", "export", source, "--name", "real", "--out", str(tmp_path)]
    command += ["--precision", "int8", "--precision", "int8-openvino"]
    command += ["--reference", str(SHARED / "data" / LABELLED[name])]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    for artifact in open_bundle(tmp_path / "real" / "1").manifest.artifacts:
        assert artifact.quantisation is not None
        assert artifact.quantisation.activations == "static"
        assert artifact.batch_invariant


def loaded(kind: Any, name: str) -> tuple[Any, Any]:
    """A checkpoint's tokenizer and model in fp32, as transformers reads them."""
    path = SHARED / "models" / name
    model = kind.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return transformers.AutoTokenizer.from_pretrained(path), model.eval()


def test_sentiment(server: Server) -> None:
    """Each sentence of SST-2 gets PyTorch's probabilities."""
    tokenizer, model = loaded(transformers.AutoModelForSequenceClassification, "minilm-sst2")
    lines = (SHARED / "data" / "sst2-test.tsv").read_text(encoding="utf-8").splitlines()
    for line in lines[:EXAMPLES]:
        text = line.split("\t")[0]
        with torch.inference_mode():
            expected = torch.softmax(model(**tokenizer(text, return_tensors="pt")).logits[0], -1).tolist()
        found = {entry["label"]: entry["score"] for entry in ask(server, "/predict", inputs=text)}
        assert [found[name] for name in ("negative", "positive")] == pytest.approx(expected, abs=SAME_SCORE)


def test_vectors_of_tokens(server: Server) -> None:
    """Each sentence of SST-2 gets the last hidden state of the encoder below the head."""
    tokenizer, model = loaded(transformers.AutoModel, "minilm-sst2")
    lines = (SHARED / "data" / "sst2-test.tsv").read_text(encoding="utf-8").splitlines()
    for line in lines[:EXAMPLES]:
        text = line.split("\t")[0]
        with torch.inference_mode():
            expected = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].numpy()
        np.testing.assert_allclose(ask(server, "/embed_all", inputs=text)[0], expected, atol=SAME_SCORE)


def test_entities(server: Server) -> None:
    """Each sentence of WNUT-17 gets the entities of transformers' pipeline, at the same characters."""
    tokenizer, model = loaded(transformers.AutoModelForTokenClassification, "minilm-wnut17")
    pipeline = transformers.TokenClassificationPipeline(model=model, tokenizer=tokenizer)
    blocks = (SHARED / "data" / "wnut17-test.conll").read_text(encoding="utf-8").strip().split("\n\n")
    for block in blocks[:EXAMPLES]:
        text = " ".join(line.split("\t")[0] for line in block.splitlines())
        expected = pipeline(text, aggregation_strategy="first")
        found = ask(server, "/tag", inputs=text)
        keys = ("entity_group", "start", "end")
        assert [[entity[key] for key in keys] for entity in found] == [
            [entity[key] for key in keys] for entity in expected
        ]
        scores = [entity["score"] for entity in expected]
        assert [entity["score"] for entity in found] == pytest.approx(scores, abs=SAME_SCORE)


@pytest.mark.parametrize(
    ("name", "example", "marked", "told"),
    [
        ("minilm-sst2", "Praise", [], "positive, "),
        ("minilm-sst2", "Complaint", [], "negative, "),
        ("minilm-squad", "Apollo 11", ["Michael Collins"], "Michael Collins, "),
        ("minilm-wnut17", "Travel", ["Angela Merkel", "Emmanuel Macron", "Paris", "New York"], "4 entities found"),
    ],
)
def test_the_console_shows_them(
    server: Server, page: Page, name: str, example: str, marked: list[str], told: str
) -> None:
    """Its examples are answered as a reader expects."""
    visit(page, server).fill("#model", name)
    page.run(f"[...document.querySelectorAll('#examples button')].find((one) => one.innerText === '{example}').click()")
    answered(page)
    assert page.text(".summary").startswith(told)
    assert page.run("[...document.querySelectorAll('.text mark')].map((mark) => mark.firstChild.data)") == marked


def test_questions(server: Server) -> None:
    """Each question of XQuAD gets the answer of transformers' pipeline, with its score."""
    tokenizer, model = loaded(transformers.AutoModelForQuestionAnswering, "minilm-squad")
    data = json.loads((SHARED / "data" / "xquad-heldout.json").read_text(encoding="utf-8"))["data"]
    asked = [
        (entry["question"], part["context"]) for item in data for part in item["paragraphs"] for entry in part["qas"]
    ]
    for question, context in asked[:EXAMPLES]:
        (expected,) = pipeline_answers(TinyModel("answer", model, tokenizer), question, context)
        found = ask(server, "/answer", inputs={"question": question, "context": context})
        assert [found[key] for key in ("start", "end", "answer")] == [
            expected[key] for key in ("start", "end", "answer")
        ]
        assert found["score"] == pytest.approx(expected["score"], abs=1e-3)


@pytest.mark.parametrize("overlap", [None, 0, 100])
def test_an_entity_behind_the_models_length_is_found_once(server: Server, overlap: int | None) -> None:
    """In windows, at its offsets in the text, wherever the text is cut."""
    planted, filler = "Yesterday Angela Merkel flew to Toronto . ", "it was cold and we had some more of that . "
    parameters = {"long": "window", "window_overlap": overlap}
    for before in (60, 63, 66, 120):  # of 11 tokens each
        text = filler * before + planted + filler * 30
        message = {"inputs": text, "parameters": parameters}
        reply = post_json(server.http, "/tag", message)
        found = [(text[e["start"] : e["end"]], e["start"] - len(filler) * before) for e in reply.json()]
        assert found == [("Angela Merkel", 10), ("Toronto", 32)]
