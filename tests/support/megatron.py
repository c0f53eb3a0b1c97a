"""BERT as Megatron-LM's training saves it, with random weights, and what Megatron-LM computes with it on its ranks."""

from __future__ import annotations

import argparse
import random
import sys
from contextlib import contextmanager
from enum import Enum
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from tests.support.checkpoints import vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WIDTH, HEADS, LAYERS, POSITIONS, PADDED = 32, 4, 2, 64, 192
"""The vocabulary is padded, so that every rank has as many of its rows."""
EPSILON = 1e-5
ENUMS = "megatron.model.enums"


@contextmanager
def _module(**members: object) -> Iterator[None]:
    """A module of Megatron-LM's, there while something of it is pickled."""
    parents = [".".join(ENUMS.split(".")[:depth]) for depth in (1, 2, 3)]
    sys.modules |= {name: ModuleType(name) for name in parents}
    sys.modules[ENUMS].__dict__.update(members)
    try:
        yield
    finally:
        for name in parents:
            del sys.modules[name]


def rank_weights(rank: int, ranks: int, head: str) -> dict[str, Any]:
    """The model of one rank, as the key `model` holds it: what all ranks share is the same in each."""
    common, own = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2 + rank)

    def whole(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=common) * 0.15

    def part(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=own) * 0.15

    def norm(name: str) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": 1 + whole(WIDTH), f"{name}.bias": whole(WIDTH)}

    encoder: dict[str, torch.Tensor] = {}
    for layer in range(LAYERS):
        names = {
            **norm("input_layernorm"),
            "self_attention.query_key_value.weight": part(3 * WIDTH // ranks, WIDTH),
            "self_attention.query_key_value.bias": part(3 * WIDTH // ranks),
            "self_attention.dense.weight": part(WIDTH, WIDTH // ranks),
            "self_attention.dense.bias": whole(WIDTH),
            **norm("post_attention_layernorm"),
            "mlp.dense_h_to_4h.weight": part(4 * WIDTH // ranks, WIDTH),
            "mlp.dense_h_to_4h.bias": part(4 * WIDTH // ranks),
            "mlp.dense_4h_to_h.weight": part(WIDTH, 4 * WIDTH // ranks),
            "mlp.dense_4h_to_h.bias": whole(WIDTH),
        }
        encoder |= {f"layers.{layer}.{name}": tensor for name, tensor in names.items()}
    language = {
        "embedding": {
            "word_embeddings": {"weight": part(PADDED // ranks, WIDTH)},
            "position_embeddings": {"weight": whole(POSITIONS, WIDTH)},
            "tokentype_embeddings": {"weight": whole(2, WIDTH)},
        },
        "encoder": encoder | norm("final_layernorm"),
        "pooler": {"dense.weight": whole(WIDTH, WIDTH), "dense.bias": whole(WIDTH)},
    }
    if head == "classify":
        return {"language_model": language, "classification_head": {"weight": whole(3, WIDTH), "bias": whole(3)}}
    words = {"dense.weight": whole(WIDTH, WIDTH), "dense.bias": whole(WIDTH), **norm("layernorm")}
    return {
        "language_model": language,
        "lm_head": {"bias": part(PADDED // ranks), **words},
        "binary_head": {"weight": whole(2, WIDTH), "bias": whole(2)},
    }


def training_state(rank: int, ranks: int, version: float, head: str = "fill_mask", **settings: Any) -> dict[str, Any]:
    """All that a rank saves: settings, weights, the optimizer's, and the states of random generators."""
    arguments = {
        "num_layers": LAYERS,
        "hidden_size": WIDTH,
        "ffn_hidden_size": 4 * WIDTH,
        "num_attention_heads": HEADS,
        "max_position_embeddings": POSITIONS,
        "padded_vocab_size": PADDED,
        "layernorm_epsilon": EPSILON,
        "tensor_model_parallel_size": ranks,
        "pipeline_model_parallel_size": 1,
        "tokenizer_type": "BertWordPieceLowerCase",
        "vocab_file": "/data/vocab.txt",
        "params_dtype": torch.float16,
        "data_path": ["0.5", "books"],
        "world_size": 64,
        "rank": rank,
    }
    generators = {
        "random_rng_state": random.Random(0).getstate(),
        "np_rng_state": np.random.RandomState(0).get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "rng_tracker_states": {"model-parallel-rng": torch.get_rng_state()},
    }
    return {
        "args": argparse.Namespace(**{**arguments, **settings}),
        "checkpoint_version": version,
        "iteration": 2_000_000,
        "model": rank_weights(rank, ranks, head),
        "optimizer": {
            "optimizer": {"state": {0: {"step": 1, "exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 1.0}]}
        },
        "lr_scheduler": {"max_lr": 1e-4, "decay_style": "linear"},
        "rng_state": [generators],
    }


def save(state: dict[str, Any], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    kind = Enum("ModelType", {"encoder_or_decoder": 1}, module=ENUMS)
    if "args" in state:
        state["args"].model_type = kind(1)
    with _module(ModelType=kind):
        torch.save(state, file)


def write_megatron(folder: Path, ranks: int, version: float, head: str = "fill_mask", **settings: Any) -> Path:
    """Writes a checkpoint with a folder for its last iteration, and the vocabulary it was trained with."""
    for rank in range(ranks):
        file = folder / "iter_2000000" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        save(training_state(rank, ranks, version, head, **settings), file)
    (folder / "latest_checkpointed_iteration.txt").write_text("2000000\n")
    (folder / "vocab.txt").write_text("\n".join(vocabulary()) + "\n")
    return folder


def forward(models: list[dict[str, Any]], version: float, ids: list[int]) -> torch.Tensor:
    """The vectors of a text's tokens, as the ranks compute them together (Megatron-LM's ParallelTransformerLayer).

    The version of a checkpoint says in which order a rank has its queries, keys and values.
    """
    languages = [model["language_model"] for model in models]
    embedding, encoder = languages[0]["embedding"], languages[0]["encoder"]
    words = torch.cat([language["embedding"]["word_embeddings"]["weight"] for language in languages])
    hidden = words[ids] + embedding["position_embeddings"]["weight"][: len(ids)]
    hidden = hidden + embedding["tokentype_embeddings"]["weight"][0]
    size, own = WIDTH // HEADS, HEADS // len(models)
    for layer in range(LAYERS):
        name = f"layers.{layer}."
        normal, attended = _norm(hidden, encoder, f"{name}input_layernorm"), 0.0
        for rank in (language["encoder"] for language in languages):
            mixed = _product(normal, rank, f"{name}self_attention.query_key_value")
            if version == 0:
                query, key, value = mixed.view(-1, 3, own, size).unbind(1)
            elif version == 1:
                query, key, value = mixed.view(-1, own, size, 3).unbind(3)
            else:
                query, key, value = mixed.view(-1, own, 3 * size).chunk(3, -1)
            scores = torch.einsum("qhd,khd->hqk", query, key) / size**0.5
            context = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).reshape(len(ids), -1)
            attended = attended + context @ rank[f"{name}self_attention.dense.weight"].T
        hidden = hidden + attended + encoder[f"{name}self_attention.dense.bias"]
        normal, made = _norm(hidden, encoder, f"{name}post_attention_layernorm"), 0.0
        for rank in (language["encoder"] for language in languages):
            inner = functional.gelu(_product(normal, rank, f"{name}mlp.dense_h_to_4h"))
            made = made + inner @ rank[f"{name}mlp.dense_4h_to_h.weight"].T
        hidden = hidden + made + encoder[f"{name}mlp.dense_4h_to_h.bias"]
    return _norm(hidden, encoder, "final_layernorm")


def word_logits(models: list[dict[str, Any]], hidden: torch.Tensor) -> torch.Tensor:
    """What the head over the words says of vectors, the rows of the padding included."""
    head = models[0]["lm_head"]
    inner = _norm(functional.gelu(_product(hidden, head, "dense")), head, "layernorm")
    words = torch.cat([model["language_model"]["embedding"]["word_embeddings"]["weight"] for model in models])
    return inner @ words.T + torch.cat([model["lm_head"]["bias"] for model in models])


def class_logits(models: list[dict[str, Any]], hidden: torch.Tensor) -> torch.Tensor:
    pooled = torch.tanh(_product(hidden[0], models[0]["language_model"]["pooler"], "dense"))
    return functional.linear(pooled, *models[0]["classification_head"].values())


def _product(hidden: torch.Tensor, weights: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    return functional.linear(hidden, weights[f"{name}.weight"], weights[f"{name}.bias"])


def _norm(hidden: torch.Tensor, weights: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    return functional.layer_norm(hidden, (WIDTH,), weights[f"{name}.weight"], weights[f"{name}.bias"], EPSILON)
