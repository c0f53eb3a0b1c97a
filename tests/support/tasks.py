"""A small random model of every task: the PyTorch model, and a bundle of it for a server."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from tokenizers import Tokenizer

from bertserve.export.progress import quiet
from bertserve.serving import tasks as known_tasks
from bertserve.serving.models.bundle import BundleWriter, file_entry
from bertserve.serving.models.manifest import (
    SCHEMA_VERSION,
    Artifact,
    Invariance,
    Manifest,
    Parity,
    Source,
)
from bertserve.serving.records import IDS, MASK, POSITIONS, TYPES
from tests.support import traced
from tests.support.checkpoints import HEADS, stripped_tokenizer, vocabulary
from tests.support.models import kept
from tests.support.specs import parts

if TYPE_CHECKING:
    from bertserve.serving.models.manifest import Target

MAX_LENGTH = 64
HIDDEN_SIZE = 32
CANDIDATES = 8
ACTIVE = len(vocabulary())
"""All words of the vocabulary, so that no weight is left out."""
LABELS: dict[str, tuple[str, ...]] = {
    "classify": ("calm", "glad", "sad"),
    "tag": ("O", "B-place", "I-place", "B-thing", "I-thing"),
}
TASKS = tuple(known_tasks.TASKS)
_OPSET = 17
_TRACED = "model.onnx"


@dataclass(frozen=True)
class TinyModel:
    task: str
    model: Any
    tokenizer: transformers.PreTrainedTokenizerFast

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(self.model.config.id2label.values()) if self.task in LABELS else ()


def tiny_model(task: str, seed: int = 0, labels: tuple[str, ...] = ()) -> TinyModel:
    """A random BERT with the task's head, and other labels than the task's usual ones where there are some."""
    # Of the other heads only the one for questions reads the number of labels: start and end.
    labels = labels or LABELS.get(task, ("score",) if task == "rerank" else ("start", "end"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = transformers.BertConfig(
            vocab_size=len(vocabulary()),
            hidden_size=HIDDEN_SIZE,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=MAX_LENGTH,
            initializer_range=0.4,  # wide, so that answers differ from input to input
            id2label=dict(enumerate(labels)),
            label2id={label: index for index, label in enumerate(labels)},
            attn_implementation="eager",
        )
        model = getattr(transformers, f"Bert{HEADS[task]}")(config).eval()
        for tensor in model.parameters():
            if tensor.ndim == 1:
                tensor.data.add_(torch.randn_like(tensor) * 0.1)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(stripped_tokenizer()),
        model_max_length=MAX_LENGTH,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **{f"{role}_token": f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep", "mask")},
    )
    return TinyModel(task, model, tokenizer)


def write_bundle(
    repository: Path,
    tiny: TinyModel,
    name: str | None = None,
    *,
    proven: bool = True,
    second: TinyModel | None = None,
    **fields: Any,
) -> Path:
    """Writes the model as a bundle that a server opens, called after its task.

    `proven` claims that it was compared with PyTorch. The artifact for OpenVINO computes `second`, if there is one:
    another model tells by its answers who gave them. `fields` are further ones of its manifest, such as prompts.
    """
    task, labels = tiny.task, tiny.labels
    sizes = {"hidden_size": HIDDEN_SIZE, "labels": len(labels), "candidates": CANDIDATES, "active": ACTIVE}
    inputs, outputs = (
        known_tasks.TASKS[task].graph_inputs(segments=True),
        known_tasks.TASKS[task].graph_outputs(**sizes),
    )
    with BundleWriter(repository, name or task) as writer:
        graph = writer.path / "model.fp32.onnx"
        _write_graph(tiny, graph)
        graphs: list[tuple[Path, Target]] = [(graph, "cpu")]
        if second is not None:
            graphs.append((writer.path / "model.fp32.openvino.onnx", "openvino"))
            _write_graph(second, graphs[1][0])
        (writer.path / "tokenizer.json").write_text(stripped_tokenizer())
        artifacts = tuple(
            Artifact(
                file=entry.file,
                precision="fp32",
                target=target,
                sha256=entry.sha256,
                size_bytes=entry.size_bytes,
                batch_invariant=proven,
                parity=Parity(1, 0.0, 1.0, 1.0, 1.0) if proven else None,
                invariance=Invariance(1, 0.0, 1.0) if proven else None,
                operators={},
            )
            for entry, target in ((file_entry(path), target) for path, target in graphs)
        )
        special = {role: vocabulary()[f"[{role.upper()}]"] for role in ("pad", "unk", "cls", "sep", "mask")}
        return writer.publish(
            Manifest(
                schema_version=SCHEMA_VERSION,
                model=name or task,
                version=writer.version,
                task=task,
                hidden_size=HIDDEN_SIZE,
                vocab_size=len(vocabulary()),
                max_length=MAX_LENGTH,
                special_ids=special,
                inputs=inputs,
                outputs=outputs,
                artifacts=artifacts,
                files=(file_entry(writer.path / "tokenizer.json"),),
                source=Source(name=task, architecture=type(tiny.model).__name__, sha256="0" * 64),
                tools={},
                created="2026-01-01T00:00:00Z",
                **{**parts(task, labels), **fields},
            )
        ).path


def _write_graph(tiny: TinyModel, path: Path) -> None:
    """Writes the graph; it is traced once for each state of the model, the code and the libraries, and then kept."""
    inputs = [tensor.name for tensor in known_tasks.TASKS[tiny.task].graph_inputs(segments=True)]
    outputs = known_tasks.TASKS[tiny.task].graph_outputs(
        hidden_size=HIDDEN_SIZE, labels=len(tiny.labels), candidates=CANDIDATES, active=ACTIVE
    )
    axes = {name: {0: "batch", 1: "masks" if name == POSITIONS else "sequence"} for name in inputs}
    for spec in outputs:
        varying = {1: "masks" if tiny.task == "fill_mask" else "sequence"} if spec.shape[1:2] == (-1,) else {}
        axes[spec.name] = {0: "batch", **varying}
    options = {
        "input_names": inputs,
        "output_names": [spec.name for spec in outputs],
        "dynamic_axes": axes,
        "opset_version": _OPSET,
    }
    versions = (torch.__version__, transformers.__version__, tiny.model.config.to_json_string())
    key = hashlib.sha256(repr((versions, tiny.task, CANDIDATES, options)).encode())
    for source in (__file__, traced.__file__):
        key.update(Path(source).read_bytes())
    for name, tensor in tiny.model.state_dict().items():
        key.update(name.encode() + tensor.numpy().tobytes())
    folder = kept(f"traced-{key.hexdigest()[:16]}", partial(_trace, tiny, options))
    shutil.copyfile(folder / _TRACED, path)


def _trace(tiny: TinyModel, options: dict[str, Any], folder: Path) -> None:
    ids = torch.arange(16, dtype=torch.int32).reshape(2, 8)
    example = {IDS: ids, MASK: torch.ones_like(ids), TYPES: torch.zeros_like(ids), POSITIONS: ids[:, :3] % 8}
    with quiet():
        torch.onnx.export(
            traced.TaskOutputs(tiny.model, tiny.task, ACTIVE if tiny.task == "embed_sparse" else CANDIDATES).eval(),
            tuple(example[name] for name in options["input_names"]),
            folder / _TRACED,
            dynamo=False,
            **options,
        )
