from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from export.checkpoint.reader import Checkpoint, open_checkpoint
from export.checkpoint.source import Source, find, safe_name
from export.errors import ExportError
from export.graph import task_model
from tests.support.checkpoints import edit_json, edit_weights, vocabulary, write_checkpoint, write_json

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

POOLING = "1_Pooling/config.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good checkpoint."""
    return write_checkpoint(tmp_path / "small")


def opened(folder: Path, max_length: int | None = None, notices: list[str] | None = None) -> Checkpoint:
    """Opens a folder."""
    return open_checkpoint(find(str(folder)), max_length, ([] if notices is None else notices).append)


def test_a_good_checkpoint_opens(folder: Path) -> None:
    """What a checkpoint says of itself is read: sizes, pooling, special ids, architecture, length."""
    checkpoint = opened(folder)
    assert (checkpoint.hidden_size, checkpoint.layers, checkpoint.heads, checkpoint.max_length) == (32, 2, 4, 64)
    assert checkpoint.sentence.pooling == ("mean",)
    assert checkpoint.sentence.normalize
    assert checkpoint.vocabulary.special_ids == {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
    assert checkpoint.architecture == "BertModel"
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


@pytest.mark.parametrize(
    ("own", "asked", "expected"),
    [(None, None, 64), (20, None, 20), (900, None, 64), (20, 50, 50), (20, 64, 64), (None, 3, 3)],
)
def test_the_maximum_length(folder: Path, own: int | None, asked: int | None, expected: int) -> None:
    """The length asked for wins over max_seq_length, which is held to the model's positions."""
    edit_json(folder / "sentence_bert_config.json", max_seq_length=own)
    assert opened(folder, asked).max_length == expected


def test_the_tokenizers_limit_counts_where_there_is_no_other(folder: Path) -> None:
    """Without max_seq_length the tokenizer's model_max_length is taken."""
    edit_json(folder / "tokenizer_config.json", model_max_length=48)
    assert opened(folder).max_length == 48


@pytest.mark.parametrize("asked", [2, 65])
def test_an_impossible_length_is_refused(folder: Path, asked: int) -> None:
    """A length beyond the model's positions is refused with the lengths that would do."""
    with pytest.raises(ExportError, match=rf"{asked} tokens is not possible.*between 3 and 64"):
        opened(folder, asked)


def test_texts_are_cut_to_the_maximum_length(folder: Path) -> None:
    """Encoding for the comparison cuts texts and pairs to the limit and keeps the segments of pairs."""
    short, long, pair = opened(folder).vocabulary.encode(["a", "the " * 90, ("the " * 40, "of " * 40)], 16)
    assert list(short.ids) == [2, vocabulary()["a"], 3]
    assert short.type_ids is None
    assert len(long.ids) == len(pair.ids) == 16
    assert pair.type_ids is not None
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
    sentence = opened(write_checkpoint(tmp_path / "plain", pooling=None), notices=notices).sentence
    assert (sentence.pooling, sentence.normalize) == (("mean",), False)
    assumed = "the checkpoint has no pooling configuration; mean pooling is used, and vectors are not normalised"
    assert notices == [f"{assumed} unless a request asks"]


def test_prompts_are_read(folder: Path) -> None:
    """Prompts go into the bundle, and which of them is the default; null is the empty text."""
    prompts = {"query": "query: ", "document": None}
    write_json(folder / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": "query"})
    checkpoint = opened(folder)
    assert checkpoint.sentence.prompts == {"query": "query: ", "document": ""}
    assert checkpoint.default_prompt == "query"


PROMPTS: list[tuple[dict[str, object], str]] = [
    ({"prompts": {"query": 1}}, "prompts in config_sentence_transformers.json must be texts by name"),
    ({"prompts": ["query: "]}, "prompts in config_sentence_transformers.json must be texts by name"),
    ({"prompts": {"query": "q: "}, "default_prompt_name": "passage"}, "'passage' .* is none of its prompts .query"),
    ({"default_prompt_name": 7}, r"default_prompt_name 7 .* is none of its prompts \(it has none\)"),
]


@pytest.mark.parametrize(("config", "sentence"), PROMPTS)
def test_prompts_that_cannot_be_followed_are_refused(folder: Path, config: dict[str, object], sentence: str) -> None:
    """A default prompt that is left out or guessed would answer other vectors than the checkpoint's."""
    write_json(folder / "config_sentence_transformers.json", config)
    with pytest.raises(ExportError, match=sentence):
        opened(folder)


def modules(*kinds: str) -> list[dict[str, object]]:
    """A modules.json of these classes, all of them in the folder itself."""
    return [{"idx": i, "name": str(i), "path": "", "type": f"sentence_transformers.x.{k}"} for i, k in enumerate(kinds)]


OTHER_KINDS: list[tuple[str, object, str]] = [
    ("modules.json", modules("MLMTransformer", "SpladePooling"), "this is SPLADE"),
    ("modules.json", modules("Transformer", "Dense", "MultiVectorMask"), "this is ColBERT"),
    ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}, "this is SPLADE"),
    ("config_sentence_transformers.json", {"query_prefix": "[Q]", "document_prefix": "[D]"}, "this is ColBERT"),
    ("artifact.metadata", {"dim": 128}, "this is ColBERT"),
    ("config.json", {"architectures": ["HF_ColBERT"]}, "this is ColBERT"),
    ("config.json", {"architectures": ["BertForMaskedLM"], "_name_or_path": "naver/splade-v2"}, "this is SPLADE"),
]


