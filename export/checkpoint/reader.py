"""Opens a Hugging Face checkpoint: its task, whether it can be exported, and its limits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from export.checkpoint import layouts, other_kinds, pooling, probes, vocabulary, weights
from export.checkpoint.families import FAMILIES, family_of
from export.checkpoint.families.family import ACTIVATIONS, ALIASES, require
from export.checkpoint.folder import Folder
from export.checkpoint.labels import REGRESSION, Asked, Labels, read_activation, read_labels, task_of_head
from export.errors import ExportError
from export.texts import corpus
from serving.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from export.checkpoint.families.family import Family
    from export.checkpoint.layouts.case import Case
    from export.checkpoint.source import Source
    from serving.models.manifest import Activation
    from serving.records import EncodedText

CANDIDATES = 100
"""Candidates of fill_mask for each mask, unless the vocabulary is smaller."""

_WORDS = ("vocab.txt", "merges.txt", "*.model")
"""Tokenizer files that are not JSON."""

_MIN_LENGTH = 3
_OF_SENTENCE_TRANSFORMERS = frozenset({"default_prompt", "activation"})
"""Tasks that users run with Sentence Transformers; the others run with Transformers."""

_NO_LABELS = Labels((), multi_label=False)


@dataclass(slots=True, frozen=True)
class Checkpoint:
    """A checkpoint that can be exported.

    Attributes:
        source: Its origin.
        config: Its config.json.
        family: Its architecture.
        task: The task of the export.
        sentence: How it computes sentence embeddings.
        vocabulary: Its tokenizer.
        weights: Its weight files.
        labels: Its labels, for the tasks classify and tag.
        max_length: Maximum tokens of an input, including special tokens.
        matryoshka: Vector sizes that requests may truncate to; any size if empty.
        score_activation: The activation of scores, for the task rerank.
    """

    source: Source
    config: dict[str, Any]
    family: Family
    task: str
    sentence: pooling.SentenceConfig
    vocabulary: vocabulary.Vocabulary
    weights: weights.Weights
    labels: Labels
    max_length: int
    matryoshka: tuple[int, ...] = ()
    score_activation: Activation = "sigmoid"

    @property
    def facts(self) -> frozenset[str]:
        """The fields of a manifest that belong to its task."""
        return TASKS[self.task].facts

    @property
    def architecture(self) -> str:
        """The class in its configuration, which need not be one of Transformers."""
        return _named_architecture(self.config, self.family)

    def size(self, name: str) -> int:
        """One of the sizes of `Family.sizes`, by our name."""
        return int(self.config[self.family.sizes[name]])

    @property
    def hidden_size(self) -> int:
        return self.size("hidden_size")

    @property
    def dimensions(self) -> int:
        """Size of a text's vector for the task embed; of a token's vector for others."""
        return self.sentence.dimensions(self.hidden_size) if "pooling" in self.facts else self.hidden_size

    @property
    def layers(self) -> int:
        return self.size("layers") * int(self.family.derived(self.config).get("inner_group_num", 1))

    @property
    def stored_layers(self) -> int:
        """Layers with weights of their own."""
        if not self.family.shared_layers:
            return self.layers
        counts = self.family.derived(self.config)
        return int(counts["num_hidden_groups"] * counts["inner_group_num"])

    @property
    def heads(self) -> int:
        """Attention heads of a layer."""
        return self.size("heads")

    @property
    def embedding_size(self) -> int:
        """Size of a word's vector before the layers."""
        return self.hidden_size if self.family.projection == "no" else self.size("embedding_size")

    @property
    def known_segments(self) -> int:
        """Number of token types; 0 if there are none."""
        segments = self.config.get("type_vocab_size")
        return self.family.usual_segments if segments is None else int(segments)

    @property
    def segments(self) -> bool:
        """Whether the graph takes token types."""
        takes_them = self.family.segments or (self.family.first_segment and self.vocabulary.has_segments)
        return takes_them and self.known_segments > 1

    @property
    def positions(self) -> int:
        """Maximum tokens of an input by its positions."""
        return _positions(self.config, self.family, self.task, self.vocabulary, self.sentence)

    @property
    def first_segment(self) -> bool:
        """Whether the model must get token types of 0 explicitly.

        Otherwise Transformers' models gather token types by position, which a trace would keep.
        """
        return not self.segments and self.known_segments > 0 and (self.family.segments or self.family.first_segment)

    @property
    def activation(self) -> str:
        named = str(self.config.get(self.family.activation, self.family.usual_activation))
        return self.family.activations.get(named, ALIASES.get(named, named))

    @property
    def convolves(self) -> bool:
        """Whether DeBERTa's convolution runs beside the first layer."""
        return "conv_kernel_size" in self.family.settings and (self.config.get("conv_kernel_size") or 0) > 0

    @property
    def other_activations(self) -> tuple[str, ...]:
        """Activations outside layers and vocabulary head, as far as settings name them."""
        pooler = "pooler_hidden_act" if TASKS[self.task].head == "ForSequenceClassification" else ""
        keys = {pooler: "gelu", "conv_act" if self.convolves else "": "tanh"}.items()
        named = [self.config.get(key, usual) for key, usual in keys if key in self.family.settings]
        return tuple(ALIASES.get(name, name) for name in named)

    @property
    def candidates(self) -> int:
        """Candidate words of the graph for each mask; 0 for other tasks."""
        return min(CANDIDATES, self.size("vocab_size")) if "candidates" in self.facts else 0

    @property
    def default_prompt(self) -> str | None:
        """The name of the prompt for texts without one."""
        return self.sentence.default_prompt if "default_prompt" in self.facts else None

    def sha256(self) -> str:
        """SHA-256 over the bytes of its weights: the encoder's, then those of each module after pooling."""
        return weights.sha256([self.weights, *(self.sentence.weights() if "pooling" in self.facts else ())])

    def encode(self, texts: Sequence[corpus.Text]) -> list[EncodedText]:
        """Inputs of its task as token ids, truncated to its maximum; for fill_mask with masked tokens."""
        encoded = self.vocabulary.encode(texts, self.max_length)
        return corpus.with_masks(encoded, self.vocabulary.special_ids) if self.candidates else encoded


