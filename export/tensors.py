"""Reading a checkpoint's tensors: every one that the encoder needs, none that it does not know."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from export.errors import ExportError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from export.weights import Weights

_IGNORED = ("pooler.", "cls.", "embeddings.position_ids", "embeddings.token_type_ids")
"""Parts of a BERT checkpoint that an embedding does not use: the heads of pre-training, and constants."""

_LEGACY = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def read(weights: Weights, expected: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Reads the tensors of an encoder, as float32.

    Args:
        weights: The files.
        expected: The encoder's own tensors by name, for their shapes.

    Raises:
        ExportError: A tensor is missing, unknown, of another shape, or not of floating point.
    """
    where = f"checkpoint {weights.folder.path}"
    found = dict(_stored(weights))
    if missing := sorted(expected.keys() - found.keys()):
        raise ExportError(
            f"{where}: the weights lack {len(missing)} of {len(expected)} tensors that config.json asks for, "
            f"first {missing[0]}"
        )
    if unknown := sorted(found.keys() - expected.keys()):
        raise ExportError(
            f"{where}: the weights hold {len(unknown)} tensors that BertModel has no place for, first {unknown[0]}"
        )
    for name, tensor in found.items():
        if tensor.shape != expected[name].shape:
            raise ExportError(
                f"{where}: {name} has the shape {list(tensor.shape)}, config.json asks for {list(expected[name].shape)}"
            )
    return found


def _stored(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    for file in weights.files:
        try:
            with safe_open(file, framework="pt") as handle:
                for stored in handle.keys():  # noqa: SIM118  not a mapping
                    name = _canonical(stored)
                    if not name.startswith(_IGNORED):
                        yield name, _float32(weights, stored, handle.get_tensor(stored))
        except SafetensorError as error:
            raise ExportError(f"checkpoint {weights.folder.path}: {file.name} is damaged: {error}") from error


def _float32(weights: Weights, name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        raise ExportError(
            f"checkpoint {weights.folder.path}: {name} holds {tensor.dtype}; only weights in floating point are read"
        )
    return tensor.to(torch.float32)


def _canonical(name: str) -> str:
    name = name.removeprefix("bert.")
    for old, new in _LEGACY.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name
