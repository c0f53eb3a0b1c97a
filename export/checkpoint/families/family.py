"""What the exporter has to know of a family of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from serving.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


WORD_EMBEDDING = "embeddings.word_embeddings.weight"

BERT_SIZES = {
    "hidden_size": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "positions": "max_position_embeddings",
    "vocab_size": "vocab_size",
}

ACTIVATIONS = {"gelu": "BiasGelu", "gelu_new": "FastGelu", "gelu_pytorch_tanh": "FastGelu", "relu": None, "silu": None}
"""The activations that are exported, by Transformers' names, and the operator that each becomes with its bias."""

ALIASES = {"gelu_python": "gelu", "gelu_fast": "gelu_new", "gelu_accurate": "gelu_new", "swish": "silu"}
"""Other names of Transformers for the same functions."""

HEAD_ACTIVATIONS = (*ACTIVATIONS, *ALIASES, "tanh")
"""What may follow a product that is no layer's: in a head, or in DeBERTa's convolution."""

BERT_EMBEDDING = {"EmbedLayerNormalization": 1}
"""The fused operators of the embedding."""

BERT_LAYER = {"Attention": 1, "SkipLayerNormalization": 2}
"""The fused operators of a layer beside its activation's."""

PLAIN_ATTENTION_LAYER = {"SkipLayerNormalization": 2}
"""The same where the fused attention has no place for what is added to scores or done to queries and keys."""

BERT_SETTINGS = ("type_vocab_size", "layer_norm_eps", "pad_token_id", "tie_word_embeddings")
"""What BERT and its relatives are told beside their sizes."""

FIXED: dict[str, Any] = {
    "is_decoder": False,
    "is_encoder_decoder": False,
    "quantization_config": None,
    "per_layer_config": None,
    "pruned_heads": {},
}
"""For every family: settings that would change its graph, and the only value of each that is built."""

BERT_FIXED = {**FIXED, "position_embedding_type": "absolute", "add_cross_attention": False}

READ = (
    *("model_type", "architectures", "id2label", "num_labels", "problem_type"),
    *("matryoshka_dimensions", "sentence_transformers", "sbert_ce_default_activation_function"),
)
"""For every family: what config.json says beside the settings of its graph."""

UNUSED = frozenset(
    {
        *("attention_probs_dropout_prob", "classifier_dropout", "hidden_dropout_prob", "initializer_range"),
        *("bos_token_id", "eos_token_id", "label2id", "use_cache", "chunk_size_feed_forward"),
        *("output_attentions", "output_hidden_states", "return_dict", "dtype", "torch_dtype", "transformers_version"),
    }
)
"""For every family: settings that change no answer, since they belong to training, to decoders or to bookkeeping."""


def require(config: Mapping[str, Any], key: str, *supported: object) -> None:
    """Raises `ValueError` where a setting has a value that is not built; none at all stands for the default."""
    if (value := config.get(key)) not in (None, *supported):
        raise ValueError(
            f"{key} {value!r} in config.json cannot be exported; supported: {', '.join(map(repr, supported))}"
        )


