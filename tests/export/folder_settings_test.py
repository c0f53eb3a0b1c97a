"""Every file of a folder counts: the answers are those of the libraries that users load the same folder with."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import sentence_transformers

from bertserve.export.checkpoint import probes
from bertserve.export.cli.export import main
from bertserve.export.errors import ExportError
from bertserve.serving.bulk.predictor import Model, Predictor
from tests.support.checkpoints import edit_json
from tests.support.clients import post_json
from tests.support.exports import opened
from tests.support.folders import search
from tests.support.folders.grammar import SAVED, TOKENIZER
from tests.support.folders.writing import LETTERS, write
from tests.support.server import Server

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from bertserve.export.checkpoint.vocabulary import Vocabulary
    from tests.support.folders.grammar import Draw

EMBED: Draw = {"family": "bert", "task": "embed"}
RERANK: Draw = {"family": "bert", "task": "rerank"}
LEFT = {f"{TOKENIZER} truncation_side": "left"}
KEPT, LOWER = {f"{TOKENIZER} do_lower_case": "False"}, {f"{TOKENIZER} do_lower_case": "True"}
CASED = {f"{SAVED} do_lower_case": "False"}
TRAINED = {f"{SAVED} truncation": "8", f"{SAVED} padding": "Fixed 16"}
"""Lengths that tokenizer.json brings along from training."""
SENTENCES_LOWER = {"do_lower_case of sentences": "True"}

FIELDS: dict[str, Draw] = {
    "the-beginning-is-cut": EMBED | LEFT,
    "tokenizer-json-cuts-the-beginning": EMBED | {f"{SAVED} truncation": "8 left"},
    "lengths-in-tokenizer-json": EMBED | TRAINED | {f"{TOKENIZER} max_length": "8", f"{TOKENIZER} stride": "4"},
    "case-is-kept": EMBED | KEPT,
    "case-is-not-kept": EMBED | CASED | LOWER,
    "accents-are-kept": EMBED | LOWER | {f"{TOKENIZER} strip_accents": "False"},
    "accents-are-not-kept": EMBED | CASED | KEPT | {f"{TOKENIZER} strip_accents": "True"},
    "chinese-is-not-split": EMBED | {f"{TOKENIZER} tokenize_chinese_chars": "False"},
    "added-tokens-decoder": EMBED | {"added_tokens_decoder": "one more, special"},
    "added-tokens-of-old": EMBED | {"tokenizer files": "old", "added_tokens.json": "one more"},
    "lower-case-of-sentences-alone": EMBED
    | SENTENCES_LOWER
    | KEPT
    | {"sentence config": "sentence_roberta_config.json", "max_seq_length": "12"},
    "no-class": EMBED | KEPT | {"tokenizer_class": "absent"},
    "the-library-class": EMBED | KEPT | {"tokenizer_class": "PreTrainedTokenizerFast"},
    "no-limit": EMBED | {f"{TOKENIZER} model_max_length": str(10**30)},
    "a-blank-before-each-text": EMBED | {"family": "roberta", f"{TOKENIZER} add_prefix_space": "True"},
    "case-of-pieces": EMBED | {"family": "deberta-v2"} | LOWER,
    "accents-of-pieces": EMBED | {"family": "albert", f"{TOKENIZER} keep_accents": "True"} | KEPT,
    "pairs-in-two-segments": RERANK,
    "pairs-without-token-types": RERANK | {f"{TOKENIZER} model_input_names": "['input_ids', 'attention_mask']"},
    "pairs-whose-beginning-is-cut": RERANK | LEFT,
    "pairs-in-an-odd-room": RERANK | {f"{TOKENIZER} model_max_length": "17"},
}


@pytest.mark.usefixtures("probes")
@pytest.mark.parametrize("case", FIELDS)
def test_answers_are_those_of_the_library(case: str) -> None:
    """Whichever file of the folder says how texts become tokens, and where they are cut."""
    assert search.judged(FIELDS[case], 0, fused=False) == search.Verdict("same")


@pytest.mark.usefixtures("probes")
@pytest.mark.parametrize(
    "arguments", [{"processor_kwargs": {"truncation_side": "left"}}, {"tokenizer_args": {"do_lower_case": False}}]
)
def test_arguments_of_sentence_transformers_reach_the_tokenizer(arguments: dict[str, Any]) -> None:
    """By their name of today and by the old one."""

    def change(folder: Path) -> None:
        edit_json(folder / "sentence_bert_config.json", **arguments)

    assert search.judged(EMBED, 0, fused=False, change=change) == search.Verdict("same")


def with_tokenizer(change: Callable[[dict[str, Any]], object]) -> Callable[[Vocabulary], dict[str, Any]]:
    def changed(vocabulary: Vocabulary) -> dict[str, Any]:
        document = json.loads(vocabulary.content)
        change(document)
        return {"content": json.dumps(document).encode()}

    return changed


@pytest.mark.usefixtures("whole_proof")
@pytest.mark.parametrize(
    ("draw", "change", "named"),
    [
        (EMBED, with_tokenizer(lambda made: made["normalizer"].update(lowercase=False)), "tokens differ from those"),
        (
            EMBED,
            with_tokenizer(lambda made: made["post_processor"]["pair"][3]["Sequence"].update(type_id=0)),
            "model_input_names",
        ),
        (EMBED | LEFT, lambda _: {"truncation_side": "right"}, r"truncated to \d+ tokens.*Check truncation_side"),
    ],
    ids=["tokens", "types", "side"],
)
def test_a_difference_names_the_text_and_both_sides(
    tmp_path: Path, draw: Draw, change: Callable[[Vocabulary], dict[str, Any]], named: str
) -> None:
    """Where a bundle's tokenizer would make something else of a text than Transformers, nothing is exported."""
    checkpoint = opened(write(tmp_path / "small", draw, 0))
    other = replace(checkpoint.vocabulary, **change(checkpoint.vocabulary))
    with pytest.raises(ExportError, match=named) as refusal:
        probes.check("checkpoint small", other, checkpoint.encoder.vocab_size, checkpoint.max_length)
    assert "BertTokenizer in Transformers" in str(refusal.value)
    assert " here, " in str(refusal.value)


