from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import transformers
from tokenizers import Tokenizer

from bertserve.export.checkpoint.source import Source, find, safe_name
from bertserve.export.errors import ExportError
from tests.support.checkpoints import edit_json, use_fast_tokenizer, vocabulary, write_checkpoint, write_json
from tests.support.exports import opened

if TYPE_CHECKING:
    from pathlib import Path

POOLING = "1_Pooling/config.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "small")


def test_a_good_checkpoint_opens(folder: Path) -> None:
    """What a checkpoint says of itself is read: sizes, pooling, special ids, architecture, length."""
    checkpoint = opened(folder)
    encoder = checkpoint.encoder
    assert (encoder.hidden_size, encoder.layers, encoder.size("heads"), checkpoint.max_length) == (32, 2, 4, 64)
    assert checkpoint.sentence.pooling == ("mean",)
    assert checkpoint.sentence.normalize
    assert checkpoint.vocabulary.special_ids == {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
    assert encoder.architecture == "BertModel"
    assert checkpoint.source == Source(folder, "small", "small")


def test_the_tokenizer_loses_its_lengths(folder: Path) -> None:
    """The bundle's tokenizer neither cuts nor pads, whatever the checkpoint's does."""
    assert json.loads((folder / "tokenizer.json").read_text())["truncation"]["max_length"] == 8
    content = opened(folder).vocabulary.content
    document = json.loads(content)
    assert document["truncation"] is None
    assert document["padding"] is None
    tokenizer = Tokenizer.from_str(content.decode())
    assert len(tokenizer.encode("the " * 40).ids) == 42
    assert len(tokenizer.encode("the").ids) == 3


def test_rules_of_a_tokenizers_own_read_texts_apart(folder: Path) -> None:
    """They make Transformers' tokens in a process that ends, in place of the export, where a text takes too long."""
    document = json.loads((folder / "tokenizer.json").read_text())
    own = {"type": "Replace", "pattern": {"Regex": "(19|20)[0-9]{2}|VW(Y+Y+)+Z"}, "content": "server"}
    rules = {"type": "Sequence", "normalizers": [own, document["normalizer"]]}
    write_json(folder / "tokenizer.json", {**document, "normalizer": rules})
    use_fast_tokenizer(folder)
    words = opened(folder).vocabulary
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text in (("In 1984",), ("the server", "2001 " * 99)):
        (ours,) = words.encode([text[0] if len(text) == 1 else text], 64)
        wanted = theirs(*text, truncation=True, max_length=64)
        assert list(ours.ids) == wanted["input_ids"]
        none = [0] * len(ours.ids)
        assert list(ours.type_ids or none) == wanted.get("token_type_ids", none)
    with pytest.raises(ExportError, match=r"tokenizer\.json: the model's tokenizer rules take too much time or memory"):
        words.encode(["VW" + "Y" * 5000], 64)


@pytest.mark.parametrize(
    ("own", "tokenizers", "asked", "expected"),
    [
        (None, 64, None, 64),
        (20, 64, None, 20),
        (900, 64, None, 64),
        (20, 64, 50, 50),
        (20, 64, 64, 64),
        (None, 64, 3, 3),
        (None, 48, None, 48),
    ],
)
def test_the_maximum_length(folder: Path, own: int | None, tokenizers: int, asked: int | None, expected: int) -> None:
    """The length asked for wins over max_seq_length, held to the model's positions; else the tokenizer's counts."""
    edit_json(folder / "sentence_bert_config.json", max_seq_length=own)
    edit_json(folder / "tokenizer_config.json", model_max_length=tokenizers)
    assert opened(folder, max_length=asked).max_length == expected


@pytest.mark.parametrize("asked", [2, 65])
def test_an_impossible_length_is_refused(folder: Path, asked: int) -> None:
    """A length beyond the model's positions is refused with the lengths that would do."""
    with pytest.raises(ExportError, match=rf"must be 3 to 64 tokens .*, not {asked}"):
        opened(folder, max_length=asked)


def test_texts_are_cut_to_the_maximum_length(folder: Path) -> None:
    """Encoding for the comparison cuts texts and pairs to the limit and keeps the segments of pairs."""
    short, long, pair = opened(folder).vocabulary.encode(["a", "the " * 90, ("the " * 40, "of " * 40)], 16)
    assert list(short.ids) == [2, vocabulary()["a"], 3]
    assert short.type_ids is None
    assert len(long.ids) == len(pair.ids) == 16
    assert set(pair.type_ids) == {0, 1}


@pytest.mark.parametrize(
    ("config", "modes"),
    [
        ({"pooling_mode_mean_tokens": True}, ("mean",)),
        ({"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True}, ("cls", "max")),
        ({"pooling_mode": "mean_sqrt_len_tokens"}, ("mean_sqrt_len_tokens",)),
        ({"pooling_mode": "cls", "embedding_dimension": 32}, ("cls",)),
        ({"pooling_mode": ["mean", "lasttoken"], "include_prompt": False}, ("mean", "lasttoken")),
    ],
)
def test_pooling_is_read_from_every_form(folder: Path, config: dict[str, object], modes: tuple[str, ...]) -> None:
    """Both the flags of older Sentence Transformers and the newer single setting are understood."""
    write_json(folder / POOLING, config)
    assert opened(folder).sentence.pooling == modes


def test_mean_pooling_is_assumed_aloud(tmp_path: Path) -> None:
    """A plain checkpoint is pooled by the mean, and the person is told."""
    notices: list[str] = []
    sentence = opened(write_checkpoint(tmp_path / "plain", pooling=None), notice=notices.append).sentence
    assert (sentence.pooling, sentence.normalize) == (("mean",), False)
    assumed = "the checkpoint has no pooling configuration; using mean pooling, with vectors normalized"
    assert notices == [f"{assumed} only on request"]


def test_prompts_are_read(folder: Path) -> None:
    """Prompts go into the bundle, and which of them is the default; null is the empty text."""
    prompts = {"query": "query: ", "document": None}
    write_json(folder / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": "query"})
    checkpoint = opened(folder)
    assert checkpoint.sentence.prompts == {"query": "query: ", "document": ""}
    assert checkpoint.default_prompt == "query"


@pytest.mark.parametrize(
    ("given", "name"), [("all-MiniLM-L6-v2", "all-MiniLM-L6-v2"), ("my model (2)", "my-model-2"), ("é", "model")]
)
def test_names_are_made_safe(given: str, name: str) -> None:
    """A folder's name becomes one that a model may have."""
    assert safe_name(given) == name


@pytest.mark.parametrize("source", ["./absent", "/absent/folder", "a/b/c"])
def test_a_folder_that_is_not_there_is_no_hub_id(source: str) -> None:
    """A path that leads nowhere is reported as such and never looked up."""
    with pytest.raises(ExportError, match="not a folder"):
        find(source)
