"""Opening a Hugging Face checkpoint: what it is, whether it can be exported, and with which limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from export import pooling, vocabulary, weights
from export.errors import ExportError
from export.folder import Folder

if TYPE_CHECKING:
    from collections.abc import Callable

    from export.source import Source

ARCHITECTURES = ("BertModel", "BertForMaskedLM", "BertForPreTraining")
"""Architectures whose encoder can be exported for the task embed; the heads of pre-training are left out."""

_LEAST_LENGTH = 3
SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
)
"""Settings of config.json that must be there and give the encoder its shape."""

_FIXED = {
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
    "quantization_config": None,
    "type_vocab_size": 2,
}
"""Settings of config.json and the only value of each that the fused graph computes; all are BERT's defaults."""


@dataclass(slots=True, frozen=True)
class Checkpoint:
    """A checkpoint that can be exported.

    Attributes:
        source: Where it comes from.
        config: Its config.json.
        sentence: How it makes sentences.
        vocabulary: Its tokenizer.
        weights: Its weight files.
        max_length: Tokens of the longest input, special tokens included.
    """

    source: Source
    config: dict[str, Any]
    sentence: pooling.SentenceConfig
    vocabulary: vocabulary.Vocabulary
    weights: weights.Weights
    max_length: int

    @property
    def architecture(self) -> str:
        """Its class in Transformers."""
        return _named_architecture(self.config)

    @property
    def hidden_size(self) -> int:
        """Components of a vector."""
        return int(self.config["hidden_size"])

    @property
    def layers(self) -> int:
        """Transformer layers."""
        return int(self.config["num_hidden_layers"])

    @property
    def heads(self) -> int:
        """Attention heads of a layer."""
        return int(self.config["num_attention_heads"])


def open_checkpoint(source: Source, max_length: int | None, notice: Callable[[str], None]) -> Checkpoint:
    """Opens a checkpoint and reads everything but its tensors.

    Args:
        source: The checkpoint.
        max_length: The length asked for; None takes the checkpoint's own.
        notice: Told what was assumed.

    Raises:
        ExportError: It is none that can be exported.
    """
    sentence = pooling.read(Folder(source.path))
    config = _config(sentence.encoder)
    if sentence.width not in (None, config["hidden_size"]):
        raise ExportError(
            f"checkpoint {source.path}: the pooling takes vectors of {sentence.width}, "
            f"the model makes vectors of {config['hidden_size']}"
        )
    found = weights.find(sentence.encoder)
    words = vocabulary.read(sentence.encoder, config["vocab_size"], lowercase=sentence.lowercase)
    positions = config["max_position_embeddings"]
    length = max_length or min(sentence.max_length or words.length_limit or positions, positions)
    if not _LEAST_LENGTH <= length <= positions:
        raise ExportError(
            f"checkpoint {source.path}: a maximum length of {length} tokens is not possible; "
            f"the model has {positions} positions, so give one between {_LEAST_LENGTH} and {positions}"
        )
    for assumed in sentence.notices:
        notice(assumed)
    return Checkpoint(source, config, sentence, words, found, length)


def _named_architecture(config: dict[str, Any]) -> str:
    named = config.get("architectures") or "BertModel"
    return str(named[0]) if isinstance(named, list) else str(named)


def _check_architecture(folder: Folder, config: dict[str, Any]) -> None:
    kind, architecture = config.get("model_type"), _named_architecture(config)
    if kind != "bert":
        raise ExportError(f"checkpoint {folder.path}: model_type {kind!r} cannot be exported; supported: 'bert'")
    if architecture not in ARCHITECTURES:
        raise ExportError(
            f"checkpoint {folder.path}: architecture {architecture} cannot be exported; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )


def _config(folder: Folder) -> dict[str, Any]:
    config = folder.object("config.json")
    if not config:
        raise ExportError(f"checkpoint {folder.path}: config.json is missing")
    _check_architecture(folder, config)
    for key in SIZES:
        value = config.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ExportError(
                f"checkpoint {folder.path}: {key} in config.json must be a positive integer, not {value!r}"
            )
    for key, only in _FIXED.items():
        if config.get(key, only) != only:
            raise ExportError(
                f"checkpoint {folder.path}: {key} {config[key]!r} in config.json cannot be exported; "
                f"supported: {only!r}"
            )
    if config["hidden_size"] % config["num_attention_heads"]:
        raise ExportError(
            f"checkpoint {folder.path}: hidden_size in config.json must be a multiple of num_attention_heads"
        )
    return config