@pytest.mark.parametrize(("file", "content", "sentence"), OTHER_KINDS)
def test_models_of_other_kinds_are_refused_by_name(folder: Path, file: str, content: object, sentence: str) -> None:
    """SPLADE and ColBERT are neither encoders nor models for masked words, whatever their class says."""
    write_json(folder / file, content)
    with pytest.raises(ExportError, match=f"{sentence} .* cannot be served yet"):
        opened(folder)


def lead_outside(folder: Path) -> None:
    """Points a module at another folder."""
    modules = json.loads((folder / "modules.json").read_text())
    modules[1]["path"] = "../elsewhere"
    write_json(folder / "modules.json", modules)


def other_weights_only(folder: Path) -> None:
    """Leaves a file of another kind only."""
    (folder / "model.safetensors").rename(folder / "model.ckpt")


def extra_token(folder: Path) -> None:
    """Gives the tokenizer an id that the model does not have."""
    document = json.loads((folder / "tokenizer.json").read_text())
    document["model"]["vocab"]["extra"] = len(vocabulary())
    write_json(folder / "tokenizer.json", document)


def no_frame(folder: Path) -> None:
    """Takes the special tokens away from the tokenizer's output."""
    document = json.loads((folder / "tokenizer.json").read_text())
    document["post_processor"] = None
    write_json(folder / "tokenizer.json", document)


