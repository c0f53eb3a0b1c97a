"""BERT as Megatron-LM saves it during training (arXiv 1909.08053): a pickle for each tensor-parallel rank.

`latest_checkpointed_iteration.txt` names the folder `iter_0000000/` or `release/`, in which `mp_rank_00/`,
`mp_rank_01/` ... hold a `model_optim_rng.pt` each. The layout is that of megatron/checkpointing.py and
megatron/model/bert_model.py. Names are mapped as in Transformers' convert_megatron_bert_checkpoint.py, and the ranks'
parts are joined.
"""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from bertserve.export.checkpoint import safetensors_file
from bertserve.export.checkpoint.folder import Imported
from bertserve.export.checkpoint.layouts.case import tokenizer_settings
from bertserve.export.checkpoint.weights import unpickle

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from bertserve.export.checkpoint.folder import Folder
    from bertserve.export.checkpoint.layouts.case import Case
    from bertserve.export.checkpoint.safetensors_file import Bits, Tensor

_TRACKER = "latest_checkpointed_iteration.txt"
_RELEASE = "release"
_FILES = ("model_optim_rng.pt", "model_rng.pt")
_DISTRIBUTED = (".metadata", "common.pt", "metadata.json")
_RANK = "mp_rank_"

_QKV = -1
_RULES: tuple[tuple[str, str, int | None], ...] = (
    (r"language_model\.embedding\.word_embeddings\.weight", "bert.embeddings.word_embeddings.weight", 0),
    (r"language_model\.embedding\.position_embeddings\.weight", "bert.embeddings.position_embeddings.weight", None),
    (r"language_model\.embedding\.tokentype_embeddings\.weight", "bert.embeddings.token_type_embeddings.weight", None),
    (r"LAYER\.input_(?:layer)?norm\.(weight|bias)", r"bert.encoder.layer.\1.attention.ln.\2", None),
    (r"LAYER\.(?:self_)?attention\.query_key_value\.(weight|bias)", r"bert.encoder.layer.\1.attention.self.*.\2", _QKV),
    (r"LAYER\.(?:self_)?attention\.dense\.(weight)", r"bert.encoder.layer.\1.attention.output.dense.\2", 1),
    (r"LAYER\.(?:self_)?attention\.dense\.(bias)", r"bert.encoder.layer.\1.attention.output.dense.\2", None),
    (r"LAYER\.post_attention_(?:layer)?norm\.(weight|bias)", r"bert.encoder.layer.\1.ln.\2", None),
    (r"LAYER\.mlp\.dense_h_to_4h\.(weight|bias)", r"bert.encoder.layer.\1.intermediate.dense.\2", 0),
    (r"LAYER\.mlp\.dense_4h_to_h\.(weight)", r"bert.encoder.layer.\1.output.dense.\2", 1),
    (r"LAYER\.mlp\.dense_4h_to_h\.(bias)", r"bert.encoder.layer.\1.output.dense.\2", None),
    (r"language_model\.(?:transformer|encoder)\.final_(?:layer)?norm\.(weight|bias)", r"bert.encoder.ln.\1", None),
    (r"language_model\.pooler\.dense\.(weight|bias)", r"bert.pooler.dense.\1", None),
    (r"lm_head\.dense\.(weight|bias)", r"cls.predictions.transform.dense.\1", None),
    (r"lm_head\.(?:layer)?norm\.(weight|bias)", r"cls.predictions.transform.LayerNorm.\1", None),
    (r"lm_head\.bias", "cls.predictions.bias", 0),
    (r"binary_head\.(weight|bias)", r"cls.seq_relationship.\1", None),
    (r"classification_head\.(weight|bias)", r"classifier.\1", None),
)
"""A tensor's name, Transformers' name, and the axis along which ranks hold parts; None if each holds the whole."""
_LAYER = r"language_model\.(?:transformer|encoder)\.layers\.(\d+)"
_NAMES = [(re.compile(name.replace("LAYER", _LAYER)), own, axis) for name, own, axis in _RULES]

_SIZES = {
    "vocab_size": ("bert.embeddings.word_embeddings.weight", 0),
    "hidden_size": ("bert.embeddings.word_embeddings.weight", 1),
    "max_position_embeddings": ("bert.embeddings.position_embeddings.weight", 0),
    "type_vocab_size": ("bert.embeddings.token_type_embeddings.weight", 0),
    "intermediate_size": ("bert.encoder.layer.0.intermediate.dense.weight", 0),
}
"""Size settings of Transformers, and the tensor and axis that they follow from."""
_SPLITS = {0.0: (0, 1, 2), 1.0: (2, 0, 1), 2.0: (1, 0, 2), 3.0: (1, 0, 2)}
"""By checkpoint version: the axes of the rows for query/key/value, head and component."""
_ONLY: dict[str, tuple[object, ...]] = {
    "pipeline_model_parallel_size": (1,),
    "num_experts": (None, 0, 1),
    "normalization": ("LayerNorm",),
    "apply_layernorm_1p": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "untie_embeddings_and_output_weights": (False,),
    "add_bias_linear": (True,),
    "swiglu": (False,),
    "squared_relu": (False,),
    "group_query_attention": (False,),
    "multi_query_attention": (False,),
}
"""Settings of a training, and the values with which Transformers' Megatron-BERT computes the same."""
_CASES: dict[str, Case] = {"BertWordPieceLowerCase": "uncased", "BertWordPieceCase": "cased"}
"""By `tokenizer_type`."""
_HEADS = {"classifier.weight": "ForSequenceClassification", "cls.predictions.bias": "ForPreTraining"}


