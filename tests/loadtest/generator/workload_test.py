from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from bertserve.loadtest.errors import BenchError
from bertserve.loadtest.generator.workload import different_texts, find_bundle, make_texts

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def pieces(tmp_path: Path) -> Path:
    """A folder with a tokenizer that cuts words into letters, so that words cost very different amounts."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
    vocabulary = ["[UNK]", "[CLS]", "[SEP]", "the", *letters, *(f"##{letter}" for letter in letters)]
    ids = {word: place for place, word in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))  # noqa: S106  not a secret
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write_manifest(path: Path, precisions: tuple[str, ...]) -> None:
    """Writes as much of a manifest as a load test reads."""
    path.mkdir(parents=True)
    artifacts = [
        {"file": f"model.{p}.onnx", "precision": p, "target": "cpu", "batch_invariant": p == "fp32"} for p in precisions
    ]
    manifest: dict[str, Any] = {
        "model": path.parent.name,
        "version": int(path.name),
        "hidden_size": 384,
        "max_length": 256,
        "inputs": [{"name": "input_ids"}],
        "artifacts": artifacts,
    }
    (path / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("tokens", [8, 32, 128])
@pytest.mark.parametrize("exported", [False, True], ids=["letters", "exported"])
def test_texts_have_exactly_the_tokens_asked_for(pieces: Path, models: Path, tokens: int, *, exported: bool) -> None:
    """Every text has exactly so many tokens, special ones included, and no text comes twice."""
    folder = find_bundle(models).path if exported else pieces
    texts = make_texts(folder, tokens, 40)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert {len(tokenizer.encode(text.text)) for text in texts} == {tokens}
    assert [text.ids for text in texts] == [tokenizer.encode(text.text).ids for text in texts]
    assert len({text.text for text in texts}) == 40


def test_two_runs_measure_the_same_texts(pieces: Path) -> None:
    assert make_texts(pieces, 16, 10) == make_texts(pieces, 16, 10)


def test_a_length_that_no_text_can_have_is_an_error(pieces: Path) -> None:
    """Texts that cannot be made are not replaced by others."""
    with pytest.raises(BenchError, match="only 0 of 5 texts of 2 tokens"):
        make_texts(pieces, 2, 5)


def test_the_newest_version_of_the_first_model_is_taken(tmp_path: Path) -> None:
    """What is measured is what a server over the same repository answers with."""
    for version in ("2", "10"):
        write_manifest(tmp_path / "alpha" / version, ("fp32", "int8"))
    write_manifest(tmp_path / "beta" / "11", ("fp32",))
    (tmp_path / "alpha" / ".staging-11-1").mkdir()
    bundle = find_bundle(tmp_path)
    assert bundle.path == tmp_path / "alpha" / "10"
    assert (bundle.precision, bundle.batch_invariant) == ("int8", False)
    assert bundle.artifact == bundle.path / "model.int8.onnx"


def test_the_precision_can_be_chosen(tmp_path: Path) -> None:
    """A named precision is taken or refused, never replaced."""
    write_manifest(tmp_path / "alpha" / "1", ("fp32",))
    assert find_bundle(tmp_path, "fp32").precision == "fp32"
    assert find_bundle(tmp_path).precision == "fp32"
    with pytest.raises(BenchError, match="no int8 artifact"):
        find_bundle(tmp_path, "int8")


def test_an_empty_repository_says_how_to_fill_it(tmp_path: Path) -> None:
    """A repository without a model, or none at all, ends in a sentence."""
    for repository in (tmp_path, tmp_path / "absent"):
        with pytest.raises(BenchError, match="bertserve export"):
            find_bundle(repository)


def test_different_texts_are_different() -> None:
    """Of lengths at random, equal for equal arguments; more than there are is an error."""
    texts = different_texts(4, 24, 5000)
    assert len(set(texts)) == 5000
    assert {len(text.split()) for text in texts} == set(range(4, 25))
    assert texts == different_texts(4, 24, 5000)
    with pytest.raises(BenchError, match="distinct texts of 4 to 5 words"):
        different_texts(4, 5, 50_000)