def open_checkpoint(
    source: Source,
    max_length: int | None,
    notice: Callable[[str], None],
    asked: Asked | None = None,
    case: Case | None = None,
) -> Checkpoint:
    """Opens a checkpoint and reads everything but its tensors.

    Args:
        source: The checkpoint.
        max_length: The requested maximum length; None takes the checkpoint's own.
        notice: Called with each assumption.
        asked: The requested task; None takes it from the checkpoint.
        case: Whether its words keep their case; None takes that from the checkpoint.

    Raises:
        ExportError: It cannot be exported.
    """
    folder = Folder(source.path)
    other_kinds.refuse(folder, source.name, asked)
    sentence = pooling.read(folder)
    sentence = replace(sentence, encoder=layouts.opened(sentence.encoder, case))
    other_kinds.refuse_adapter(sentence.encoder)
    config, family = _config(sentence.encoder)
    asked = asked or _task(config, family, sentence)
    task = "classify" if asked == REGRESSION else asked
    if task in family.tasks_without:
        raise ExportError(
            f"checkpoint {source.path}: Transformers has no {family.stem} with a head for the task {task}"
        )
    facts = TASKS[task].facts
    matryoshka: tuple[int, ...] = ()
    if "matryoshka" in facts:
        dimensions = sentence.dimensions(config[family.sizes["hidden_size"]])
        matryoshka = _matryoshka(config, sentence, dimensions)
        for assumed in sentence.notices:
            notice(assumed)
    labels = _NO_LABELS
    if "labels" in facts:
        labels = read_labels(sentence.encoder, config, asked)
    files = weights.find(sentence.encoder)
    for pattern in _WORDS:
        for path in sentence.encoder.path.glob(pattern):
            sentence.encoder.check_whole(path.name)
    words = vocabulary.read(
        sentence.encoder, config[family.sizes["vocab_size"]], sentence.tokenizer_options, lowercase=sentence.lowercase
    )
    _check_special(source, config, family, task, words)
    own = sentence.max_length or words.length_limit
    # The special tokens alone always fit.
    least = max(_MIN_LENGTH, words.reference.num_special_tokens_to_add(pair=True))
    length = _length(source, max_length, own, least, _positions(config, family, task, words, sentence))
    probes.check(f"checkpoint {source.path}", words, config[family.sizes["vocab_size"]], length)
    activation: Activation = "sigmoid"
    if "activation" in facts:
        activation = read_activation(folder, config, folder.object("config_sentence_transformers.json"))
    return Checkpoint(source, config, family, task, sentence, words, files, labels, length, matryoshka, activation)


def _task(config: dict[str, Any], family: Family, sentence: pooling.SentenceConfig) -> Asked:
    if sentence.pools:
        return "embed"
    architecture = _named_architecture(config, family)
    task = family.task_of(architecture)
    if task is None:
        raise ExportError(
            f"checkpoint {sentence.encoder.path}: unknown head of class {architecture} in config.json; set --task "
            "embed for the embeddings of its encoder, or the task of its head"
        )
    if task != "classify":
        return task
    return task_of_head(sentence.encoder, config, is_cross_encoder=sentence.is_cross_encoder)


