"""Small random sparse encoders, in the layouts of Sentence Transformers, naver and OpenSearch."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import torch
from safetensors import torch as safetensors_torch

from tests.support.checkpoints import (
    edit_json,
    edit_weights,
    write_json,
    write_modules,
    write_task_checkpoint,
)

if TYPE_CHECKING:
    from pathlib import Path

LENGTH = 64
OLD = "sentence_transformers.sparse_encoder.models"
"""The package of the modules before version 5.4."""
LOOKUP, POOLING = "query_0_SparseStaticEmbedding", "document_1_SpladePooling"


def write_plain(folder: Path, model_type: str = "bert", **settings: object) -> Path:
    """Writes a model of masked words as naver publishes its own: without modules, known by its name alone."""
    write_task_checkpoint(folder, model_type, "fill_mask", **settings)
    edit_json(folder / "tokenizer_config.json", model_max_length=LENGTH)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    write_json(folder / "tokenizer.json", {**tokenizer, "truncation": None, "padding": None})
    edit_weights(folder, _make_sparse)
    return folder


def _make_sparse(tensors: dict[str, torch.Tensor]) -> None:
    """Lowers the logits of all words, so that a text has the weights of some."""
    words = max(len(tensor) for tensor in tensors.values() if tensor.ndim == 2)
    for name, tensor in tensors.items():
        if tensor.ndim == 1 and len(tensor) == words and name.endswith("bias"):
            tensor.sub_(1)


def write_modules_of_version_5(folder: Path, **settings: object) -> Path:
    """Adds the files of Sentence Transformers 5.0: MLMTransformer, and SpladePooling in a folder of its own."""
    write_modules(folder, (f"{OLD}.MLMTransformer", ""), (f"{OLD}.SpladePooling", "1_SpladePooling"))
    pooling = {"pooling_strategy": "max", "activation_function": "relu", "word_embedding_dimension": None}
    write_json(folder / "1_SpladePooling" / "config.json", pooling)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": LENGTH, "do_lower_case": False})
    _write_settings(folder, **settings)
    return folder


def write_router(folder: Path, **settings: object) -> Path:
    """Adds the files of OpenSearch's encoders of documents, whose queries take weights of a table."""
    write_modules(folder, ("sentence_transformers.models.Router", ""))
    types = {LOOKUP: f"{OLD}.SparseStaticEmbedding", "": f"{OLD}.MLMTransformer", POOLING: f"{OLD}.SpladePooling"}
    structure = {"query": [LOOKUP], "document": ["", POOLING]}
    parameters = {"default_route": "document", "allow_empty_key": True}
    write_json(folder / "router_config.json", {"types": types, "structure": structure, "parameters": parameters})
    pooling = {"pooling_strategy": "max", "activation_function": "log1p_relu", "word_embedding_dimension": None}
    write_json(folder / POOLING / "config.json", pooling)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": LENGTH, "do_lower_case": False})
    write_json(folder / LOOKUP / "config.json", {"frozen": True})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(folder / name, folder / LOOKUP / name)
    safetensors_torch.save_file({"weight": query_weights(folder)}, folder / LOOKUP / "model.safetensors")
    _write_settings(folder, **settings)
    return folder


def write_idf(folder: Path) -> Path:
    """Adds OpenSearch's table of weights alone, as its first encoders of documents had it."""
    ids = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    weights = query_weights(folder)
    write_json(folder / "idf.json", {token: weights[at].item() for token, at in ids.items() if weights[at]})
    return folder


def query_weights(folder: Path) -> torch.Tensor:
    """A weight for each token, for padding too; some are 0."""
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    weights = torch.rand(size, generator=torch.Generator().manual_seed(1))
    weights[1::5] = 0
    return weights


def _write_settings(folder: Path, **settings: Any) -> None:
    usual = {"model_type": "SparseEncoder", "prompts": {"query": "", "document": ""}, "similarity_fn_name": "dot"}
    edit_json(folder / "config_sentence_transformers.json", **{**usual, "default_prompt_name": None, **settings})