@dataclass(slots=True, frozen=True)
class Family:
    """One family of checkpoints.

    Attributes:
        model_type: As config.json names it.
        stem: What its classes in Transformers begin with.
        prefix: What the names of the encoder's tensors begin with where a head stands beside it.
        own_prefix: What checkpoints begin the names of its tensors with, where not as Transformers does.
        told: Whether settings are of this family, where `model_type` alone does not say so.
        heads: What the names of its heads' tensors begin with; a head that the task does not use is left out.
        ignored: What names of tensors begin with that checkpoints may hold without a use for them.
        renamed: Parts of the names of stored tensors, and what Transformers calls them since.
        split: Parts of the names of stored tensors that hold several of Transformers', and which, in their order.
        added: Tables of which every token gets the first row, and the table beside it, of which it gets one row too.
        zero: Tensors that checkpoints may leave out, which stands for zeros.
        tied: Tensors of the head over the vocabulary that checkpoints may not store, and which they are the same as.
        word_logits: That head: from a model of Transformers and hidden states to a logit for each word.
        sizes: Our names of the settings that give the encoder its shape, to its own.
        settings: Further settings that are handed to Transformers as they stand.
        names: What Transformers calls settings that have names of their own.
        derived: Settings of Transformers that config.json says in other words; a ValueError tells what is not possible.
        derives: The settings that `derived` looks at.
        unused: Settings of Transformers' class that change no answer, beside `UNUSED`.
        activation: The name of the setting that names the layers' activation.
        activations: What Transformers calls activations that have names of their own; all that there are, if any.
        usual_activation: What it is where config.json does not say.
        head_activation: That of the head over the vocabulary, where it is not the layers'.
        fixed: Settings and the only value of each that is built; all are the defaults.
        pretraining: The task of its class `ForPreTraining`; None where it has no such class.
        segments: Whether the graph takes the segment of each token, if config.json names any.
        usual_segments: How many there are where config.json does not say.
        segmentless: Whether there may be none, which `type_vocab_size` 0 says.
        first_segment: Whether the model has to be told that every token is of the first segment: without being told it
            gathers the segments by position.
        pooling_layer: Whether its encoder is made with a pooler, which no task of ours uses, unless told otherwise.
        offset_positions: Whether positions are counted from the padding id on, as RoBERTa does.
        position_table: Whether positions are rows of a table, beyond which no input can go.
        projection: Whether embeddings may be narrower than the layers: `no`, `narrower` for projected to the layers'
            width where they are, `always` for projected whatever their width.
        layer: The fused operators of a layer beside its activation's. Without `Attention` among them, attention stays
            in ONNX's own operators.
        tasks_without: Those that Transformers has no class for.
        gated: Whether the activation is multiplied with a product beside it, so that it has no bias of its own.
        folded: Whether constants are computed at the export that would be anew for every text.
        products: A layer's products with a matrix.
        head_products: Those of a head that is not over the vocabulary, beside its last one.
        shared_layers: Whether layers are the same weights over and over, which the files hold once.
        embedding: The fused operators of the embedding.
    """

    model_type: str
    stem: str
    prefix: str
    heads: tuple[str, ...]
    tied: Mapping[str, str]
    word_logits: Callable[[Any, Any], Any]
    sizes: Mapping[str, str]
    fixed: Mapping[str, Any]
    own_prefix: str = ""
    told: Callable[[Mapping[str, Any]], bool] = lambda _config: False
    settings: tuple[str, ...] = BERT_SETTINGS
    names: Mapping[str, str] = field(default_factory=dict)
    derived: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda _config: {}
    derives: tuple[str, ...] = ()
    unused: frozenset[str] = frozenset()
    activation: str = "hidden_act"
    activations: Mapping[str, str] = field(default_factory=dict)
    usual_activation: str = "gelu"
    head_activation: str | None = None
    pretraining: str | None = None
    segments: bool = True
    usual_segments: int = 2
    segmentless: bool = False
    first_segment: bool = False
    pooling_layer: bool = True
    offset_positions: bool = False
    position_table: bool = True
    projection: Literal["no", "narrower", "always"] = "no"
    embedding: Mapping[str, int] = field(default_factory=lambda: BERT_EMBEDDING)
    layer: Mapping[str, int] = field(default_factory=lambda: BERT_LAYER)
    products: int = 6
    head_products: int = 0
    ignored: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    split: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    added: Mapping[str, str] = field(default_factory=dict)
    zero: frozenset[str] = frozenset()
    tasks_without: frozenset[str] = frozenset()
    gated: bool = False
    folded: bool = False
    shared_layers: bool = False

    def class_name(self, task: str) -> str:
        """The class of Transformers that answers a task."""
        return self.stem + TASKS[task].head

    def task_of(self, architecture: str) -> str | None:
        """The task of a class of any family that a checkpoint may name; None where its head is not known."""
        if self.pretraining is not None and architecture.endswith("ForPreTraining"):
            return self.pretraining
        if architecture.endswith("LMHeadModel"):
            return None
        # Of several tasks with one head it is the first, unless another is asked for.
        return next((name for name, task in TASKS.items() if architecture.endswith(task.head)), None)

    def read(self) -> tuple[str, ...]:
        """The settings of config.json that shape the graph, by their own names."""
        named = (*self.sizes.values(), *self.settings, *self.names, self.activation, *self.derives)
        return tuple(sorted({*named} - self.fixed.keys()))
