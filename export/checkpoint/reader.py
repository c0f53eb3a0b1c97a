"""Opens a Hugging Face checkpoint: its task, whether it can be exported, and its limits."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bertserve.export.checkpoint import (
    layouts,
    multi_vector,
    other_kinds,
    pooling,
    probes,
    sparse,
    token_heads,
    vocabulary,
    weights,
)
from bertserve.export.checkpoint.families import FAMILIES, family_of
from bertserve.export.checkpoint.families.family import ACTIVATIONS, ALIASES, require
from bertserve.export.checkpoint.folder import Folder
from bertserve.export.checkpoint.labels import REGRESSION, Asked, read_activation, read_labels, task_of_head
from bertserve.export.checkpoint.modules import Dense, Normalize
from bertserve.export.checkpoint.token_heads import TokenHead  # noqa: TC001  a field's type
from bertserve.export.errors import ExportError
from bertserve.export.progress import quiet
from bertserve.export.texts import corpus
from bertserve.serving.tasks import TASKS
from bertserve.serving.tasks.parts import Labels

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bertserve.export.checkpoint.families.family import Family
    from bertserve.export.checkpoint.layouts.case import Case
    from bertserve.export.checkpoint.source import Source
    from bertserve.serving.records import EncodedText
    from bertserve.serving.tasks.parts import Activation, MultiVector

CANDIDATES = 100
"""Candidates of fill_mask for each mask, unless the vocabulary is smaller."""

_WORDS = ("vocab.txt", "merges.txt", "*.model")
"""Tokenizer files that are not JSON."""

_OPTIONAL_SIZES = ("num_labels", "type_vocab_size")

_MOST = {"layers": 1 << 10, "positions": 1 << 20}
"""Maximum sizes, by our names, if no tensor need have a row or column for each."""

_MIN_LENGTH = 3
_OF_SIDES: Asked = "embed_tokens"
"""The task of multi-vector models."""

_NO_LABELS = Labels(())


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
        active: Weights that the graph returns for each text, for the task embed_sparse.
        multi_vector: How a multi-vector model reads queries and documents; None for other models.
        token_heads: Layers that make further outputs, for the task embed.
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
    active: int = 0
    multi_vector: MultiVector | None = None
    token_heads: tuple[TokenHead, ...] = ()

    @property
    def also(self) -> tuple[str, ...]:
        """The tasks of its heads."""
        return tuple(head.task for head in self.token_heads)

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
        return self.sentence.dimensions(self.hidden_size) if self.has_modules else self.hidden_size

    @property
    def has_modules(self) -> bool:
        """Whether modules of Sentence Transformers follow the encoder."""
        return TASKS[self.task].part == "embedding" or self.multi_vector is not None

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
        return min(CANDIDATES, self.size("vocab_size")) if TASKS[self.task].fills_masks else 0

    @property
    def default_prompt(self) -> str | None:
        """The name of the prompt for texts without one."""
        return self.sentence.default_prompt if TASKS[self.task].embeds else None

    def sha256(self) -> str:
        """SHA-256 over the bytes of its weights: the encoder's, then those of each module after pooling and head."""
        modules = self.sentence.weights() if self.has_modules else ()
        return weights.sha256([self.weights, *modules, *(head.weights for head in self.token_heads)])

    @property
    def query_weights(self) -> Folder | None:
        """The folder with the weights of queries, for the task embed_sparse; None if they are encoded."""
        found = self.sentence.sparse
        return None if found is None or TASKS[self.task].part != "sparse" else found.queries

    def encode(self, texts: Sequence[corpus.Text]) -> list[EncodedText]:
        """Inputs of its task as token ids, truncated to its maximum; for fill_mask with masked tokens.

        Inputs of a multi-vector model are documents and queries in turn.
        """
        if self.multi_vector is not None:
            return self.vocabulary.encode_sides(texts, self.multi_vector, self.sentence.prompts)
        encoded = self.vocabulary.encode(texts, self.max_length)
        return corpus.with_masks(encoded, self.vocabulary.special_ids) if self.candidates else encoded


