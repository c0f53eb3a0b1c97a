"""Exports the encoder with the task's head, or with pooling and later modules, from PyTorch to ONNX."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers

from bertserve.export.graph import architectures, tensors
from bertserve.export.graph.editor import GraphEditor
from bertserve.export.graph.fold import fold
from bertserve.export.graph.sentence_head import SentenceHead
from bertserve.export.graph.sparse_head import SparseHead
from bertserve.export.graph.token_heads import TokenHeads
from bertserve.export.progress import quiet
from bertserve.export.tasks import EXPORTS
from bertserve.serving.engine.specs import ModelSpec
from bertserve.serving.models.bundle import data_entry
from bertserve.serving.models.verified_dir import digest
from bertserve.serving.records import IDS, MASK, POSITIONS, TYPES
from bertserve.serving.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from bertserve.export.checkpoint.reader import Checkpoint
    from bertserve.serving.records import EncodedText, Row, TensorSpec

OPSET = 17
_LONGEST_TEXTS = 32
_ACTIVE_STEP = 64
_DTYPES = {"int32": np.int32, "float32": np.float32}


class TaskModel(torch.nn.Module):
    """A model of Transformers with one task's raw answer.

    Called with the graph's inputs, integers [batch, sequence] (mask positions [batch, masks]), it returns the graph's
    outputs, in the order of the two specifications.
    """

    def __init__(self, model: torch.nn.Module, checkpoint: Checkpoint) -> None:
        super().__init__()
        self.model = model
        self.inputs = inputs(checkpoint)
        self.outputs = outputs(checkpoint)
        self.family = checkpoint.encoder.family
        self.candidates = checkpoint.candidates
        self._forward = EXPORTS[checkpoint.task].forward
        self._first_segment = checkpoint.first_segment
        self.sentence = SentenceHead(checkpoint) if checkpoint.has_modules else None
        self.sparse = SparseHead(model, checkpoint) if checkpoint.active else None
        self.heads = TokenHeads(checkpoint) if checkpoint.token_heads else None
        self._mask_id = checkpoint.vocabulary.special_ids.get("mask", -1)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The raw answer to a batch."""
        named = {spec.name: tensor for spec, tensor in zip(self.inputs, tensors, strict=True)}
        types = named.get(TYPES)
        if types is None and self._first_segment:
            types = torch.zeros_like(named[IDS])
        common = {"input_ids": named[IDS], "attention_mask": named[MASK]}
        if types is not None:
            common["token_type_ids"] = types
        return self._forward(self, common, named)

    def answer(self, text: EncodedText) -> Row:
        """PyTorch's answer to one text alone: its part of every output."""
        ids = torch.tensor([text.ids], dtype=torch.int64)
        mask = (ids >= 0).long()
        ids = torch.where(ids < 0, ~ids, ids)
        types = torch.zeros_like(ids) if text.type_ids is None else torch.tensor([text.type_ids], dtype=torch.int64)
        masks = (ids == self._mask_id).nonzero()[:, 1:].T
        tensors = {IDS: ids, MASK: mask, TYPES: types, POSITIONS: masks}
        with torch.inference_mode():
            answers = self(*(tensors[spec.name] for spec in self.inputs))
        return tuple(
            tensor[0].numpy().astype(_DTYPES[spec.dtype]) for spec, tensor in zip(self.outputs, answers, strict=True)
        )


def inputs(checkpoint: Checkpoint) -> tuple[TensorSpec, ...]:
    return TASKS[checkpoint.task].graph_inputs(segments=checkpoint.segments)


def outputs(checkpoint: Checkpoint) -> tuple[TensorSpec, ...]:
    return TASKS[checkpoint.task].graph_outputs(
        *(TASKS[task] for task in checkpoint.also),
        hidden_size=checkpoint.dimensions,
        labels=len(checkpoint.labels.names),
        candidates=checkpoint.candidates,
        active=checkpoint.active,
        token_size=checkpoint.token_heads[-1].columns if checkpoint.token_heads else 0,
    )


def spec_of(checkpoint: Checkpoint, path: Path) -> ModelSpec:
    """A graph of a checkpoint as an engine loads it to be proven."""
    data = data_entry(path)
    return ModelSpec(
        name=path.name,
        path=str(path),
        sha256=digest(path),
        data_sha256="" if data is None else data.sha256,
        # One wide lane takes padding and batches.
        batch_invariant=True,
        vocab_size=checkpoint.encoder.vocab_size,
        max_length=checkpoint.max_length,
        special_ids=checkpoint.vocabulary.special_ids,
        unattended=checkpoint.multi_vector is not None and checkpoint.multi_vector.unattended,
        inputs=tuple(tensor.name for tensor in inputs(checkpoint)),
        outputs=outputs(checkpoint),
    )


def load(checkpoint: Checkpoint) -> TaskModel:
    """Builds the model and fills it with the checkpoint's weights.

    Raises:
        ExportError: The weights do not fit this model.
    """
    name = checkpoint.encoder.family.class_name(checkpoint.task)
    with quiet(), torch.device("meta"):  # a size of config.json takes no memory before the weights have it
        expected = _build(getattr(transformers, name), checkpoint).state_dict()
    weights = tensors.read(
        checkpoint.encoder.weights,
        expected,
        checkpoint.encoder.family,
        name,
        tied=bool(checkpoint.encoder.config.get("tie_word_embeddings", True)),
        body_only=TASKS[checkpoint.task].headless,
    )
    with quiet(), torch.random.fork_rng(devices=[]):
        model = _build(getattr(transformers, name), checkpoint)
    # Assigned, not copied: a large model would be in memory twice.
    model.load_state_dict(weights, assign=True)
    return TaskModel(model, checkpoint).eval()