def read(folder: Folder, case: Case | None) -> Imported | None:
    """The folder's content; None if it has another layout.

    Raises:
        ExportError: It has this layout and cannot be read.
    """
    iteration = _iteration(folder)
    if iteration is None:
        return None
    files = _files(folder, iteration)
    # Its numbers are not needed yet.
    first = unpickle(files[0], Path(os.devnull), training=True)
    trained: dict[str, Any] = first["settings"].get("args", {})
    _check(folder, trained, len(files))
    shapes = _shapes(folder, first["shapes"], len(files))
    config = _config(folder, trained, shapes)
    _check_heads(folder, config, shapes, len(files))
    version = first["settings"].get("checkpoint_version", 0)
    if version not in _SPLITS:
        raise folder.error(f"checkpoint_version {version!r} is not known; supported: 0, 1.0, 2.0, 3.0")

    @contextmanager
    def tensors() -> Iterator[Mapping[str, Tensor]]:
        with TemporaryDirectory(prefix="bertserve-weights-") as temporary:
            ranks = []
            for number, file in enumerate(files):
                target = Path(temporary) / f"{number}.safetensors"
                if _state(unpickle(file, target, training=True)) != _state(first):
                    raise folder.error(
                        f"{file.parent.name} and {files[0].parent.name} are not from the same training state"
                    )
                ranks.append(safetensors_file.read(target))
            yield _merge(folder, ranks, config["num_attention_heads"], _SPLITS[version])

    known = _CASES.get(str(trained.get("tokenizer_type")))
    stated = {"config.json": config, "tokenizer_config.json": tokenizer_settings(folder, case, known)}
    return Imported(stated, files, tensors)


def _state(answer: Mapping[str, Any]) -> list[object]:
    """State that is equal for all ranks."""
    return [answer["shapes"], *(answer["settings"].get(name) for name in ("checkpoint_version", "iteration"))]


def _iteration(folder: Folder) -> Path | None:
    """The folder with one folder per rank."""
    if folder.has(_TRACKER):
        named = (folder.path / _TRACKER).read_text(encoding="utf-8", errors="replace").strip()
        if named != _RELEASE and not re.fullmatch(r"[0-9]{1,18}", named):
            raise folder.error(f"{_TRACKER} has {named[:40]!r}; expected an iteration or `{_RELEASE}`")
        found = folder.path / (named if named == _RELEASE else f"iter_{int(named):07d}")
        if not found.is_dir():
            raise folder.error(f"{_TRACKER} names {found.name}, which is missing")
        return found
    if any(folder.path.glob(f"{_RANK}*")):
        return folder.path
    held = sorted(path for path in folder.path.glob("*/") if path.name.startswith("iter_") or path.name == _RELEASE)
    if len(held) > 1:
        raise folder.error(f"it has {len(held)} iterations, and no {_TRACKER} that selects one")
    return held[0] if held else None


def _files(folder: Folder, iteration: Path) -> list[Path]:
    """The file of each rank, in order."""
    ranks = sorted(path.name for path in iteration.glob(f"{_RANK}*"))
    if not ranks and any((iteration / name).exists() for name in _DISTRIBUTED):
        raise folder.error(f"{iteration.name} is a distributed checkpoint; convert it to the format `torch`")
    if pipelined := [name for name in ranks if not re.fullmatch(rf"{_RANK}\d\d", name)]:
        raise folder.error(
            f"{pipelined[0]} is from pipeline-parallel training, which is not supported; merge its stages "
            "with Megatron-LM's tools"
        )
    for number in range(max(1, len(ranks))):
        if f"{_RANK}{number:02d}" not in ranks:
            raise folder.error(f"{iteration.name} lacks {_RANK}{number:02d}")
    files = []
    for name in ranks:
        found = [iteration / name / file for file in _FILES if (iteration / name / file).is_file()]
        if not found:
            raise folder.error(f"{name} has no {_FILES[0]}")
        files.append(found[0])
    return files


def _check(folder: Folder, trained: Mapping[str, Any], ranks: int) -> None:
    for name, allowed in _ONLY.items():
        if name in trained and trained[name] not in allowed:
            raise folder.error(f"it was trained with {name} {trained[name]!r}; supported: {allowed[0]!r}")
    parallel = trained.get("tensor_model_parallel_size", trained.get("model_parallel_size", ranks))
    if parallel != ranks:
        raise folder.error(f"it was trained on {parallel} tensor-parallel ranks, but {ranks} are present")