def _matryoshka(config: dict[str, Any], sentence: pooling.SentenceConfig, dimensions: int) -> tuple[int, ...]:
    sizes = config.get("matryoshka_dimensions") or []
    whole = isinstance(sizes, list) and all(isinstance(size, int) and size > 0 for size in sizes)
    if not whole or (sentence.truncate_dim is None and max(sizes, default=0) > dimensions):
        raise ExportError(
            f"checkpoint {sentence.encoder.path}: matryoshka_dimensions in config.json must be a list of sizes from 1 "
            f"to {dimensions}, the vector size, not {sizes!r}"
        )
    return tuple(sorted({size for size in sizes if size <= dimensions}))


def _check_special(
    source: Source, config: dict[str, Any], family: Family, task: str, words: vocabulary.Vocabulary
) -> None:
    if "candidates" in TASKS[task].facts and "mask" not in words.special_ids:
        raise ExportError(f"checkpoint {source.path}: the task {task} needs a mask token, and the tokenizer has none")
    if family.offset_positions and config.get("pad_token_id", 1) != words.special_ids["pad"]:
        raise ExportError(
            f"checkpoint {source.path}: the tokenizer pads with ID {words.special_ids['pad']}, but {family.stem} "
            f"counts positions from pad_token_id {config.get('pad_token_id', 1)!r} in config.json"
        )


def _positions(
    config: dict[str, Any],
    family: Family,
    task: str,
    words: vocabulary.Vocabulary,
    sentence: pooling.SentenceConfig,
) -> int:
    positions = int(config[family.sizes["positions"]])
    if not family.position_table or ("position_biased_input" in family.settings and not _placed(config)):
        # Transformers uses the tokenizer's limit alone. Sentence Transformers caps that limit at the positions, but not
        # max_seq_length.
        own = sentence.max_length or (None if TASKS[task].facts & _OF_SENTENCE_TRANSFORMERS else words.length_limit)
        return max(own or 0, positions)
    # RoBERTa's first position is the padding id + 1; earlier ones are never used.
    return positions - words.special_ids["pad"] - 1 if family.offset_positions else positions


def _placed(config: dict[str, Any]) -> bool:
    """Whether DeBERTa adds position embeddings to word embeddings."""
    return config.get("position_biased_input") is not False


def _length(source: Source, requested: int | None, own: int | None, least: int, positions: int) -> int:
    length = requested or min(own or positions, positions)
    if not least <= length <= positions:
        raise ExportError(
            f"checkpoint {source.path}: the maximum length must be {least} to {positions} tokens (the positions "
            f"of the model), not {length}"
        )
    return length


def _named_architecture(config: dict[str, Any], family: Family) -> str:
    named = config.get("architectures") or f"{family.stem}Model"
    return str(named[0]) if isinstance(named, list) else str(named)


def _config(folder: Folder) -> tuple[dict[str, Any], Family]:
    config = folder.object("config.json")
    if not config:
        raise ExportError(f"checkpoint {folder.path}: config.json is missing{other_kinds.instead_of_config(folder)}")
    other_kinds.refuse_config(folder, config)
    family = family_of(config)
    if family is None:
        raise ExportError(
            f"checkpoint {folder.path}: model_type {config.get('model_type')!r} cannot be exported"
            f"{other_kinds.kind_of(config)}; supported: {', '.join(FAMILIES)}"
        )
    optional = [key for key in ("num_labels", "type_vocab_size") if config.get(key) is not None]
    if family.segmentless and config.get("type_vocab_size") == 0:
        optional.remove("type_vocab_size")
    for key in [*family.sizes.values(), *optional]:
        value = config.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ExportError(
                f"checkpoint {folder.path}: {key} in config.json must be a positive integer, not {value!r}"
            )
    activation = config.get(family.activation, family.usual_activation)
    activations = [*(family.activations or (*ACTIVATIONS, *ALIASES))]
    if activation not in activations:
        raise ExportError(
            f"checkpoint {folder.path}: {family.activation} {activation!r} in config.json cannot be exported; "
            f"supported: {', '.join(activations)}"
        )
    if config[family.sizes["hidden_size"]] % config[family.sizes["heads"]]:
        raise ExportError(
            f"checkpoint {folder.path}: {family.sizes['hidden_size']} in config.json must be a multiple of "
            f"{family.sizes['heads']}"
        )
    try:
        for key, only in family.fixed.items():
            require(config, key, only)
        family.derived(config)
    except ValueError as error:
        raise ExportError(f"checkpoint {folder.path}: {error}") from error
    return config, family
