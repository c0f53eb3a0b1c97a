"""Reads a checkpoint's tensors: every one that the model needs, none that it does not know."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from bertserve.export.checkpoint.families import FAMILIES
from bertserve.export.checkpoint.unpickle import TYPES
from bertserve.export.checkpoint.weights import damage, readable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from bertserve.export.checkpoint.families.family import Family
    from bertserve.export.checkpoint.folder import Folder
    from bertserve.export.checkpoint.safetensors_file import Tensor
    from bertserve.export.checkpoint.weights import Weights

HEADS = tuple(dict.fromkeys(head for family in FAMILIES.values() for head in family.heads))
"""Heads of all families: a checkpoint converted between families may keep a head under its old names."""

_CONSTANTS = ("embeddings.position_ids", "embeddings.token_type_ids")

_BY_NAME = {name: kind for kind, name in TYPES.items()}

_WRAPPERS = {
    "module.": "DataParallel or DeepSpeed",
    "_orig_mod.": "torch.compile",
    "0.auto_model.": "a Sentence Transformers module list",
    "model.": "a training framework such as Lightning",
}

_REMEDY = "; check that config.json belongs to these weights, or save the model again with save_pretrained"

_LEGACY = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def read(
    weights: Weights,
    expected: Mapping[str, torch.Tensor],
    family: Family,
    model: str,
    *,
    tied: bool,
    body_only: bool = False,
) -> dict[str, torch.Tensor]:
    """Reads the tensors of a model, as float32.

    Args:
        weights: The files.
        expected: The model's own tensors by name, for their shapes.
        family: Knows the names of the stored tensors.
        model: The name of the model's class.
        tied: Whether the word embedding is also the matrix of the vocabulary head.
        body_only: Whether the model is an encoder without a head: tensors outside the encoder are ignored, as in
            Transformers.

    Raises:
        ExportError: A tensor is missing, unknown, of another shape, or not of floating point.
    """
    names = {_canonical(name, family.prefix): name for name in expected}
    tensors = dict(_read_known(weights, family, names.keys(), body_only=body_only))
    folder = weights.folder
    _add(folder, tensors, family.added)
    for name in family.zero & names.keys() - tensors.keys():
        tensors[name] = torch.zeros(expected[names[name]].shape)
    if tied:
        _tie(folder, tensors, {name: source for name, source in family.tied.items() if name in names})
    _check(weights, tensors, {name: expected[own] for name, own in names.items()}, model)
    return {names[name]: tensor for name, tensor in tensors.items()}


def read_plain(
    weights: Weights, expected: Mapping[str, torch.Tensor], module: str, *, beside: bool = False
) -> dict[str, torch.Tensor]:
    """Reads the tensors of a module without a family, as float32.

    Args:
        weights: The files.
        expected: The module's own tensors by name, for their shapes.
        module: The name of its class.
        beside: Whether the files may hold tensors of other modules.

    Raises:
        ExportError: A tensor is missing, unknown, of another shape, or not of floating point.
    """
    tensors = dict(_read_all(weights, (lambda stored, _: stored not in expected) if beside else None))
    _check(weights, tensors, expected, module, ", with dim of artifact.metadata (128 if absent)" if beside else "")
    return tensors


def _check(
    weights: Weights,
    tensors: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    model: str,
    settings: str = "",
) -> None:
    folder = weights.folder
    if missing := sorted(expected.keys() - tensors.keys()):
        if before := _before(weights, missing):
            wrapper = next((name for start, name in _WRAPPERS.items() if before.startswith(start)), "a wrapper model")
            raise folder.error(
                f"the weight names begin with {before!r} ({wrapper}), so Transformers would find "
                "none; save the inner model with save_pretrained"
            )
        untrained = missing[0].startswith(HEADS)
        remedy = " (a head that was never trained); fine-tune it, or select another --task" if untrained else _REMEDY
        raise folder.error(
            f"the weights lack {len(missing)} of {len(expected)} tensors that {model} needs, first {missing[0]}{remedy}"
        )
    if unknown := sorted(tensors.keys() - expected.keys()):
        raise folder.error(
            f"the weights have {len(unknown)} tensors that {model} does not, first {unknown[0]}{_REMEDY}"
        )
    for name, tensor in tensors.items():
        shape = expected[name].shape
        if tensor.shape != shape:
            raise folder.error(
                f"{name} has shape {list(tensor.shape)}, but config.json requires {list(shape)}{settings}"
            )


def _add(folder: Folder, tensors: dict[str, torch.Tensor], added: Mapping[str, str]) -> None:
    for name, beside in added.items():
        if absent := [table for table in (name, beside) if table not in tensors]:
            raise folder.error(f"the weights lack {absent[0]}")
        row, table = tensors.pop(name)[0], tensors[beside]
        if row.shape != table.shape[1:]:
            raise folder.error(f"{name} has rows of shape {list(row.shape)}, but {beside} has {list(table.shape[1:])}")
        tensors[beside] = table + row


def _tie(folder: Folder, tensors: dict[str, torch.Tensor], tied: Mapping[str, str]) -> None:
    for name, source in tied.items():
        if source not in tensors:
            continue
        if name in tensors and not torch.equal(tensors[name], tensors[source]):
            raise folder.error(f"{name} must equal {source} (tie_word_embeddings in config.json), but differs")
        tensors[name] = tensors[source]


def _before(weights: Weights, missing: Collection[str]) -> str:
    """The prefix of most missing names in the files; empty if they are not there."""
    before, wanted = Counter[str](), frozenset(missing)
    for file in _files_to_open(weights):
        with _open(weights, file) as tensors:
            for stored in tensors:
                parts = _canonical(stored, "").split(".")
                ends = [at for at in range(1, len(parts)) if ".".join(parts[at:]) in wanted]
                before.update(".".join(parts[:at]) + "." for at in ends[:1])
    name, count = next(iter(before.most_common(1)), ("", 0))
    return name if 2 * count > len(missing) else ""


def _read_known(
    weights: Weights, family: Family, needed: Iterable[str], *, body_only: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of the files under Transformers' current names, without unused heads."""
    names = frozenset(needed)
    prefix, parts_of_body = family.own_prefix or family.prefix, {name.partition(".")[0] for name in names}

    def is_unused(stored: str, beside: Collection[str]) -> bool:
        found = _names(stored, family)
        if not names.isdisjoint(found):
            return False
        if found[0].startswith((*HEADS, *_CONSTANTS, *family.ignored)):
            return True
        has_prefix = any(name.startswith(prefix) for name in beside)
        in_body = stored.startswith(prefix) if has_prefix else found[0].partition(".")[0] in parts_of_body
        return body_only and not in_body

    for stored, whole in _read_all(weights, is_unused):
        found = _names(stored, family)
        # Each with memory of its own, because a slice would keep the whole.
        parts = [whole] if len(found) == 1 else [part.clone() for part in whole.chunk(len(found))]
        yield from zip(found, parts, strict=True)