def open_checkpoint(
    source: Source,
    max_length: int | None,
    notice: Callable[[str], None],
    asked: Asked | None = None,
    case: Case | None = None,
    outputs: Sequence[str] | None = None,
) -> Checkpoint:
    """Opens a checkpoint and reads everything but its tensors.

    Args:
        source: The checkpoint.
        max_length: The requested maximum length; None takes the checkpoint's own.
        notice: Called with each assumption.
        asked: The requested task; None takes it from the checkpoint.
        case: Whether its words keep their case; None takes that from the checkpoint.
        outputs: The requested outputs for the task embed, of `token_heads.OUTPUTS`; None takes all that it has.

    Raises:
        ExportError: It cannot be exported.
    """
    folder = Folder(source.path)
    other_kinds.refuse(folder)
    sentence = pooling.read(folder)
    sentence = replace(sentence, encoder=layouts.opened(sentence.encoder, case))
    other_kinds.refuse_adapter(sentence.encoder)
    config, family = _config(sentence.encoder)
    files = weights.find(sentence.encoder)
    asked = asked or _named_sparse(source, config, sentence, notice) or _task(config, family, sentence)
    _check_task(source, asked, sentence)
    task = "classify" if asked == REGRESSION else asked
    if task in family.tasks_without:
        raise ExportError(
            f"checkpoint {source.path}: Transformers has no {family.stem} with a head for the task {task}"
        )
    part = TASKS[task].part
    matryoshka: tuple[int, ...] = ()
    if part == "embedding":
        dimensions = sentence.dimensions(config[family.sizes["hidden_size"]])
        matryoshka = _matryoshka(config, sentence, dimensions)
        for assumed in sentence.notices:
            notice(assumed)
    sentence, active = _sparse(source, task, sentence, config[family.sizes["vocab_size"]])
    labels = _NO_LABELS
    if part == "labels":
        labels = read_labels(sentence.encoder, config, asked)
    for pattern in _WORDS:
        for path in sentence.encoder.path.glob(pattern):
            sentence.encoder.check_whole(path.name)
    words = vocabulary.read(
        sentence.encoder,
        config[family.sizes["vocab_size"]],
        sentence.tokenizer_options,
        lowercase=sentence.lowercase,
        markers=sentence.markers,
    )
    _check_special(source, config, family, task, words)
    heads = _token_heads(folder, task, config[family.sizes["hidden_size"]], outputs, notice)
    words = _with_end(words, config[family.sizes["vocab_size"]], heads)
    own = sentence.max_length or words.length_limit
    # The special tokens alone always fit.
    least = max(_MIN_LENGTH, words.reference.num_special_tokens_to_add(pair=True))
    positions = _positions(config, family, task, words, sentence)
    length = _length(source, max_length, own, least, positions)
    sentence = _projected(sentence, config[family.sizes["hidden_size"]], files)
    multi = _sides(source, sentence, words, multi_vector.Ends(own or positions, positions, max_length))
    length = length if multi is None else max(multi.query_length, multi.document_length)
    probes.check(f"checkpoint {source.path}", words, config[family.sizes["vocab_size"]], length)
    _check_queries(task, sentence, words, config[family.sizes["vocab_size"]], length)
    activation: Activation = "sigmoid"
    if part == "activation":
        activation = read_activation(folder, config, folder.object("config_sentence_transformers.json"))
    return Checkpoint(
        *(source, config, family, task, sentence, words, files, labels, length, matryoshka, activation, active, multi),
        token_heads=heads,
    )


def _token_heads(
    folder: Folder, task: str, hidden_size: int, outputs: Sequence[str] | None, notice: Callable[[str], None]
) -> tuple[TokenHead, ...]:
    if task == "embed":
        return token_heads.read(folder, hidden_size, outputs)
    if outputs is not None:
        raise ExportError(f"checkpoint {folder.path}: --outputs is for the task embed; this export is for {task}")
    if task == "embed_tokens" and folder.has(file := token_heads.FILES["tokens"]):
        notice(f"exporting the vectors of the last layer, without {file}; for those of FlagEmbedding, remove --task")
    return ()


def _with_end(words: vocabulary.Vocabulary, vocab_size: int, heads: Sequence[TokenHead]) -> vocabulary.Vocabulary:
    """For heads, the tokenizer with the role of a text's last token, which BERT's tokenizers do not name."""
    end = words.reference.eos_token_id if heads else None
    if end is None or end >= vocab_size:
        return words
    return replace(words, special_ids={**words.special_ids, "eos": end})


def _task(config: dict[str, Any], family: Family, sentence: pooling.SentenceConfig) -> Asked:
    if sentence.pools:
        return "embed"
    if sentence.sparse is not None:
        return "embed_sparse"
    if sentence.sides is not None:
        return _OF_SIDES
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


def _check_task(source: Source, asked: Asked, sentence: pooling.SentenceConfig) -> None:
    if sentence.sides is not None and asked != _OF_SIDES:
        raise ExportError(
            f"checkpoint {source.path}: this is a multi-vector model (ColBERT), whose task is {_OF_SIDES}; remove "
            f"--task {asked}"
        )


def _projected(sentence: pooling.SentenceConfig, hidden_size: int, files: weights.Weights) -> pooling.SentenceConfig:
    """A multi-vector model with the projection that is among its encoder's weights, if there is one."""
    if sentence.sides is None or not sentence.sides.projection:
        return sentence
    # Sentence Transformers reads the size from the weights, whatever the metadata say.
    size = files.matrix_rows("linear.weight") or sentence.sides.projection
    dense = Dense(hidden_size, size, bias=False, activation="Identity", residual=False, weights=files, inline=True)
    return replace(sentence, modules=(dense, *sentence.modules))


