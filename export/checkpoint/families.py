"""What is known of each architecture: its settings, its heads, and what its graph fuses to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from serving.models.manifest import Task

_TASKS: dict[str, Task] = {
    "Model": "embed",
    "ForMaskedLM": "fill_mask",
    "ForPreTraining": "fill_mask",
    "ForSequenceClassification": "classify",
    "ForQuestionAnswering": "answer",
    "ForTokenClassification": "tag",
}
"""What follows an architecture's stem in the names of Transformers, and the task of that head."""

_HEADS: dict[Task, str] = {
    "embed": "Model",
    "embed_tokens": "Model",
    "classify": "ForSequenceClassification",
    "rerank": "ForSequenceClassification",
    "answer": "ForQuestionAnswering",
    "tag": "ForTokenClassification",
    "fill_mask": "ForMaskedLM",
}

_BERT_SIZES = {
    "hidden_size": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "positions": "max_position_embeddings",
    "vocab_size": "vocab_size",
}

_BERT_FIXED = {
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
    "quantization_config": None,
}


@dataclass(slots=True, frozen=True)
class Architecture:
    """One family of checkpoints.

    Attributes:
        model_type: As config.json names it.
        stem: What its classes in Transformers begin with.
        prefix: What the names of the encoder's tensors begin with where a head stands beside it.
        sizes: Our names of the settings that give the encoder its shape, to its own.
        fixed: Settings and the only value of each that the fused graph computes; all are the defaults.
        epsilon: Whether config.json may set the epsilon of the layer normalisations.
        segments: Whether the graph takes the segment of each token.
        offset_positions: Whether positions are counted from the padding id on, as RoBERTa does.
        projection: Whether embeddings may be narrower than the layers, and projected to their width.
        pre_normalised: Whether a layer normalises its input instead of its output.
        embedding_fusion: Whether ONNX Runtime fuses the embedding into one operator.
    """

    model_type: str
    stem: str
    prefix: str
    sizes: Mapping[str, str] = field(default_factory=lambda: _BERT_SIZES)
    fixed: Mapping[str, Any] = field(default_factory=lambda: {**_BERT_FIXED, "type_vocab_size": 2})
    epsilon: bool = True
    segments: bool = True
    offset_positions: bool = False
    projection: bool = False
    pre_normalised: bool = False
    embedding_fusion: bool = True

    def class_name(self, task: Task) -> str:
        """The class of Transformers that answers a task."""
        return self.stem + _HEADS[task]

    def tasks(self) -> dict[str, Task]:
        """The classes of this family that a checkpoint may name, and the task of each."""
        tasks = {self.stem + suffix: task for suffix, task in _TASKS.items()}
        if self.model_type == "electra":
            # Its pre-training tells replaced tokens from real ones, which is none of our tasks.
            tasks["ElectraForPreTraining"] = "embed"
        if self.model_type in {"distilbert", "roberta"}:
            del tasks[f"{self.stem}ForPreTraining"]
        return tasks


ARCHITECTURES = {
    family.model_type: family
    for family in (
        Architecture("bert", "Bert", "bert."),
        Architecture(
            "distilbert",
            "DistilBert",
            "distilbert.",
            sizes={
                "hidden_size": "dim",
                "layers": "n_layers",
                "heads": "n_heads",
                "intermediate_size": "hidden_dim",
                "positions": "max_position_embeddings",
                "vocab_size": "vocab_size",
            },
            fixed={"activation": "gelu", "quantization_config": None},
            epsilon=False,
            segments=False,
        ),
        Architecture(
            "roberta",
            "Roberta",
            "roberta.",
            fixed=_BERT_FIXED,
            segments=False,
            offset_positions=True,
            embedding_fusion=False,
        ),
        Architecture("electra", "Electra", "electra.", projection=True),
        Architecture("megatron-bert", "MegatronBert", "bert.", pre_normalised=True, embedding_fusion=False),
    )
}
"""Every architecture that can be exported, by its model_type."""
