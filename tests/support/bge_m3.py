"""A small random model in bge-m3's layout, and what FlagEmbedding computes with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers

from tests.support.checkpoints import edit_json, write_json, write_modules, write_task_checkpoint

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

HIDDEN, COLUMNS, LENGTH = 32, 24, 48


def write_m3(folder: Path) -> Path:
    """An XLM-RoBERTa with modules of Sentence Transformers, and two layers beside, one of them in half precision."""
    write_task_checkpoint(folder, "xlm-roberta", "embed")
    edit_json(folder / "tokenizer_config.json", eos_token="</s>", bos_token="<s>")  # noqa: S106  a token of words
    places = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    write_modules(folder, *((f"sentence_transformers.models.{kind}", path) for kind, path in places.items()))
    pooling = {"word_embedding_dimension": HIDDEN, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    write_json(folder / "1_Pooling" / "config.json", pooling)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": LENGTH, "do_lower_case": False})
    for file, rows, kind, seed in (
        ("sparse_linear.pt", 1, torch.float32, 1),
        ("colbert_linear.pt", COLUMNS, torch.float16, 2),
    ):
        made = torch.Generator().manual_seed(seed)
        weight = torch.randn(rows, HIDDEN, generator=made) / HIDDEN**0.5
        torch.save({"weight": weight.to(kind), "bias": torch.randn(rows, generator=made).to(kind) / 4}, folder / file)
    return folder


class Vectors(NamedTuple):
    """As the dictionaries of FlagEmbedding's `encode`, for one text."""

    dense: NDArray[np.float32]
    lexical: Mapping[int, float]
    colbert: NDArray[np.float32]


class FlagModel:
    """The formulas of `BGEM3FlagModel` (FlagEmbedding 1.3.5), on a model of Transformers."""

    def __init__(self, folder: Path) -> None:
        self._model = transformers.AutoModel.from_pretrained(folder).eval()
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        self._sparse, self._colbert = (_linear(folder / f"{name}_linear.pt") for name in ("sparse", "colbert"))

    def encode(self, text: str) -> Vectors:
        features = self.tokenizer([text], truncation=True, max_length=LENGTH, return_tensors="pt")
        with torch.inference_mode():
            hidden = self._model(**features).last_hidden_state
            dense = torch.nn.functional.normalize(hidden[:, 0], dim=-1)[0]
            weights = torch.relu(self._sparse(hidden))[0, :, 0].tolist()
            colbert = torch.nn.functional.normalize(self._colbert(hidden[:, 1:]), dim=-1)[0]
        return Vectors(dense.numpy(), self._lexical(features["input_ids"][0].tolist(), weights), colbert.numpy())

    def _lexical(self, ids: Sequence[int], weights: Sequence[float]) -> Mapping[int, float]:
        tokenizer = self.tokenizer
        unused = {tokenizer.cls_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
        found: dict[int, float] = {}
        for token, weight in zip(ids, weights, strict=True):
            if token not in unused and weight > 0:
                found[token] = max(found.get(token, 0.0), weight)
        return found

    def score(self, query: str, text: str, weights: Mapping[str, float]) -> float:
        """As `compute_score` has it under `colbert+sparse+dense`."""
        one, other = self.encode(query), self.encode(text)
        scores = {
            "dense": float(one.dense @ other.dense),
            "sparse": sum(weight * other.lexical.get(token, 0.0) for token, weight in one.lexical.items()),
            "tokens": float((one.colbert @ other.colbert.T).max(axis=1).sum() / len(one.colbert)),
        }
        return sum(weight * scores[name] for name, weight in weights.items()) / sum(weights.values())


def _linear(path: Path) -> torch.nn.Linear:
    state = torch.load(path, weights_only=True)
    layer = torch.nn.Linear(state["weight"].shape[1], state["weight"].shape[0])
    layer.load_state_dict(state)
    return layer.eval()
