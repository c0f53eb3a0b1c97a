"""Megatron-LM's BERT, put together from its ranks: the answers are those that the ranks compute together."""

from __future__ import annotations

import io
import random
import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from bertserve.export.checkpoint import unpickle
from bertserve.export.errors import ExportError
from bertserve.export.graph import task_model
from tests.support.checkpoints import write_json
from tests.support.exports import opened
from tests.support.fuzzing import sizes
from tests.support.megatron import (
    POSITIONS,
    class_logits,
    forward,
    rank_weights,
    save,
    training_state,
    word_logits,
    write_megatron,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


RANK = "iter_2000000/mp_rank_00"
FILE = f"{RANK}/model_optim_rng.pt"
TRACKER = "latest_checkpointed_iteration.txt"


@pytest.mark.usefixtures("reader")
def test_a_checkpoint_of_two_ranks_answers_as_they_do(tmp_path: Path) -> None:
    """Its sizes, case and head are told by its own settings."""
    folder = write_megatron(tmp_path / "megatron", 2, 3.0)
    checkpoint = opened(folder)
    encoder = checkpoint.encoder
    assert (checkpoint.task, encoder.family.model_type, encoder.size("heads")) == ("fill_mask", "megatron-bert", 4)
    text = checkpoint.vocabulary.encode(["The server [MASK]"], POSITIONS)[0]
    model = task_model.load(checkpoint)
    models = [rank_weights(rank, 2, "fill_mask") for rank in range(2)]
    expected = word_logits(models, forward(models, 3.0, list(text.ids)))
    (position,) = (index for index, token in enumerate(text.ids) if token == checkpoint.vocabulary.special_ids["mask"])
    best, logits, total = model.answer(text)
    assert np.allclose(logits[0], expected[position][torch.tensor(best[0]).long()].numpy(), atol=1e-4)
    assert np.allclose(total[0], expected[position].logsumexp(0).item(), atol=1e-4)


@pytest.mark.usefixtures("unpickled_here")
@pytest.mark.parametrize("version", [0, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_order_of_heads_and_number_of_ranks_is_put_together(tmp_path: Path, version: float, ranks: int) -> None:
    """Rows, columns, and queries, keys and values as each version has them."""
    checkpoint = opened(write_megatron(tmp_path / "megatron", ranks, version), "embed_tokens")
    text = checkpoint.encode(["a text for the server"])[0]
    models = [rank_weights(rank, ranks, "fill_mask") for rank in range(ranks)]
    (found,) = task_model.load(checkpoint).answer(text)
    assert np.allclose(found, forward(models, version, list(text.ids)).numpy(), atol=1e-4)


@pytest.mark.usefixtures("unpickled_here")
def test_a_classifier_answers_as_the_ranks_do(tmp_path: Path) -> None:
    """With its pooler and as many labels as its head has rows."""
    checkpoint = opened(write_megatron(tmp_path / "megatron", 2, 2.0, "classify"))
    text = checkpoint.encode(["a text for the server"])[0]
    models = [rank_weights(rank, 2, "classify") for rank in range(2)]
    expected = class_logits(models, forward(models, 2.0, list(text.ids)))
    assert (checkpoint.task, len(checkpoint.labels.names)) == ("classify", 3)
    assert np.allclose(task_model.load(checkpoint).answer(text)[0], expected.numpy(), atol=1e-4)


@pytest.mark.usefixtures("unpickled_here")
def test_a_release_without_settings_needs_its_heads_said(tmp_path: Path) -> None:
    """As NVIDIA's first ones are: sizes come from the tensors, the number of heads from a config.json."""
    folder = write_megatron(tmp_path / "megatron", 1, 0)
    (folder / "iter_2000000").rename(folder / "release")
    (folder / TRACKER).write_text("release")
    save({"model": rank_weights(0, 1, "fill_mask")}, folder / "release/mp_rank_00/model_optim_rng.pt")
    with pytest.raises(ExportError, match=r"have no training arguments \(args\); add a config\.json"):
        opened(folder)
    write_json(folder / "config.json", {"num_attention_heads": 4, "layer_norm_eps": 1e-5})
    checkpoint = opened(folder, "embed_tokens")
    text = checkpoint.encode(["a text for the server"])[0]
    expected = forward([rank_weights(0, 1, "fill_mask")], 0, list(text.ids))
    assert np.allclose(task_model.load(checkpoint).answer(text)[0], expected.numpy(), atol=1e-4)


def trained(**settings: object) -> Callable[[Path], None]:
    return lambda folder: save(training_state(0, 2, 3.0, **settings), folder / FILE)


def with_model(changes: Callable[[], dict[str, object]]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        state = training_state(0, 2, 3.0)
        save(state | {"model": state["model"] | changes()}, folder / FILE)

    return spoil


def write(file: str, content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_text(content) and None


def renamed(old: str, new: str) -> Callable[[Path], None]:
    return lambda folder: (folder / old).rename(folder / new) and None


SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "tracker": (write(TRACKER, "../../etc"), r"has '\.\./\.\./etc'; expected an iteration or `release`"),
    "no iteration": (write(TRACKER, "7"), "iter_0000007, which is missing"),
    "a rank is missing": (renamed(RANK, "iter_2000000/gone"), "lacks mp_rank_00"),
    "fewer ranks": (
        lambda folder: shutil.rmtree(folder / "iter_2000000/mp_rank_01"),
        "on 2 tensor-parallel ranks, but 1",
    ),
    "no file": (lambda folder: (folder / FILE).unlink(), r"mp_rank_00 has no model_optim_rng\.pt"),
    "pipeline": (renamed(RANK, "iter_2000000/mp_rank_00_000"), "mp_rank_00_000 is from pipeline-parallel training"),
    "mixed experts": (trained(num_experts=8), "it was trained with num_experts 8"),
    "another norm": (trained(normalization="RMSNorm"), "with normalization 'RMSNorm'; supported: 'LayerNorm'"),
    "version": (lambda folder: save(training_state(0, 2, 9.0), folder / FILE), r"checkpoint_version 9\.0 is not known"),
    "unknown": (
        with_model(lambda: {"adapter": {"weight": torch.ones(2)}}),
        r"it has adapter\.weight, which is not a tensor of",
    ),
    "heads": (trained(num_attention_heads=5), "5 attention heads do not divide into 2 ranks and a width of 32"),
    "no tensor": (with_model(lambda: {"lm_head": {"bias": 3}}), "has int under 'lm_head.bias'"),
    "no model": (lambda folder: save({"a": torch.ones(1)}, folder / FILE), "has no Megatron-LM model"),
    "no bert": (lambda folder: save({"model": {}}, folder / FILE), "not a Megatron-LM BERT"),
    "no vocabulary": (lambda folder: (folder / "vocab.txt").unlink(), r"vocab\.txt is missing"),
}


@pytest.mark.usefixtures("unpickled_here")
@pytest.mark.parametrize("name", SPOILED)
def test_what_cannot_be_put_together_is_named(tmp_path: Path, name: str) -> None:
    """One sentence, before a model is made."""
    folder = write_megatron(tmp_path / "megatron", 2, 3.0)
    spoil, sentence = SPOILED[name]
    spoil(folder)
    with pytest.raises(ExportError, match=sentence):
        opened(folder)


@pytest.mark.slow
def test_case_is_told_by_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the vocabulary looks like; the file is read in a confined process, as this one cannot."""
    monkeypatch.delattr(unpickle, "convert")
    folder = write_megatron(tmp_path / "megatron", 1, 3.0, tokenizer_type="BertWordPieceCase")
    small, large = opened(folder, "embed_tokens").encode(["b", "B"])
    assert small != large


@pytest.mark.usefixtures("unpickled_here")
def test_ranks_of_different_iterations_are_refused(tmp_path: Path) -> None:
    """When their tensors are read."""
    folder = write_megatron(tmp_path / "megatron", 2, 3.0)
    save(training_state(1, 2, 3.0) | {"iteration": 5}, folder / "iter_2000000/mp_rank_01/model_optim_rng.pt")
    with pytest.raises(ExportError, match="mp_rank_01 and mp_rank_00 are not from the same training state"):
        task_model.load(opened(folder))


class Opens:
    """What opens a file when it is unpickled by whoever allows it."""

    def __reduce__(self) -> tuple[object, ...]:
        return open, ("ran", "w")


def test_what_no_training_holds_is_not_run() -> None:
    """Names beside those of the list are refused by name, and nothing stands behind those that are on it."""
    stream = io.BytesIO()
    torch.save({"model": {"a": torch.ones(1)}, "args": Opens()}, stream)
    stream.seek(0)
    answer = unpickle.convert(stream, io.BytesIO(), training=True)
    assert answer == {"wanted": "io.open"}


@sizes(1000)
def test_damaged_files_are_answered_with_a_sentence(tmp_path: Path, examples: int) -> None:
    """Bits that flip and ends that are missing: it is read, or half a sentence says why not; nothing is raised."""
    save(training_state(0, 4, 3.0), tmp_path / "rank.pt")
    content = (tmp_path / "rank.pt").read_bytes()
    whole = unpickle.convert(io.BytesIO(content), io.BytesIO(), training=True)
    rng, refused = random.Random(5), 0
    for _ in range(examples):
        damaged = bytearray(content)
        if rng.random() < 0.3:
            del damaged[rng.randrange(len(damaged)) :]
        else:
            # Where the pickle lies, and what says where the tensors lie.
            for _ in range(3):
                damaged[rng.randrange(6000)] ^= 1 << rng.randrange(8)
        answer = unpickle.convert(io.BytesIO(bytes(damaged)), io.BytesIO(), training=True)
        assert answer == whole or answer.keys() in ({"refused"}, {"wanted"}, {"shapes", "settings"})
        refused += answer != whole
    assert refused