def _sides(
    source: Source, sentence: pooling.SentenceConfig, words: vocabulary.Vocabulary, ends: multi_vector.Ends
) -> MultiVector | None:
    """How a multi-vector model reads queries and documents; None for another model."""
    if sentence.sides is None:
        return None
    normalized = sentence.modules[-1:] == (Normalize(),)
    return multi_vector.resolved(f"checkpoint {source.path}", sentence.sides, words, ends, normalized=normalized)


def _named_sparse(
    source: Source, config: dict[str, Any], sentence: pooling.SentenceConfig, notice: Callable[[str], None]
) -> Asked | None:
    if sentence.sparse is not None or sentence.pools or not sparse.is_named(source.name, config):
        return None
    notice("its name says SPLADE: exporting sparse vectors; for masked words, set --task fill_mask")
    return "embed_sparse"


def _sparse(
    source: Source, task: str, sentence: pooling.SentenceConfig, vocab_size: int
) -> tuple[pooling.SentenceConfig, int]:
    """The configuration with how weights of words are computed, and their number for each text; 0 for other tasks.

    A folder that does not say it is read as Sentence Transformers reads it.
    """
    if TASKS[task].part != "sparse":
        return sentence, 0
    if sentence.sparse is None and (sentence.pools or sentence.is_cross_encoder):
        file = token_heads.FILES["sparse"]
        remedy = f"; remove --task to export {file} as the output sparse" if Folder(source.path).has(file) else ""
        raise ExportError(
            f"checkpoint {source.path}: the modules in modules.json compute no weights of words; the task embed_sparse "
            f"needs SpladePooling, or a model of masked words without modules.json{remedy}"
        )
    found = sentence.sparse or sparse.Sparse()
    return replace(sentence, sparse=found), min(found.max_active_dims or vocab_size, vocab_size)


def _check_queries(
    task: str, sentence: pooling.SentenceConfig, words: vocabulary.Vocabulary, vocab_size: int, length: int
) -> None:
    """Checks that queries and documents have the same tokens; a bundle has one tokenizer."""
    queries = None if sentence.sparse is None else sentence.sparse.queries
    if queries is None or TASKS[task].part != "sparse" or queries.has(sparse.IDF):
        return
    own = vocabulary.read(queries, vocab_size)
    if (own.content, own.truncation_side) != (words.content, words.truncation_side):
        raise ExportError(f"checkpoint {queries.path}: the tokenizer of queries differs from that of documents")
    if own.length_limit is not None and own.length_limit < length:
        raise ExportError(
            f"checkpoint {queries.path}: queries are truncated to {own.length_limit} tokens, but documents to "
            f"{length}; set --max-length {own.length_limit}"
        )


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
    if TASKS[task].fills_masks and "mask" not in words.special_ids:
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
        is_sentence_model = TASKS[task].embeds or TASKS[task].part == "activation"
        own = sentence.max_length or (None if is_sentence_model else words.length_limit)
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
    optional = [
        key for key in _OPTIONAL_SIZES if config.get(key) is not None or (key == "num_labels" and key in config)
    ]
    if family.segmentless and config.get("type_vocab_size") == 0:
        optional.remove("type_vocab_size")
    for key in [*family.sizes.values(), *optional]:
        value = config.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ExportError(
                f"checkpoint {folder.path}: {key} in config.json must be a positive integer, not {value!r}"
            )
    _check_sizes(config, family, weights.find(folder))
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
    _check_accepted(folder, config, family)
    return config, family


def _check_accepted(folder: Folder, config: dict[str, Any], family: Family) -> None:
    """Rejects settings that Transformers rejects, which has a rule for every one of its own."""
    import transformers  # noqa: PLC0415  slow to import

    if family.own_prefix:
        return
    with quiet(), family.accepted(folder.path, config):
        # Labels have rules of their own, which name what is wrong with them.
        settings = {key: value for key, value in config.items() if key not in {"id2label", "label2id"}}
        getattr(transformers, f"{family.stem}Config").from_dict(deepcopy(settings))


def _check_sizes(config: dict[str, Any], family: Family, files: weights.Weights) -> None:
    """Rejects sizes that the weights cannot have, before anything has them."""
    held = sum(path.stat().st_size for path in files.files)
    most = {key: _MOST.get(name, held) for name, key in family.sizes.items()} | dict.fromkeys(_OPTIONAL_SIZES, held)
    for key, largest in most.items():
        if (value := config.get(key) or 0) > largest:
            files.check_whole()
            raise ExportError(
                f"checkpoint {files.folder.path}: {key} {value} in config.json is more than {largest}, "
                f"{'which weights of so many bytes can have' if largest == held else 'the most that can be exported'}"
            )
