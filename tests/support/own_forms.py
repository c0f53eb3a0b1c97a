"""Checkpoints in forms that Transformers does not read, and what each answers: arithmetic of its own, or its twin."""

from __future__ import annotations

import json
import math
import shutil
from itertools import product
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors import torch as safetensors_torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Tensors = dict[str, torch.Tensor]

TWIN = "as_transformers_has_it"
"""A folder with the same model in Transformers' own form."""

SLOPES = {
    4: [2**-2, 2**-4, 2**-6, 2**-8],
    6: [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3],
    12: [*(2.0**-at for at in range(1, 9)), 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5],
}
"""ALiBi's, by the number of heads, as its authors list them."""


def _keep_twin(folder: Path) -> None:
    (folder / TWIN).mkdir()
    for file in ("config.json", "model.safetensors"):
        shutil.copy(folder / file, folder / TWIN)


def _rename(folder: Path, old: str, new: str) -> None:
    tensors = safetensors_torch.load_file(folder / "model.safetensors")
    renamed = {new + name.removeprefix(old) if name.startswith(old) else name: tensors[name] for name in tensors}
    safetensors_torch.save_file(renamed, folder / "model.safetensors")


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def to_jina_bert(folder: Path, *, normalised: bool = False) -> None:
    """Makes JinaBERT of a checkpoint of BERT, or its variant that normalises queries and keys."""
    config, tensors = _config(folder), safetensors_torch.load_file(folder / "model.safetensors")
    made: Tensors = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for name, tensor in tensors.items():
            if "position_embeddings" in name:
                continue
            if name.endswith("intermediate.dense.weight"):
                shape = (2 * config["intermediate_size"], config["hidden_size"])
                made[name.replace("intermediate.dense", "mlp.gated_layers")] = 0.1 * torch.randn(shape)
            elif "intermediate.dense" not in name:
                own = name if "attention.output" in name else name.replace("output.dense", "mlp.wo")
                made[own if "attention.output" in own else own.replace("output.LayerNorm", "mlp.layernorm")] = tensor
        if normalised:
            made = _with_more_norms(made)
    safetensors_torch.save_file(made, folder / "model.safetensors")
    config["architectures"] = [f"Jina{name}" for name in config["architectures"]]
    changes = {
        "position_embedding_type": "alibi",
        "feed_forward_type": "geglu",
        "auto_map": {"AutoModel": f"jinaai/jina-bert-{'v2-qk-post-norm' if normalised else 'implementation'}--m.Model"},
    }
    (folder / "config.json").write_text(json.dumps(config | changes))


_RENAMED = {
    "mlp.gated_layers": "mlp.up_gated_layer",
    "mlp.wo": "mlp.down_layer",
    "mlp.layernorm": "layer_norm_2",
}


def _with_more_norms(tensors: Tensors) -> Tensors:
    made = {}
    for name, tensor in tensors.items():
        old, new = next((pair for pair in _RENAMED.items() if pair[0] in name), ("", ""))
        made[name.replace(old, new)] = tensor
        if ".attention.output.LayerNorm." in name:
            for norm in ("attention.self.layer_norm_q", "attention.self.layer_norm_k", "layer_norm_1"):
                drawn = 0.1 * torch.randn(tensor.shape)
                made[name.replace("attention.output.LayerNorm", norm)] = drawn + name.endswith("weight")
    return made


