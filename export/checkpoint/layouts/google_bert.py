"""BERT's first layout, of TensorFlow 1: Google's (arXiv 1810.04805), and others trained with its code.

`bert_config.json`, `vocab.txt`, and the variables as PREFIX.index with PREFIX.data-00000-of-00001. Names and shapes are
those of Google's modeling.py, run_pretraining.py, run_classifier.py and run_squad.py. Optimizer variables are ignored
by name.
"""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bertserve.export.checkpoint.folder import Imported
from bertserve.export.checkpoint.layouts import tensor_bundle
from bertserve.export.checkpoint.layouts.case import tokenizer_settings

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from bertserve.export.checkpoint.folder import Folder
    from bertserve.export.checkpoint.layouts.case import Case
    from bertserve.export.checkpoint.safetensors_file import Bits, Tensor

_SETTINGS = "bert_config.json"
_STATE = "checkpoint"
_NEWEST = re.compile(r'^model_checkpoint_path:\s*"([^"\n]+)"', re.MULTILINE)
_OBJECTS = "_CHECKPOINTABLE_OBJECT_GRAPH"

_SLOTS = re.compile(r"/(adam_[mv]|lamb_[mv]|accum|(Adam|AdamWeightDecayOptimizer|LAMB|LAMBOptimizer)(_\d+)?)$")
_COUNTERS = re.compile(
    r"(global|local|accum)_step|(current_)?loss_scale|(good|bad)_steps|beta[12]_power|num_(good|bad)_steps"
)
_OWN_NAMES = {
    "output_weights": "classifier.weight",
    "output_bias": "classifier.bias",
    "cls/squad/output_weights": "qa_outputs.weight",
    "cls/squad/output_bias": "qa_outputs.bias",
    "cls/seq_relationship/output_weights": "cls.seq_relationship.weight",
    "cls/seq_relationship/output_bias": "cls.seq_relationship.bias",
    "cls/predictions/output_bias": "cls.predictions.bias",
}
_ENDINGS = {
    "kernel": "weight",
    "gamma": "weight",
    "beta": "bias",
    **{table: f"{table}.weight" for table in ("word_embeddings", "position_embeddings", "token_type_embeddings")},
}
_HEADS = {
    "output_weights": "BertForSequenceClassification",
    "cls/squad/output_weights": "BertForQuestionAnswering",
    "cls/predictions/output_bias": "BertForPreTraining",
}


def read(folder: Folder, case: Case | None) -> Imported | None:
    """The folder's content; None if it has another layout.

    Raises:
        ExportError: It has this layout and cannot be read.
    """
    index = _index(folder)
    if index is None:
        return None
    settings = folder.object(_SETTINGS) | folder.object("config.json")
    if not settings:
        raise folder.error(f"{_SETTINGS} is missing; put it beside {index.name} (it has the model sizes)")
    bundle = tensor_bundle.read(index)
    if _OBJECTS in bundle.entries:
        raise folder.error(f"{index.name} is an object-based TensorFlow 2 checkpoint; supported: TensorFlow 1")
    names = [name for name in bundle.entries if not _SLOTS.search(name) and not _COUNTERS.fullmatch(name)]
    if foreign := sorted(name for name in names if not name.startswith(("bert/", "cls/")) and name not in _OWN_NAMES):
        raise folder.error(f"{index.name} has {foreign[0]}, which is not a variable of Google's BERT")
    held = {name: bundle.tensor(name) for name in names}
    tensors = {_name(name): _transpose(tensor) if name.endswith("/kernel") else tensor for name, tensor in held.items()}
    _check_sizes(folder, bundle, tensors)
    config: dict[str, Any] = {
        "model_type": "bert",
        "architectures": [next((kind for head, kind in _HEADS.items() if head in bundle.entries), "BertModel")],
    }
    if (classifier := tensors.get("classifier.weight")) is not None and classifier.shape:
        config["num_labels"] = classifier.shape[0]
    return Imported(
        {"config.json": {**config, **settings}, "tokenizer_config.json": tokenizer_settings(folder, case)},
        [index, *bundle.files],
        lambda: nullcontext(tensors),
    )


def _index(folder: Folder) -> Path | None:
    found = sorted(folder.path.glob(f"*{tensor_bundle.INDEX}"))
    if not found:
        return None
    state = folder.path / _STATE
    newest = _NEWEST.search(state.read_text(encoding="utf-8", errors="replace")) if state.is_file() else None
    if newest is not None:
        name = f"{newest[1].rpartition('/')[2]}{tensor_bundle.INDEX}"
        if name in {path.name for path in found}:
            return folder.path / name
    if len(found) > 1:
        raise folder.error(
            f"it has {len(found)} checkpoints, such as {found[0].name} and {found[1].name}, "
            f"and no file `{_STATE}` that selects one; keep only the one to export"
        )
    return found[0]


def _name(variable: str) -> str:
    """Transformers' name of a variable."""
    if variable in _OWN_NAMES:
        return _OWN_NAMES[variable]
    path, _, last = variable.rpartition("/")
    return re.sub(r"\blayer_(\d+)\b", r"layer.\1", f"{path}/{_ENDINGS.get(last, last)}").replace("/", ".")


def _transpose(tensor: Tensor) -> Tensor:
    """Transposes a product's matrix: TensorFlow has a column for each output, PyTorch a row."""

    def bits() -> Bits:
        return tensor.bits().T

    return replace(tensor, shape=tensor.shape[::-1], bits=bits)


def _check_sizes(folder: Folder, bundle: tensor_bundle.Bundle, tensors: Mapping[str, Tensor]) -> None:
    """Overlapping variables could fill the memory from a small file."""
    if sum(tensor.size for tensor in tensors.values()) > sum(file.stat().st_size for file in bundle.files):
        raise folder.error(f"{bundle.index.name} is damaged: its variables are larger than its data files")
