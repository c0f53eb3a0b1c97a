"""Reading a checkpoint's tensors: every one that the model needs, none that it does not know."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from export.errors import ExportError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from export.checkpoint.weights import Weights

HEADS = (
    "pooler.",
    "cls.",
    "classifier.",
    "pre_classifier.",
    "qa_outputs.",
    "lm_head.",
    "vocab_transform.",
    "vocab_layer_norm.",
    "vocab_projector.",
    "generator_predictions.",
    "generator_lm_head.",
    "discriminator_predictions.",
)
"""Names of heads begin with these; a head that the task does not use is left out."""

_CONSTANTS = ("embeddings.position_ids", "embeddings.token_type_ids")

_LEGACY = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}

_WORDS = "embeddings.word_embeddings.weight"
_TIED = {
    "cls.predictions.decoder.weight": _WORDS,
    "cls.predictions.decoder.bias": "cls.predictions.bias",
    "lm_head.decoder.weight": _WORDS,
    "lm_head.decoder.bias": "lm_head.bias",
    "vocab_projector.weight": _WORDS,
    "generator_lm_head.weight": _WORDS,
}
"""Tensors that checkpoints store once, and under which name, where the word embedding also is the last matrix."""


def read(
    weights: Weights, expected: Mapping[str, torch.Tensor], *, model: str, prefix: str, tied: bool
) -> dict[str, torch.Tensor]:
    """Reads the tensors of a model, as float32.

    Args:
        weights: The files.
        expected: The model's own tensors by name, for their shapes.
        model: What the model's class is called.
        prefix: What the names of the encoder's tensors may begin with.
        tied: Whether the word embedding also is the matrix that words are predicted with.

    Raises:
        ExportError: A tensor is missing, unknown, of another shape, or not of floating point.
    """
    where = f"checkpoint {weights.folder.path}"
    names = {_canonical(name, prefix): name for name in expected}
    found = dict(_stored(weights, prefix, names.keys()))
    if tied:
        _tie(where, found, names.keys())
    if missing := sorted(names.keys() - found.keys()):
        untrained = " (a head that was never trained)" if missing[0].startswith(HEADS) else ""
        raise ExportError(
            f"{where}: the weights lack {len(missing)} of {len(expected)} tensors that {model} needs, "
            f"first {missing[0]}{untrained}"
        )
    if unknown := sorted(found.keys() - names.keys()):
        raise ExportError(
            f"{where}: the weights hold {len(unknown)} tensors that {model} has no place for, first {unknown[0]}"
        )
    for name, tensor in found.items():
        wanted = expected[names[name]].shape
        if tensor.shape != wanted:
            raise ExportError(
                f"{where}: {name} has the shape {list(tensor.shape)}, config.json asks for {list(wanted)}"
            )
    return {names[name]: tensor for name, tensor in found.items()}


def _tie(where: str, found: dict[str, torch.Tensor], needed: Iterable[str]) -> None:
    for name in needed:
        source = found.get(_TIED.get(name, ""))
        if source is None:
            continue
        if name in found and not torch.equal(found[name], source):
            raise ExportError(
                f"{where}: {name} is to be the same as {_TIED[name]} (tie_word_embeddings in config.json) and is not"
            )
        found[name] = source


def _stored(weights: Weights, prefix: str, needed: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    wanted = frozenset(needed)
    for file in weights.files:
        try:
            with safe_open(file, framework="pt") as handle:
                for stored in handle.keys():  # noqa: SIM118  not a mapping
                    name = _canonical(stored, prefix)
                    if name in wanted or not name.startswith((*HEADS, *_CONSTANTS)):
                        yield name, _float32(weights, stored, handle.get_tensor(stored))
        except SafetensorError as error:
            raise ExportError(f"checkpoint {weights.folder.path}: {file.name} is damaged: {error}") from error


def _float32(weights: Weights, name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        raise ExportError(
            f"checkpoint {weights.folder.path}: {name} holds {tensor.dtype}; only weights in floating point are read"
        )
    return tensor.to(torch.float32)


def _canonical(name: str, prefix: str) -> str:
    name = name.removeprefix(prefix)
    for old, new in _LEGACY.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name
