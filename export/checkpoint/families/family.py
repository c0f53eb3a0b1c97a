"""The description of a model family for the exporter."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from bertserve.export.errors import ExportError
from bertserve.serving.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path


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
"""Activations that can be exported, by Transformers' names, and the operator that each becomes with its bias."""

ALIASES = {"gelu_python": "gelu", "gelu_fast": "gelu_new", "gelu_accurate": "gelu_new", "swish": "silu"}
"""Other names of Transformers for the same functions."""

HEAD_ACTIVATIONS = (*ACTIVATIONS, *ALIASES, "tanh")
"""Activations outside layers: in a head, or in DeBERTa's convolution."""

BERT_EMBEDDING = {"EmbedLayerNormalization": 1}
"""The fused operators of the embedding."""

BERT_LAYER = {"Attention": 1, "SkipLayerNormalization": 2}
"""The fused operators of a layer, beside its activation."""

PLAIN_ATTENTION_LAYER = {"SkipLayerNormalization": 2}
"""The same without fused attention, which cannot change scores, queries or keys."""

BERT_SETTINGS = ("type_vocab_size", "layer_norm_eps", "pad_token_id", "tie_word_embeddings")
"""Settings of BERT and its relatives, beside their sizes."""

FIXED: dict[str, Any] = {
    "is_decoder": False,
    "is_encoder_decoder": False,
    "quantization_config": None,
    "per_layer_config": None,
    "pruned_heads": {},
    "chunk_size_feed_forward": 0,
}
"""For every family: settings that would change its graph, and the only supported value."""

BERT_FIXED = {**FIXED, "position_embedding_type": "absolute", "add_cross_attention": False}

READ = (
    *("model_type", "architectures", "id2label", "num_labels", "problem_type"),
    *("matryoshka_dimensions", "sentence_transformers", "sbert_ce_default_activation_function"),
)
"""For every family: fields of config.json that are read beside its graph's settings."""

UNUSED = frozenset(
    {
        *("attention_probs_dropout_prob", "classifier_dropout", "hidden_dropout_prob", "initializer_range"),
        *("bos_token_id", "eos_token_id", "label2id", "use_cache"),
        *("output_attentions", "output_hidden_states", "return_dict", "dtype", "torch_dtype", "transformers_version"),
    }
)
"""For every family: settings for training, decoders or bookkeeping, which change no answer."""


def require(config: Mapping[str, Any], key: str, *supported: object) -> None:
    """Raises `ValueError` if a setting has an unsupported value; a missing one has its default."""
    if (value := config.get(key)) not in (None, *supported):
        raise ValueError(
            f"{key} {value!r} in config.json cannot be exported; supported: {', '.join(map(repr, supported))}"
        )


@dataclass(slots=True, frozen=True)
class Family:
    """One family of checkpoints.

    Attributes:
        model_type: As in config.json.
        stem: The beginning of its class names in Transformers.
        prefix: The beginning of the encoder's tensor names beside a head.
        own_prefix: The same in checkpoints, if different from Transformers.
        matches: Whether settings belong to this family, if `model_type` alone does not decide.
        heads: The beginnings of its heads' tensor names; unused heads are left out.
        ignored: The beginnings of names of unused tensors.
        renamed: Parts of stored tensor names, and their names in Transformers.
        split: Parts of stored tensor names that hold several of Transformers' tensors, and which, in order.
        added: Tables of which every token gets the first row, and the table beside it, of which it gets one row too.
        zero: Tensors that default to zeros if missing.
        tied: Tensors of the vocabulary head that may be missing, and the tensors that they equal.
        word_logits: The vocabulary head: from a model of Transformers and hidden states to one logit per word.
        sizes: Our names of the size settings, to its own.
        settings: Further settings that are passed to Transformers unchanged.
        names: Transformers' names of settings that have other names.
        derived: Settings of Transformers that follow from others in config.json; a ValueError rejects them.
        derives: The settings that `derived` reads.
        unused: Settings of Transformers' class that change no answer, beside `UNUSED`.
        activation: The name of the setting with the layers' activation.
        activations: Transformers' names of activations that have other names; if set, the only ones.
        usual_activation: Its default.
        head_activation: The activation of the vocabulary head, if different.
        fixed: Settings and their only supported values; all are the defaults.
        pretraining: The task of its class `ForPreTraining`; None if it has no such class.
        segments: Whether the graph takes token types, if config.json has any.
        usual_segments: The default number of token types.
        segmentless: Whether `type_vocab_size` may be 0.
        first_segment: Whether the model must get token types of 0 explicitly, because it would gather them by position.
        pooling_layer: Whether its encoder has a pooler, which no task here uses, by default.
        offset_positions: Whether positions start behind the padding id, as in RoBERTa.
        position_table: Whether positions are rows of a table, which limits the length.
        projection: Whether embeddings may be narrower than layers: `no`, `narrower` (projected if narrower), `always`.
        layer: The fused operators of a layer, beside its activation. Without `Attention`, attention stays in ONNX's own
            operators.
        tasks_without: Tasks without a class in Transformers.
        gated: Whether the activation is multiplied with a product beside it, and so has no bias.
        folded: Whether constant expressions are computed at export.
        products: Matrix products of a layer.
        head_products: Matrix products of a head other than the vocabulary head, beside its last one.
        shared_layers: Whether layers share their weights, which the files hold once.
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
    matches: Callable[[Mapping[str, Any]], bool] = lambda _config: False
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
        """Transformers' class for a task."""
        return self.stem + TASKS[task].head

    def task_of(self, architecture: str) -> str | None:
        """The task of a class of any family; None if its head is unknown."""
        if self.pretraining is not None and architecture.endswith("ForPreTraining"):
            return self.pretraining
        if architecture.endswith("LMHeadModel"):
            return None
        # If several tasks share a head, the first one is the default.
        return next((name for name, task in TASKS.items() if architecture.endswith(task.head)), None)

    def read(self) -> tuple[str, ...]:
        """The settings of config.json that shape the graph, by their own names."""
        named = (*self.sizes.values(), *self.settings, *self.names, self.activation, *self.derives)
        return tuple(sorted({*named} - self.fixed.keys()))

    @contextmanager
    def accepted(self, path: Path, config: Mapping[str, Any]) -> Iterator[None]:
        """Has Transformers take settings in the block.

        Raises:
            ExportError: It rejects them. Its sentence seldom names a null, which is not the default.
        """
        try:
            yield
        except Exception as error:
            named = [key for key in sorted({*READ, *self.read()}) if key in config and config[key] is None]
            nulls = "".join(f"; config.json sets {key} to null" for key in named)
            raise ExportError(
                f"checkpoint {path}: Transformers cannot read config.json: {' '.join(str(error).split())}{nulls}"
            ) from error