REFUSALS: list[tuple[Callable[[Path], object], str]] = [
    (other_weights_only, r"model.safetensors and pytorch_model.bin are missing, and model.ckpt is not read"),
    (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors and pytorch_model.bin are missing"),
    (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
    (lambda folder: (folder / "config.json").write_text("{"), "config.json is not JSON"),
    (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    (lambda folder: write_json(folder / "tokenizer.json", {"model": 1}), "tokenizer.json is not a tokenizer"),
    (extra_token, r"tokenizer.json has ids up to \d+, the model takes ids below"),
    (no_frame, "does not put its cls and sep tokens around a text"),
    (
        lambda folder: edit_json(folder / POOLING, pooling_mode="largest"),
        "pooling_mode 'largest' in config.json cannot",
    ),
    (lead_outside, r"'../elsewhere' leads outside"),
    (lambda folder: edit_json(folder / "config.json", model_type="funnel"), "'funnel'.*supported: bert, distilbert"),
    (
        lambda folder: edit_json(folder / "config.json", architectures=["BertForMultipleChoice"]),
        "BertForMultipleChoice cannot be exported; supported: BertModel",
    ),
    (lambda folder: edit_json(folder / "config.json", hidden_act="mish"), "hidden_act 'mish'.*supported: gelu, "),
    (
        lambda folder: edit_json(folder / "config.json", position_embedding_type="relative_key"),
        "position_embedding_type 'relative_key'.*supported: 'absolute'",
    ),
    (lambda folder: edit_json(folder / "config.json", hidden_size="32"), "hidden_size in config.json must be"),
    (lambda folder: edit_json(folder / POOLING, word_embedding_dimension=64), "vectors of 64.*vectors of 32"),
]


@pytest.mark.parametrize(("spoil", "sentence"), REFUSALS)
def test_what_cannot_be_exported_is_refused(folder: Path, spoil: Callable[[Path], object], sentence: str) -> None:
    """A checkpoint that would be served wrongly or unsafely is refused with what is wrong and what would do."""
    spoil(folder)
    with pytest.raises(ExportError, match=sentence):
        opened(folder)


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    """A change that removes a tensor."""
    return lambda tensors: tensors.__delitem__(name)


WEIGHT_REFUSALS: list[tuple[Callable[[dict[str, torch.Tensor]], None], str]] = [
    (drop("bert.encoder.layer.1.attention.self.query.weight"), "lack 1 of .*layer.1.attention.self.query.weight"),
    (lambda tensors: tensors.update({"bert.adapter.weight": torch.zeros(2)}), "1 tensors that BertModel.*adapter"),
    (
        lambda tensors: tensors.update({"bert.encoder.layer.0.output.dense.bias": torch.zeros(7)}),
        r"output.dense.bias has the shape \[7\], config.json asks for \[32\]",
    ),
    (
        lambda tensors: tensors.update({"bert.encoder.layer.0.output.dense.bias": torch.zeros(32, dtype=torch.int8)}),
        "only weights in floating point",
    ),
]


@pytest.mark.parametrize(("change", "sentence"), WEIGHT_REFUSALS)
def test_weights_that_do_not_fit_are_refused(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], None], sentence: str
) -> None:
    """A tensor that is missing, unknown or misshapen stops the export; nothing is made up at random."""
    edit_weights(folder, change)
    checkpoint = opened(folder)
    with pytest.raises(ExportError, match=sentence):
        task_model.load(checkpoint)


def test_a_truncated_weight_file_is_refused(folder: Path) -> None:
    """A download that broke off gives a sentence."""
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ExportError, match=r"model\.safetensors is damaged"):
        task_model.load(opened(folder))


def test_old_names_half_precision_and_shards_are_read(folder: Path) -> None:
    """Weights in two files, in half precision, with the names of the first BERT, are the same weights."""
    expected = task_model.load(opened(folder)).model.state_dict()
    whole: dict[str, torch.Tensor] = {}
    edit_weights(folder, whole.update)
    (folder / "model.safetensors").unlink()
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor.half()
        for name, tensor in whole.items()
    }
    names = sorted(renamed)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: renamed[name] for name in part}, folder / file)
    index = {name: file for file, part in files.items() for name in part}
    write_json(folder / "model.safetensors.index.json", {"weight_map": index})
    found = task_model.load(opened(folder)).model.state_dict()
    assert all(torch.equal(found[name], tensor.half().float()) for name, tensor in expected.items())


def test_a_shard_that_is_missing_is_named(folder: Path) -> None:
    """An index that lists an absent file is refused, even with pickled weights beside it."""
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    write_json(folder / "model.safetensors.index.json", {"weight_map": {"x": "model-00001.safetensors"}})
    with pytest.raises(ExportError, match=r"model-00001\.safetensors is missing"):
        opened(folder)


@pytest.mark.parametrize(
    ("given", "name"), [("all-MiniLM-L6-v2", "all-MiniLM-L6-v2"), ("my model (2)", "my-model-2"), ("é", "model")]
)
def test_names_are_made_safe(given: str, name: str) -> None:
    """A folder's name becomes one that a model may have."""
    assert safe_name(given) == name


@pytest.mark.parametrize("source", ["./absent", "/absent/folder", "a/b/c"])
def test_a_folder_that_is_not_there_is_no_hub_id(source: str) -> None:
    """A path that leads nowhere is reported as such and never looked up."""
    with pytest.raises(ExportError, match="no such folder"):
        find(source)