class _Bert:
    """The arithmetic of BERT's relatives, step by step in float64."""

    def __init__(self, folder: Path) -> None:
        self.config = _config(folder)
        stored = safetensors_torch.load_file(folder / "model.safetensors")
        self.tensors = {name.removeprefix("bert."): tensor.double() for name, tensor in stored.items()}
        self.words = self.tensors["embeddings.word_embeddings.weight"]

    def apply(self, name: str, hidden: torch.Tensor) -> torch.Tensor:
        return functional.linear(hidden, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def normal(self, name: str, hidden: torch.Tensor) -> torch.Tensor:
        weight, bias = self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"]
        return functional.layer_norm(hidden, hidden.shape[-1:], weight, bias, self.config["layer_norm_eps"])

    def hidden(self, ids: list[int], types: list[int] | None) -> torch.Tensor:
        segments = self.tensors["embeddings.token_type_embeddings.weight"][types or [0] * len(ids)]
        hidden = self.normal("embeddings.LayerNorm", self.words[ids] + segments)
        for at in range(self.config["num_hidden_layers"]):
            hidden = self.layer(f"encoder.layer.{at}", hidden)
        return hidden

    def layer(self, name: str, hidden: torch.Tensor) -> torch.Tensor:
        mixed = self.apply(f"{name}.attention.output.dense", self.attention(f"{name}.attention.self", hidden))
        mixed = self.normal(f"{name}.attention.output.LayerNorm", mixed + hidden)
        if f"{name}.layer_norm_1.weight" in self.tensors:
            hidden = self.normal(f"{name}.layer_norm_1", mixed + hidden)
            up, gate = self.apply(f"{name}.mlp.up_gated_layer", hidden).chunk(2, 1)
            return self.normal(
                f"{name}.layer_norm_2", self.apply(f"{name}.mlp.down_layer", functional.gelu(gate) * up) + hidden
            )
        if f"{name}.mlp.wo.weight" in self.tensors:
            gate, up = self.apply(f"{name}.mlp.gated_layers", mixed).chunk(2, 1)
            return self.normal(
                f"{name}.mlp.layernorm", self.apply(f"{name}.mlp.wo", functional.gelu(gate) * up) + mixed
            )
        inner = functional.gelu(self.apply(f"{name}.intermediate.dense", mixed))
        return self.normal(f"{name}.output.LayerNorm", self.apply(f"{name}.output.dense", inner) + mixed)

    def attention(self, name: str, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = (self.apply(f"{name}.{part}", hidden) for part in ("query", "key", "value"))
        if f"{name}.layer_norm_q.weight" in self.tensors:
            query, key = self.normal(f"{name}.layer_norm_q", query), self.normal(f"{name}.layer_norm_k", key)
        heads = self.config["num_attention_heads"]
        parts = []
        for at, (q, k, v) in enumerate(zip(*(part.chunk(heads, 1) for part in (query, key, value)), strict=True)):
            if self.config["position_embedding_type"] == "alibi":
                apart = (torch.arange(len(q))[:, None] - torch.arange(len(q))).abs()
                scores = q @ k.T / math.sqrt(q.shape[1]) - SLOPES[heads][at] * apart
            else:
                scores = self.scores_with_distances(name, q, k) / math.sqrt(q.shape[1])
            parts.append(scores.softmax(1) @ v)
        return torch.cat(parts, 1)

    def scores_with_distances(self, name: str, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        scores, distances = query @ key.T, self.tensors[f"{name}.distance_embedding.weight"]
        for row, column in product(range(len(query)), repeat=2):
            vector = distances[len(distances) // 2 + row - column]
            scores[row, column] += query[row] @ vector
            if self.config["position_embedding_type"] == "relative_key_query":
                scores[row, column] += key[column] @ vector
        return scores


def bert(folder: Path, head: str, ids: list[int], types: list[int] | None) -> SimpleNamespace:
    """What JinaBERT, or BERT with distances, answers to one text."""
    model = _Bert(folder)
    hidden = model.hidden(ids, types)
    answer = {"last_hidden_state": hidden}
    if head == "ForSequenceClassification":
        answer["logits"] = model.apply("classifier", torch.tanh(model.apply("pooler.dense", hidden[0])))
    elif head == "ForTokenClassification":
        answer["logits"] = model.apply("classifier", hidden)
    elif head == "ForQuestionAnswering":
        answer["start_logits"], answer["end_logits"] = model.apply("qa_outputs", hidden).T
    elif head == "ForMaskedLM":
        transformed = functional.gelu(model.apply("cls.predictions.transform.dense", hidden))
        transformed = model.normal("cls.predictions.transform.LayerNorm", transformed)
        answer["logits"] = transformed @ model.words.T + model.tensors["cls.predictions.bias"]
    return SimpleNamespace(**{name: tensor.float()[None] for name, tensor in answer.items()})


def to_relative_bert(folder: Path, kind: str) -> None:
    config, tensors = _config(folder), safetensors_torch.load_file(folder / "model.safetensors")
    shape = (2 * config["max_position_embeddings"] - 1, config["hidden_size"] // config["num_attention_heads"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for name in [name for name in tensors if name.endswith("attention.self.query.weight")]:
            tensors[name.replace("query", "distance_embedding")] = 0.3 * torch.randn(shape)
    safetensors_torch.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"position_embedding_type": kind}))


NTK = 8.0
"""The factor of GTE's angles."""


def to_new(folder: Path) -> None:
    """Makes GTE's first form, `new`, of a checkpoint of GTE."""
    _keep_twin(folder)
    _rename(folder, "gte.", "new.")
    config = _config(folder)
    del config["rope_parameters"]
    changes = {
        "model_type": "new",
        "architectures": [name.replace("Gte", "New") for name in config["architectures"]],
        "auto_map": {"AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel"},
        "position_embedding_type": "rope",
        "rope_theta": 20000,
        "rope_scaling": {"type": "ntk", "factor": NTK},
        "layer_norm_type": "layer_norm",
        "logn_attention_scale": False,
        "pack_qkv": True,
    }
    (folder / "config.json").write_text(json.dumps(config | changes))


def _scaled_gte(base: float, components: int, _length: int) -> torch.Tensor:
    """`new`'s angles a place: of a larger base, and each a little smaller."""
    return torch.tensor([(base * NTK) ** (-2 * at / components) / NTK ** (2 / components) for at in _pairs(components)])


FACTOR, TRAINED = 2.0, 24
"""NomicBERT's scaling, and a trained length below that of the longer texts."""


def to_first_nomic_bert(folder: Path) -> None:
    """Gives a checkpoint of NomicBERT the settings of its first code."""
    _keep_twin(folder)
    _rename(folder, "nomic_bert.", "bert.")
    config = _config(folder)
    kept = ("model_type", "architectures", "id2label", "label2id", "type_vocab_size", "vocab_size", "problem_type")
    changes = {
        "n_embd": config["hidden_size"],
        "n_layer": config["num_hidden_layers"],
        "n_head": config["num_attention_heads"],
        "n_inner": config["intermediate_size"],
        "n_positions": config["max_position_embeddings"],
        "max_trained_positions": TRAINED,
        "rotary_scaling_factor": FACTOR,
        "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "activation_function": "swiglu",
        "layer_norm_epsilon": config["layer_norm_eps"],
        "qkv_proj_bias": False,
        "mlp_fc1_bias": False,
        "mlp_fc2_bias": False,
        "prenorm": False,
        "causal": False,
        "use_rms_norm": None,
        "auto_map": {"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"},
    }
    (folder / "config.json").write_text(json.dumps({key: config[key] for key in kept if key in config} | changes))


def _scaled_nomic(base: float, components: int, length: int) -> torch.Tensor:
    """NomicBERT's angles a place: beyond the trained length the base grows with the text's."""
    if length > TRAINED:
        base *= (FACTOR * length / TRAINED - (FACTOR - 1)) ** (components / (components - 2))
    return torch.tensor([base ** (-2 * at / components) for at in _pairs(components)])


def _pairs(components: int) -> range:
    return range(components // 2)


def _rotated(scaled: Callable[[float, int, int], torch.Tensor], stem: str, base: float) -> Callable[..., Any]:
    def answer(folder: Path, head: str, ids: list[int], types: list[int] | None) -> Any:
        model = getattr(transformers, stem + head).from_pretrained(folder / TWIN).eval()
        (rotary,) = (part for name, part in model.named_modules() if name.endswith("rotary_emb"))
        rotary.inv_freq = scaled(base, 2 * len(rotary.inv_freq), len(ids))
        with torch.inference_mode():
            given = {"input_ids": torch.tensor([ids])}
            if types is not None and model.config.type_vocab_size > 1:
                given["token_type_ids"] = torch.tensor([types])
            return model(**given)

    return answer


new = _rotated(_scaled_gte, "Gte", 20000)
first_nomic_bert = _rotated(_scaled_nomic, "NomicBert", 1000)
