"""From a checkpoint to an answer over HTTP: the exported bundle of another architecture than BERT, served."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import RobertaForSequenceClassification, RobertaModel

from export.cli.export import main
from tests.support.checkpoints import LABELS, write_task_checkpoint
from tests.support.clients import get, post_json
from tests.support.server import Server

if TYPE_CHECKING:
    from pathlib import Path


def test_an_exported_classifier_answers_as_its_checkpoint(tmp_path: Path) -> None:
    """RoBERTa: a byte-level tokenizer, no segments, positions counted from the padding id, softmax over logits."""
    folder = write_task_checkpoint(tmp_path / "small", "roberta", "classify")
    assert main([str(folder), "--out", str(tmp_path / "models"), "--precision", "fp32"]) == 0
    text = "The server's answer, été."
    with Server(tmp_path / "models") as server:
        reply = post_json(server.http, "/predict", json.dumps({"inputs": text}).encode())
    assert reply.status == 200, reply.body
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    model = RobertaForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        wanted = model(torch.tensor([ids])).logits[0].softmax(-1).tolist()
    found = {answer["label"]: answer["score"] for answer in reply.json()}
    assert found == pytest.approx(dict(zip(LABELS["classify"], wanted, strict=True)), abs=1e-4)


def test_an_exported_encoder_answers_a_vector_for_each_token(tmp_path: Path) -> None:
    """The same checkpoint for `embed_tokens`: RoBERTa's last hidden state, in fp32 and in INT8."""
    folder = write_task_checkpoint(tmp_path / "small", "roberta", "embed")
    words = ["--task", "embed_tokens", "--precision", "fp32", "--precision", "int8", "--allow", "cosine_min"]
    assert main([str(folder), "--out", str(tmp_path / "models"), *words]) == 0
    text = "The server's answer, été."
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    with torch.inference_mode():
        wanted = RobertaModel.from_pretrained(folder).eval()(torch.tensor([ids])).last_hidden_state[0].numpy()
    for precision, off in (("fp32", 1e-4), ("int8", 0.5)):
        with Server(tmp_path / "models", "--precision", precision) as server:
            reply = post_json(server.http, "/embed_all", json.dumps({"inputs": text}).encode())
            assert reply.status == 200, reply.body
            np.testing.assert_allclose(reply.json()[0], wanted, atol=off)
            assert "/embed_all" in json.loads(get(server.http, "/openapi.json").body)["paths"]