def _read_all(
    weights: Weights, is_unused: Callable[[str, Collection[str]], bool] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of the files under their own names, without unused ones."""
    held: dict[str, list[str]] = {}
    for file in _files_to_open(weights):
        try:
            with _open(weights, file) as tensors:
                held[file.name] = list(tensors)
                for stored, read_one in tensors.items():
                    if is_unused is None or not is_unused(stored, tensors):
                        yield stored, _float32(weights, stored, read_one())
        except SafetensorError as error:
            raise weights.folder.error(f"{file.name} is damaged ({damage(file)}): {error}") from error
    weights.check(held)


def _files_to_open(weights: Weights) -> Sequence[Path]:
    """Files that are opened one by one; those of another layout are opened together."""
    return weights.files if weights.folder.imported is None else weights.files[:1]


@contextmanager
def _open(weights: Weights, file: Path) -> Iterator[Mapping[str, Callable[[], torch.Tensor]]]:
    """Readers of the tensors of a file by name."""
    if (imported := weights.folder.imported) is not None:
        with imported.tensors() as tensors:
            yield {name: partial(_of_bits, tensor) for name, tensor in tensors.items()}
        return
    with readable(file) as path, safe_open(path, framework="pt") as handle:
        yield {name: partial(handle.get_tensor, name) for name in handle.keys()}  # noqa: SIM118


def _of_bits(tensor: Tensor) -> torch.Tensor:
    # A copy: mapped data is read-only, which PyTorch does not support.
    content = np.array(tensor.bits(), order="C").reshape(-1).view(np.uint8)
    return torch.from_numpy(content).view(_BY_NAME[tensor.dtype]).reshape(tensor.shape)


def _float32(weights: Weights, name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        raise weights.folder.error(f"{name} is {tensor.dtype}; only floating-point weights are supported")
    return tensor.to(torch.float32)


def _names(stored: str, family: Family) -> list[str]:
    name = _canonical(stored, family.own_prefix or family.prefix)
    for old, new in family.renamed.items():
        name = name.replace(old, new)
    return next(
        ([name.replace(old, part) for part in parts] for old, parts in family.split.items() if old in name), [name]
    )


def _canonical(name: str, prefix: str) -> str:
    name = name.removeprefix(prefix)
    for old, new in _LEGACY.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name
