"""What the exporter has to know of a family of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from serving.models.manifest import Task

WORD_EMBEDDING = "embeddings.word_embeddings.weight"

BERT_SIZES = {
    "hidden_size": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "positions": "max_position_embeddings",
    "vocab_size": "vocab_size",
}

BERT_FIXED = {
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
    "quantization_config": None,
}

_CLASSES: dict[Task, str] = {
    "embed": "Model",
    "embed_tokens": "Model",
    "classify": "ForSequenceClassification",
    "rerank": "ForSequenceClassification",
    "answer": "ForQuestionAnswering",
    "tag": "ForTokenClassification",
    "fill_mask": "ForMaskedLM",
}
"""What follows the stem in the name of the class of Transformers that answers a task."""

_SAVED_TASKS: dict[str, Task] = {
    "Model": "embed",
    "ForMaskedLM": "fill_mask",
    "ForSequenceClassification": "classify",
    "ForQuestionAnswering": "answer",
    "ForTokenClassification": "tag",
}
"""The task that a checkpoint of such a class is exported for, unless another is asked for."""


@dataclass(slots=True, frozen=True)
class Family:
    """One family of checkpoints.

    Attributes:
        model_type: As config.json names it.
        stem: What its classes in Transformers begin with.
        prefix: What the names of the encoder's tensors begin with where a head stands beside it.
        heads: What the names of its heads' tensors begin with; a head that the task does not use is left out.
        tied: Tensors of the head over the vocabulary that checkpoints may not store, and which they are the same as.
        word_logits: That head: from a model of Transformers and hidden states to a logit for each word.
        sizes: Our names of the settings that give the encoder its shape, to its own.
        fixed: Settings and the only value of each that the fused graph computes; all are the defaults.
        pretraining: The task of its class `ForPreTraining`; None where it has no such class.
        epsilon: Whether config.json may set the epsilon of the layer normalisations.
        segments: Whether the graph takes the segment of each token.
        first_segment: Whether the model has to be told that every token is of the first segment: without being told it
            gathers the segments by position.
        pooling_layer: Whether its encoder is made with a pooler, which no task of ours uses, unless told otherwise.
        offset_positions: Whether positions are counted from the padding id on, as RoBERTa does.
        projection: Whether embeddings may be narrower than the layers, and projected to their width.
        pre_normalised: Whether a layer normalises its input instead of its output.
        embedding_fusion: Whether ONNX Runtime fuses the embedding into one operator.
    """

    model_type: str
    stem: str
    prefix: str
    heads: tuple[str, ...]
    tied: Mapping[str, str]
    word_logits: Callable[[Any, Any], Any]
    sizes: Mapping[str, str]
    fixed: Mapping[str, Any]
    pretraining: Task | None = None
    epsilon: bool = True
    segments: bool = True
    first_segment: bool = False
    pooling_layer: bool = True
    offset_positions: bool = False
    projection: bool = False
    pre_normalised: bool = False
    embedding_fusion: bool = True

    def class_name(self, task: Task) -> str:
        """The class of Transformers that answers a task."""
        return self.stem + _CLASSES[task]

    def tasks(self) -> dict[str, Task]:
        """The classes of this family that a checkpoint may name, and the task of each."""
        tasks = {self.stem + suffix: task for suffix, task in _SAVED_TASKS.items()}
        return tasks if self.pretraining is None else tasks | {f"{self.stem}ForPreTraining": self.pretraining}