def _shapes(folder: Folder, stored: Mapping[str, Sequence[int]], ranks: int) -> dict[str, list[int]]:
    """Shapes of the joined tensors by Transformers' names; one name stands for queries, keys and values."""
    shapes = {}
    for name, shape in stored.items():
        own, axis = _name(folder, name)
        parted = 0 if axis == _QKV else axis
        if own in shapes or not shape or (parted is not None and parted >= len(shape)):
            raise folder.error(f"{name} with shape {list(shape)} is not a tensor of Megatron-LM's BERT")
        shapes[own] = [size * ranks if side == parted else size for side, size in enumerate(shape)]
    return shapes


def _check_heads(folder: Folder, config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], ranks: int) -> None:
    heads, width = config["num_attention_heads"], config["hidden_size"]
    if heads % ranks or width % heads:
        raise folder.error(f"{heads} attention heads do not divide into {ranks} ranks and a width of {width}")
    for name, shape in shapes.items():
        if "*" in name and shape[0] != 3 * width:
            raise folder.error(f"{name} has {shape[0]} rows for queries, keys and values of {width} each")


def _config(folder: Folder, trained: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model_type": "megatron-bert",
        "architectures": [
            "MegatronBert" + next((kind for head, kind in _HEADS.items() if head in shapes), "Model"),
        ],
        "num_hidden_layers": len([name for name in shapes if name.endswith(".attention.output.dense.weight")]),
        "hidden_act": "gelu_new" if trained.get("openai_gelu") else "gelu",
    }
    for setting, (tensor, side) in _SIZES.items():
        if len(shapes.get(tensor, ())) <= side:
            raise folder.error(f"it has no {tensor} (Transformers' name), so it is not a Megatron-LM BERT")
        config[setting] = shapes[tensor][side]
    for setting, own in {"num_attention_heads": "num_attention_heads", "layernorm_epsilon": "layer_norm_eps"}.items():
        if isinstance(trained.get(setting), int | float):
            config[own] = trained[setting]
    if shapes.get("classifier.weight"):
        config["num_labels"] = shapes["classifier.weight"][0]
    config |= folder.object("config.json")
    heads = config.get("num_attention_heads")
    if heads is None:
        raise folder.error(
            "its files have no training arguments (args); add a config.json with the missing settings, "
            'such as {"num_attention_heads": 16} for NVIDIA\'s model of 345 million parameters'
        )
    for name in ("num_attention_heads", "hidden_size"):
        if not isinstance(config[name], int) or isinstance(config[name], bool) or config[name] < 1:
            raise folder.error(f"{name} must be a positive integer, not {config[name]!r}")
    return config


def _name(folder: Folder, name: str) -> tuple[str, int | None]:
    """Transformers' name of a tensor, and the axis along which ranks hold parts of it."""
    for pattern, own, axis in _NAMES:
        if (match := pattern.fullmatch(name)) is not None:
            return match.expand(own), axis
    raise folder.error(f"it has {name[:200]}, which is not a tensor of Megatron-LM's BERT")


def _merge(
    folder: Folder, ranks: Sequence[Mapping[str, Tensor]], heads: int, split: tuple[int, ...]
) -> dict[str, Tensor]:
    merged = {}
    for stored in ranks[0]:
        name, axis = _name(folder, stored)
        parts = [rank[stored] for rank in ranks]
        if axis is None:
            merged[name] = parts[0]
        elif axis == _QKV:
            for number, one in enumerate(("query", "key", "value")):
                merged[name.replace("*", one)] = _part(parts, number, heads // len(ranks), split)
        else:
            merged[name] = _join(parts, axis)
    return merged


def _join(parts: Sequence[Tensor], axis: int) -> Tensor:
    """Joins the ranks' parts along an axis."""
    shape = list(parts[0].shape)
    shape[axis] *= len(parts)

    def bits() -> Bits:
        return np.concatenate([part.bits() for part in parts], axis)

    return replace(parts[0], shape=tuple(shape), bits=bits)


def _part(parts: Sequence[Tensor], number: int, heads: int, split: tuple[int, ...]) -> Tensor:
    """Queries, keys or values of all ranks.

    Args:
        parts: The rows of all three, for each rank.
        number: Which of the three.
        heads: Heads of a rank.
        split: The axes of the rows for query/key/value, head and component.
    """
    rows, *inputs = parts[0].shape

    def bits() -> Bits:
        sizes = [0, 0, 0]
        for axis, size in zip(split, (3, heads, rows // (3 * heads)), strict=True):
            sizes[axis] = size
        whole = [part.bits().reshape(*sizes, *inputs) for part in parts]
        return np.concatenate([np.take(one, number, split[0]).reshape(-1, *inputs) for one in whole])

    return replace(parts[0], shape=(rows // 3 * len(parts), *inputs), bits=bits)
