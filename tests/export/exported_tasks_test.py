"""From a checkpoint to an answer over HTTP: the exported bundle of another architecture than BERT, served."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tokenizers import Tokenizer

from bertserve.export.cli.export import main
from tests.support.checkpoints import (
    SPECIAL,
    edit_json,
    edit_weights,
    use_fast_tokenizer,
    write_checkpoint,
    write_task_checkpoint,
)
from tests.support.clients import ask, get, post_json
from tests.support.exports import exported
from tests.support.poison import edit_manifest
from tests.support.references import of_transformers
from tests.support.server import Server

if TYPE_CHECKING:
    from pathlib import Path

    import torch

pytestmark = pytest.mark.usefixtures("few_texts_of_pytorch")


def test_an_exported_classifier_answers_as_its_checkpoint(tmp_path: Path) -> None:
    """RoBERTa: a byte-level tokenizer, no segments, positions counted from the padding id, softmax over logits.

    Two of its labels have one name, which is a number: each keeps its score, over v2 in the order of the labels.
    """
    folder = write_task_checkpoint(tmp_path / "small", "roberta", "classify")
    edit_json(folder / "config.json", id2label={"0": 1, "1": "fair", "2": 1}, label2id=None)
    exported(folder, "--precision", "fp32")
    text = "The server's answer, été."
    with Server(tmp_path / "models") as server:
        answers = ask(server, "/predict", inputs=text)
        tensor = {"name": "text", "datatype": "BYTES", "shape": [1, 1], "data": [text]}
        v2 = ask(server, "/v2/models/small/infer", inputs=[tensor])
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    wanted = of_transformers(folder, "ForSequenceClassification", ids, None).logits[0].softmax(-1).tolist()
    ranked = sorted(zip(wanted, ("1", "fair", "1"), strict=True), key=lambda pair: -pair[0])
    assert [answer["label"] for answer in answers] == [label for _, label in ranked]
    assert [answer["score"] for answer in answers] == pytest.approx([score for score, _ in ranked], abs=1e-4)
    outputs = {output["name"]: output["data"] for output in v2["outputs"]}
    assert outputs["scores"] == pytest.approx(wanted, abs=1e-4)
    assert outputs["label"] == [ranked[0][1]]


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "off"), [("fp32", 1e-4), ("int8", 0.5)])
def test_an_exported_encoder_answers_a_vector_for_each_token(tmp_path: Path, precision: str, off: float) -> None:
    """The same checkpoint for `embed_tokens`: RoBERTa's last hidden state, in fp32 and in INT8."""
    folder = write_task_checkpoint(tmp_path / "small", "roberta", "embed")
    exported(folder, "--task", "embed_tokens", "--precision", precision, "--allow", "cosine_min")
    text = "The server's answer, été."
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    wanted = of_transformers(folder, "Model", ids, None).last_hidden_state[0].numpy()
    with Server(tmp_path / "models", "--precision", precision) as server:
        np.testing.assert_allclose(ask(server, "/embed_all", inputs=text)[0], wanted, atol=off)
        assert "/embed_all" in get(server.http, "/openapi.json").json()["paths"]


@pytest.mark.slow
def test_int8_that_answers_otherwise_too_often_is_served_where_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of questions alone: else fp32 is, and a line says what that costs; a bundle of before goes on, with a warning."""
    folder = write_task_checkpoint(tmp_path / "small", "bert", "answer")
    edit_weights(folder, coarsen_quantisation)
    models = tmp_path / "models"
    words = [str(folder), "--out", str(models), "--precision", "fp32", "--precision", "int8"]
    said = r"gives PyTorch's answer to \d\d\.\d% of the 32 texts of its proof, less than 92%; fp32 takes \d+\.\d times"

    def served(*options: str) -> tuple[str, str]:
        with Server(models, "--engine", "ort-cpu", *options) as server:
            (line,) = [each for each in server.log.splitlines() if "PyTorch's answer" in each] or [""]
            return get(server.http, "/info").json()["model_dtype"], line

    assert main(words) == 0
    assert re.search(rf"model\.int8\.onnx: served by --precision int8 only: {said}", capsys.readouterr().out)
    precision, line = served()
    assert precision == "float32"
    assert re.search(rf" INFO .* small: serving fp32: model\.int8\.onnx {said}.*; set --precision int8 to serve", line)
    assert served("--precision", "int8") == ("int8", "")
    edit_manifest(models / "small" / "1", lambda manifest: [each.pop("reserved") for each in manifest["artifacts"]])
    precision, line = served()
    assert precision == "int8"
    assert re.search(r" WARNING .* small: serving model\.int8\.onnx: it gives .*; .* or set --precision fp32", line)
    assert main([*words, "--allow", "int8.agreement"]) == 0
    assert served() == ("int8", "")


def coarsen_quantisation(tensors: dict[str, torch.Tensor]) -> None:
    """Gives a word that no text holds a vector which takes most of the table's 8 bits from the others."""
    tensors["bert.embeddings.word_embeddings.weight"][SPECIAL.index("[MASK]")] = 12.0


