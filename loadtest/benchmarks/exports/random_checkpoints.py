"""Checkpoints of every family and task with random weights, saved by Transformers' own classes."""

from __future__ import annotations

import functools
import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bertserve.export.checkpoint.families import FAMILIES
from bertserve.export.checkpoint.reader import open_checkpoint
from bertserve.export.checkpoint.source import DEMO, find
from bertserve.export.errors import ExportError

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(slots=True, frozen=True)
class Sizes:
    """Sizes of the layers. `vocabulary` counts the first words of the demo model's tokenizer."""

    layers: int
    width: int
    heads: int
    vocabulary: int


LAYERS = Sizes(layers=2, width=768, heads=12, vocabulary=30522)
"""Layers of BERT-base's shape. Two, so that ModernBERT has one with global and one with local attention."""

WHOLE = {"base": Sizes(12, 768, 12, 30522), "large": Sizes(24, 1024, 16, 30522)}
"""BERTs of the sizes that its paper calls so."""

SMALL = Sizes(layers=2, width=64, heads=4, vocabulary=4096)

_LABELS = {"classify": 3, "rerank": 1, "tag": 5}
_FEED_FORWARD = {"modernbert": 1.5}
"""Width of the feed-forward part in widths of the model, if not 4."""

_SETTINGS: dict[str, dict[str, Any]] = {
    # As in deberta-base.
    "deberta": {
        "relative_attention": True,
        "max_relative_positions": -1,
        "pos_att_type": "c2p|p2c",
        "position_biased_input": False,
        "type_vocab_size": 0,
    },
    # As in deberta-v3-base.
    "deberta-v2": {
        "relative_attention": True,
        "max_relative_positions": -1,
        "position_buckets": 256,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": "p2c|c2p",
        "position_biased_input": False,
    },
    "modernbert": {"cls_token_id": 101, "bos_token_id": 101, "sep_token_id": 102, "eos_token_id": 102},
}
"""Settings of real checkpoints that differ from Transformers' defaults."""

_OWN_FORMS: dict[str, dict[str, Any]] = {
    "new": {"model_type": "new", "rope_theta": 500_000, "rope_scaling": {"type": "ntk", "factor": 2.0}},
    "jina_bert": {"position_embedding_type": "alibi", "feed_forward_type": "geglu"},
}
"""Settings of families that Transformers does not write itself."""


def write(folder: Path, model_type: str, task: str, sizes: Sizes) -> Path:
    """Writes a checkpoint for a key of `FAMILIES`; raises ExportError if Transformers has no such class."""
    # Slow to import.
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    family = FAMILIES[model_type]
    kind: Any = getattr(transformers, family.class_name(task), None)
    if kind is None:
        raise ExportError(f"Transformers has no {family.class_name(task)} to make a checkpoint of")
    of_ours = {
        "hidden_size": sizes.width,
        "layers": sizes.layers,
        "heads": sizes.heads,
        "intermediate_size": int(_FEED_FORWARD.get(model_type, 4) * sizes.width),
        "vocab_size": sizes.vocabulary,
    }
    settings: dict[str, Any] = {family.sizes[name]: size for name, size in of_ours.items()}
    settings |= {"pad_token_id": 0, "num_labels": _LABELS.get(task, 2), **_SETTINGS.get(model_type, {})}
    # Wide enough for heads to tell texts apart, narrow enough to stay smooth.
    settings["initializer_range"] = 0.8 / math.sqrt(sizes.width)
    if family.projection == "narrower":
        settings["embedding_size"] = sizes.width
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind(kind.config_class(**settings))
        if model_type in _OWN_FORMS:
            _change(folder, model, model_type, task)
        for name, tensor in model.named_parameters():
            # Biases start as 0 and scales as 1, which would hide a graph that mixes them up.
            if tensor.ndim == 1:
                tensor.data.normal_(mean=float("orm" in name and name.endswith("weight")), std=0.02)
    _save(folder, model, model_type)
    return folder


def write_tokenizer(folder: Path, words: int) -> None:
    """Writes the demo model's tokenizer with its first words, and its class: a family's own class differs."""
    (folder / "tokenizer.json").write_text(_tokenizer(words), encoding="utf-8")
    tokens = {f"{role}_token": f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep", "mask")}
    settings = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **tokens})
    (folder / "tokenizer_config.json").write_text(settings, encoding="utf-8")


@functools.cache
def _tokenizer(words: int) -> str:
    tokenizer = json.loads((find(DEMO).path / "tokenizer.json").read_text(encoding="utf-8"))
    every = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {word: at for word, at in every.items() if at < words}
    return json.dumps(tokenizer)


def _save(folder: Path, model: Any, model_type: str) -> None:  # noqa: ANN401  of Transformers
    from safetensors.torch import load_file, save_file  # noqa: PLC0415  needs PyTorch

    model.save_pretrained(folder)
    write_tokenizer(folder, model.config.vocab_size)
    own, family = _OWN_FORMS.get(model_type), FAMILIES[model_type]
    if own is None:
        return
    config = {**json.loads((folder / "config.json").read_text()), **own}
    (folder / "config.json").write_text(json.dumps(config))
    prefix = family.own_prefix or family.prefix
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {re.sub(f"^{re.escape(family.prefix)}", prefix, name): tensors[name] for name in tensors},
        folder / "model.safetensors",
    )


def _change(folder: Path, model: Any, model_type: str, task: str) -> None:  # noqa: ANN401  of Transformers
    """Changes a Transformers model into the variant built here."""
    from bertserve.export.graph import architectures  # noqa: PLC0415  brings PyTorch

    _save(folder, model, model_type)
    architectures.adapt(model, open_checkpoint(find(str(folder)), None, lambda _: None, task))