@pytest.mark.usefixtures("few_texts_of_pytorch")
def test_the_end_that_a_request_names_wins_over_the_folders(tmp_path: Path) -> None:
    """On every protocol that can name one; where a request names none, and in bulk, the folder's own end is cut."""
    folder, long = write(tmp_path / "small", EMBED | LEFT, 0), " ".join(LETTERS * 4)
    assert main([str(folder), "--out", str(tmp_path / "models"), "--precision", "fp32"]) == 0
    theirs = sentence_transformers.SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    own = theirs.encode([long])[0]
    theirs.tokenizer.truncation_side = "right"
    other = theirs.encode([long])[0]
    assert np.abs(own - other).max() > 0.01
    bulk = Predictor(Model(tmp_path / "models", "embed", truncate=True, threads=1))
    (found,) = bulk.predict([long])
    np.testing.assert_allclose(found.answer, own, atol=1e-5)
    text = {"inputs": [long]}
    cohere = {"texts": [long], "model": "small", "input_type": "clustering", "embedding_types": ["float"]}
    asked: list[tuple[str, dict[str, Any], NDArray[np.float32]]] = [
        ("/embed", text, own),
        ("/embed", {**text, "truncation_direction": None}, own),
        ("/embed", {**text, "truncate": True}, own),
        ("/embed", {**text, "truncation_direction": "Left"}, own),
        ("/embed", {**text, "truncation_direction": "Right"}, other),
        ("/", text, own),
        ("/", {**text, "parameters": {"truncation_direction": "right"}}, other),
        ("/v2/embed", cohere, own),
        ("/v2/embed", {**cohere, "truncate": "START"}, own),
        ("/v2/embed", {**cohere, "truncate": "END"}, other),
    ]
    with Server(tmp_path / "models") as server:
        for path, body, wanted in asked:
            reply = post_json(server.http, path, json.dumps(body).encode())
            assert reply.status == 200, reply.body
            vectors = reply.json()["embeddings"]["float"] if path == "/v2/embed" else reply.json()
            np.testing.assert_allclose(vectors[0], wanted, atol=1e-4, err_msg=f"{path} {body}")