def test_a_regression_and_a_default_prompt_are_served_as_the_checkpoint_means_them(tmp_path: Path) -> None:
    """Values come raw and under their name; a text gets the default prompt, as Sentence Transformers gives it."""
    scores = write_task_checkpoint(tmp_path / "scores", "bert", "rerank")
    edit_json(scores / "config.json", sentence_transformers=None)
    edit_json(scores / "config.json", problem_type="regression")
    prompted = write_checkpoint(tmp_path / "prompted")
    use_fast_tokenizer(prompted)
    prompts = {"query": "to the server ", "bare": ""}
    edit_json(prompted / "config_sentence_transformers.json", prompts=prompts, default_prompt_name="query")
    for folder in (scores, prompted):
        exported(folder, "--precision", "fp32")
    text = "a text that is not in it"
    ids = Tokenizer.from_file(str(scores / "tokenizer.json"))
    ids.no_truncation()
    value = of_transformers(scores, "ForSequenceClassification", ids.encode(text).ids, None)
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415  slow to import, and for this test alone

    wanted = SentenceTransformer(str(prompted), device="cpu").encode([text], normalize_embeddings=False)[0]
    with Server(tmp_path / "models") as server:
        answers = ask(server, "/predict", inputs=text)
        info = get(server.http, "/models/scores/info").json()
        bodies: list[dict[str, object]] = [
            {"inputs": text},
            {"inputs": prompts["query"] + text, "prompt_name": "bare"},
            {"inputs": text, "prompt_name": "bare"},
            {"inputs": ids.encode(text).ids},
        ]
        vectors = [np.array(ask(server, "/embed", **body)[0], np.float32) for body in bodies]
    assert answers == [{"label": "relevance", "score": pytest.approx(value.logits.item(), abs=1e-4)}]
    assert info["model_type"]["classifier"]["problem_type"] == "regression"
    for vector in vectors[:2]:
        np.testing.assert_allclose(vector, wanted, atol=1e-5)
    # Without the prompt, asked for by name or by sending token ids, the vector is another one.
    np.testing.assert_allclose(vectors[2], vectors[3], atol=1e-5)
    assert np.dot(vectors[2], wanted) < 0.999


def test_vectors_and_scores_are_those_of_sentence_transformers(tmp_path: Path) -> None:
    """A folder without Normalize and a cross-encoder with Identity, unless a request asks for something else."""
    from sentence_transformers import CrossEncoder, SentenceTransformer  # noqa: PLC0415  slow to import
    from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Transformer  # noqa: PLC0415  likewise

    encoder, vectors = write_checkpoint(tmp_path / "encoder", pooling=None), tmp_path / "vectors"
    scores = write_task_checkpoint(tmp_path / "scores", "bert", "rerank")
    edit_json(scores / "config.json", sentence_transformers={"activation_fn": "torch.nn.modules.linear.Identity"})
    for folder in (encoder, scores):
        use_fast_tokenizer(folder, model_input_names=["input_ids", "token_type_ids", "attention_mask"])
    modules = [Transformer(str(encoder)), Pooling(32, ["mean", "max"]), Dense(64, 24)]
    model = SentenceTransformer(modules=modules, device="cpu", similarity_fn_name="dot")
    model.save(str(vectors), create_model_card=False)
    edit_json(vectors / "config.json", matryoshka_dimensions=[8, 16])
    for folder in (vectors, scores):
        exported(folder, "--precision", "fp32")
    text, pair = "the text", ("a server", "that is not in it")
    wanted, relevance = model.encode(text), CrossEncoder(str(scores), device="cpu").predict(pair)
    with Server(tmp_path / "models") as server:
        np.testing.assert_allclose(ask(server, "/embed", inputs=text)[0], wanted, atol=1e-5)
        np.testing.assert_allclose(ask(server, "/v1/embeddings", input=text)["data"][0]["embedding"], wanted, atol=1e-5)
        cut = wanted[:8] / np.linalg.norm(wanted[:8])
        np.testing.assert_allclose(ask(server, "/embed", inputs=text, normalize=True, dimensions=8)[0], cut, atol=1e-5)
        assert post_json(server.http, "/embed", {"inputs": text, "dimensions": 12}).status == 422
        assert ask(server, "/similarity", inputs={"source_sentence": text, "sentences": [text]}) == [
            pytest.approx(1, abs=1e-5)
        ]
        for raw, score in ((None, relevance), (True, relevance), (False, 1 / (1 + np.exp(-relevance)))):
            ranks = ask(server, "/rerank", query=pair[0], texts=[pair[1]], raw_scores=raw)
            assert ranks == [{"index": 0, "score": pytest.approx(score, abs=1e-5)}]
        config = get(server.http, "/v2/models/vectors/config").json()
    assert config["parameters"]["similarity"] == {"string_value": "dot"}
    assert config["parameters"]["matryoshka_dimensions"] == {"string_value": "8, 16"}
    assert config["output"][0]["dims"] == [24]