def untrained(checkpoint: Checkpoint) -> TaskModel:
    """The same with random weights for timing, reproducible and without reading the checkpoint's files."""
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _build(getattr(transformers, checkpoint.encoder.family.class_name(checkpoint.task)), checkpoint)
        for name, tensor in model.named_parameters():
            # Biases start as 0, and a graph could drop zero biases.
            if tensor.ndim == 1:
                tensor.data.normal_(mean=float("orm" in name and name.endswith("weight")), std=0.02)
    return TaskModel(model, checkpoint).eval()


def _build(kind: Any, checkpoint: Checkpoint) -> torch.nn.Module:  # noqa: ANN401  a class of Transformers
    family, config = checkpoint.encoder.family, checkpoint.encoder.config
    handed = (*family.sizes.values(), *family.settings, *family.names)
    # Null is a value: to Transformers it is not the default of a missing setting.
    settings = {family.names.get(key, key): config[key] for key in handed if key in config}
    settings[family.names.get(family.activation, family.activation)] = checkpoint.encoder.activation
    settings |= family.derived(config)
    task = TASKS[checkpoint.task]
    if task.part in {"labels", "activation"}:
        settings["num_labels"] = len(checkpoint.labels.names) or 1
    has_pooler = task.headless and family.pooling_layer
    with family.accepted(checkpoint.source.path, config):
        if not family.own_prefix:
            # Transformers also rejects settings that this graph does not read.
            with torch.device("meta"):
                kind(kind.config_class.from_dict(deepcopy(config)))
        # The exporter and the fusions know only this form of attention.
        built = kind.config_class(**settings, attn_implementation="eager")
        model: torch.nn.Module = kind(built, add_pooling_layer=False) if has_pooler else kind(built)
    architectures.adapt(model, checkpoint)
    return model


def answers(
    model: TaskModel, texts: Sequence[EncodedText], *, threads: int, count: Callable[[int, int], None]
) -> list[Row]:
    """PyTorch's answers to the texts, each alone.

    One text per thread, with PyTorch itself on one thread: its own threads wait for one another at every operator,
    which took thirty times as long on a busy machine.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(threads)
    rows = []
    try:
        for row in pool.map(model.answer, texts):
            rows.append(row)
            count(len(rows), len(texts))
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)
    return rows


def limit_active(
    model: TaskModel, checkpoint: Checkpoint, texts: Sequence[EncodedText], most: int | None, *, threads: int
) -> Checkpoint:
    """Limits the weights of words that a sparse encoder's graph returns for each text.

    Without a limit of the checkpoint's own, a text may have twice as many as any of the longest texts, and a query
    whose weights are looked up one for each of its tokens.
    """
    active = checkpoint.active
    if checkpoint.sentence.sparse is not None and checkpoint.sentence.sparse.max_active_dims is None:
        longest = sorted(texts, key=lambda text: -len(text.ids))[:_LONGEST_TEXTS]
        rows = answers(model, longest, threads=threads, count=lambda _done, _total: None)
        largest = max(int(np.count_nonzero(weights)) for _, weights in rows)
        looked_up = checkpoint.max_length if checkpoint.query_weights is not None else 0
        active = min(active, max(looked_up, max(1, -(-2 * largest // _ACTIVE_STEP)) * _ACTIVE_STEP))
    limited = replace(checkpoint, active=active if most is None else min(active, most))
    if model.sparse is not None:
        model.sparse.active = limited.active
    model.outputs = outputs(limited)
    return limited


def write(model: TaskModel, path: Path) -> None:
    """Writes the ONNX graph.

    Inputs and outputs are as in the manifest; integers are int32 (int64 would cost casts inside). Weights are in other
    files of the folder.
    """
    example = torch.arange(16, dtype=torch.int32).reshape(2, 8) % 4 + 2
    mask = torch.tensor([[1] * 8, [1] * 5 + [0] * 3], dtype=torch.int32)
    tensors = {IDS: example, MASK: mask, TYPES: torch.zeros_like(example), POSITIONS: example[:, :3]}
    with quiet():
        torch.onnx.export(
            model,
            tuple(tensors[spec.name] for spec in model.inputs),
            # The exporter writes external data only for a path given as a string.
            str(path),
            input_names=[spec.name for spec in model.inputs],
            output_names=[spec.name for spec in model.outputs],
            dynamic_axes={
                **{spec.name: _axes(spec, masks=spec.name == POSITIONS) for spec in model.inputs},
                **{spec.name: _axes(spec, masks=bool(model.candidates)) for spec in model.outputs},
            },
            opset_version=OPSET,
            # The fusions match the output of the tracing exporter.
            dynamo=False,
        )
    editor = GraphEditor(path, path)
    for output, spec in zip(editor.graph.output, model.outputs, strict=True):
        # The exporter loses sizes behind some operators, such as a slice of a normalized vector.
        for axis, size in zip(output.type.tensor_type.shape.dim, spec.shape, strict=True):
            if size != -1:
                axis.dim_value = size
    editor.move_out()
    if model.family.folded:
        fold(editor)
    if model.family.shared_layers:
        editor.share_equal()
    editor.save()


def _axes(spec: TensorSpec, *, masks: bool) -> dict[int, str]:
    names = ("batch", "masks" if masks else "sequence")
    return {axis: names[axis] for axis, size in enumerate(spec.shape) if size == -1}
