"""Small multi-vector models in the layouts of Sentence Transformers, PyLate and Stanford's trainer."""

from __future__ import annotations

import json
import string
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from safetensors import torch as safetensors_torch

from tests.support.checkpoints import (
    PUBLISHED,
    added_token,
    edit_json,
    edit_weights,
    write_checkpoint,
    write_json,
    write_modules,
    write_task_checkpoint,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

WIDTH, SIZE = 32, 16
QUERY_LENGTH, DOCUMENT_LENGTH = 12, 24
PUNCTUATION = list(string.punctuation)
IDENTITY = "torch.nn.modules.linear.Identity"


def write_own(folder: Path, *, mask: dict[str, Any] | None = None, dense: int = 1, **expansion: Any) -> Path:
    """As MultiVectorEncoder saves it: prompts of plain words, one or more projections, and whatever follows."""
    import sentence_transformers  # noqa: PLC0415  slow to import
    from sentence_transformers.base.modules import Normalize, Transformer  # noqa: PLC0415
    from sentence_transformers.base.modules.dense import Dense  # noqa: PLC0415
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask  # noqa: PLC0415

    encoder = write_checkpoint(folder.with_name(f"{folder.name}-encoder"), pooling=None)
    filling = {"strategy": "fixed", "attend": False, "length": QUERY_LENGTH, **expansion} if expansion else None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        sizes = [WIDTH, *[SIZE] * dense]
        projections = [
            Dense(
                size, after, bias=False, activation_function=torch.nn.Identity(), module_input_name="token_embeddings"
            )
            for size, after in pairwise(sizes)
        ]
    modules = [
        Transformer(str(encoder), document_length=DOCUMENT_LENGTH, query_expansion=filling),
        *projections,
        MultiVectorMask(**{"skiplist_words": [*PUNCTUATION, "the"], **(mask or {})}),
        Normalize(module_input_name="token_embeddings"),
    ]
    prompts = {"query": "it is: ", "document": "text "}
    model = sentence_transformers.MultiVectorEncoder(modules=modules, device="cpu", prompts=prompts)
    model.save(str(folder), create_model_card=False)
    return folder


def write_pylate(
    folder: Path, family: str = "bert", encoder: Mapping[str, object] | None = None, **settings: object
) -> Path:
    """As PyLate saves it: a projection after the encoder, markers as added tokens with a blank, settings in a file."""
    _encoder(folder, "[Q] ", "[D] ", added=True, family=family, **(encoder or {}))
    longest = settings.get("document_length", DOCUMENT_LENGTH)
    edit_json(folder / "sentence_bert_config.json", max_seq_length=int(str(longest)) - 1, do_lower_case=False)
    usual = {
        "model_type": "ColBERT",
        "prompts": {},
        "default_prompt_name": None,
        "similarity_fn_name": "MaxSim",
        "query_prefix": "[Q] ",
        "document_prefix": "[D] ",
        "query_length": QUERY_LENGTH,
        "document_length": DOCUMENT_LENGTH,
        "attend_to_expansion_tokens": False,
        "skiplist_words": PUNCTUATION,
    }
    edit_json(folder / "config_sentence_transformers.json", **{**usual, **settings})
    write_modules(folder, ("sentence_transformers.models.Transformer", ""), ("pylate.models.Dense.Dense", "1_Dense"))
    dense = {"in_features": WIDTH, "out_features": SIZE, "bias": False, "activation_function": IDENTITY}
    write_json(folder / "1_Dense" / "config.json", dense)
    safetensors_torch.save_file({"linear.weight": _projection()}, folder / "1_Dense" / "model.safetensors")
    return folder


def write_stanford(folder: Path, encoder: Mapping[str, object] | None = None, **metadata: object) -> Path:
    """As Stanford's trainer saves it: the projection among the encoder's weights, markers among the words."""
    _encoder(folder, "[unused0]", "[unused1]", **(encoder or {}))
    edit_json(folder / "config.json", architectures=["HF_ColBERT"])
    edit_weights(folder, lambda tensors: tensors.update({"linear.weight": _projection()}))
    usual = {
        "query_maxlen": QUERY_LENGTH,
        "doc_maxlen": DOCUMENT_LENGTH,
        "dim": SIZE,
        "mask_punctuation": True,
        "attend_to_mask_tokens": False,
        "query_token_id": "[unused0]",
        "doc_token_id": "[unused1]",
        "similarity": "cosine",
    }
    write_json(folder / "artifact.metadata", {**usual, **metadata})
    return folder


def _published(name: str) -> tuple[str, dict[str, Any]]:
    """A family and what is published of its checkpoint, as wide as the projection takes it."""
    family, settings = PUBLISHED[name]
    return family, {**settings, "hidden_size": WIDTH, "num_attention_heads": 4}


LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "own": write_own,
    "own, filled": lambda folder: write_own(folder, attend=True),
    "own, filled and unattended": lambda folder: write_own(
        folder, strategy="min", mask={"skiplist_tasks": ["query", "document"]}, dense=2
    ),
    "pylate": write_pylate,
    "pylate, attended": lambda folder: write_pylate(folder, attend_to_expansion_tokens=True, skiplist_words=None),
    "pylate, not filled": lambda folder: write_pylate(folder, do_query_expansion=False, skiplist_words=[]),
    "pylate, wider than a window": lambda folder: write_pylate(folder, "modernbert"),
    "pylate, as GTE-ModernColBERT-v1": lambda folder: write_pylate(
        folder,
        *_published("ModernBERT-base"),
        query_length=32,
        document_length=300,
    ),
    "old pylate": lambda folder: write_pylate(folder, model_type=None),
    "stanford": write_stanford,
    "stanford, as colbertv2.0": lambda folder: write_stanford(
        folder, {"positions": 512}, query_maxlen=32, doc_maxlen=180
    ),
    "stanford, attended": lambda folder: write_stanford(folder, attend_to_mask_tokens=True, mask_punctuation=False),
}
"""Writers of every layout, with the settings that change what they answer."""


def _encoder(folder: Path, *markers: str, added: bool = False, family: str = "bert", **settings: Any) -> None:
    """An encoder whose vocabulary has two more tokens."""
    if family == "bert":
        write_checkpoint(folder, pooling=None, **settings)
    else:
        write_task_checkpoint(folder, family, "embed", **settings)
    document = json.loads((folder / "tokenizer.json").read_text())
    size = len(document["model"]["vocab"])
    for at, marker in enumerate(markers):
        if added:
            document["added_tokens"].append(added_token(size + at, marker, normalized=True))
        else:
            document["model"]["vocab"][marker] = size + at
    write_json(folder / "tokenizer.json", document)
    rows = torch.randn(len(markers), WIDTH, generator=torch.Generator().manual_seed(2)) / 10

    def lengthen(tensors: dict[str, torch.Tensor]) -> None:
        (words,) = (name for name in tensors if name.endswith(("word_embeddings.weight", "tok_embeddings.weight")))
        tensors[words] = torch.cat([tensors[words], rows])

    edit_weights(folder, lengthen)
    edit_json(folder / "config.json", vocab_size=size + len(markers))


def _projection() -> torch.Tensor:
    return torch.randn(SIZE, WIDTH, generator=torch.Generator().manual_seed(3)) / WIDTH**0.5
