"""Opens a Hugging Face checkpoint: its task, whether it can be exported, and its limits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

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
from bertserve.export.checkpoint.encoder import Encoder, open_encoder
from bertserve.export.checkpoint.families.family import ALIASES
from bertserve.export.checkpoint.folder import Folder
from bertserve.export.checkpoint.labels import REGRESSION, read_activation, read_labels, task_of_head
from bertserve.export.checkpoint.modules import Dense, Normalize
from bertserve.export.checkpoint.token_heads import TokenHead  # noqa: TC001  a field's type
from bertserve.export.texts import corpus
from bertserve.serving.tasks import TASKS
from bertserve.serving.tasks.parts import Labels

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bertserve.export.checkpoint.layouts.case import Case
    from bertserve.export.checkpoint.source import Source
    from bertserve.serving.records import EncodedText
    from bertserve.serving.tasks.parts import Activation, MultiVector

CANDIDATES = 100
"""Candidates of fill_mask for each mask, unless the vocabulary is smaller."""

_WORDS = ("vocab.txt", "merges.txt", "*.model")
"""Tokenizer files that are not JSON."""

_MIN_LENGTH = 3
_MULTI_VECTOR = "embed_tokens"
"""The task of multi-vector models."""

_NO_LABELS = Labels(())


@dataclass(slots=True, frozen=True)
class Checkpoint:
    """A checkpoint that can be exported.

    Attributes:
        labels: For the tasks classify and tag.
        max_length: Maximum tokens of an input, including special tokens.
        matryoshka: Vector sizes that requests may truncate to; any size if empty.
        score_activation: The activation of scores, for the task rerank.
        active: Weights that the graph returns for each text, for the task embed_sparse.
        multi_vector: How a multi-vector model reads queries and documents; None for other models.
        token_heads: Layers that make further outputs, for the task embed.
    """

    source: Source
    encoder: Encoder
    task: str
    sentence: pooling.SentenceConfig
    vocabulary: vocabulary.Vocabulary
    labels: Labels
    max_length: int
    matryoshka: tuple[int, ...]
    score_activation: Activation
    active: int
    multi_vector: MultiVector | None
    token_heads: tuple[TokenHead, ...]

    @property
    def also(self) -> tuple[str, ...]:
        """The tasks of its heads."""
        return tuple(head.task for head in self.token_heads)

    @property
    def dimensions(self) -> int:
        """Size of a text's vector for the task embed; of a token's vector for others."""
        return self.sentence.dimensions(self.encoder.hidden_size) if self.has_modules else self.encoder.hidden_size

    @property
    def has_modules(self) -> bool:
        """Whether modules of Sentence Transformers follow the encoder."""
        return TASKS[self.task].part == "embedding" or self.multi_vector is not None

    @property
    def segments(self) -> bool:
        """Whether the graph takes token types."""
        family = self.encoder.family
        takes_them = family.segments or (family.first_segment and self.vocabulary.has_segments)
        return takes_them and self.encoder.known_segments > 1

    @property
    def positions(self) -> int:
        """Maximum tokens of an input by its positions."""
        return _positions(self.encoder, self.task, self.vocabulary, self.sentence.transformer.max_length)

    @property
    def first_segment(self) -> bool:
        """Whether the model must get token types of 0 explicitly.

        Otherwise Transformers' models gather token types by position, which a trace would keep.
        """
        family = self.encoder.family
        return not self.segments and self.encoder.known_segments > 0 and (family.segments or family.first_segment)

    @property
    def other_activations(self) -> tuple[str, ...]:
        """Activations outside layers and vocabulary head, as far as settings name them."""
        pooler = "pooler_hidden_act" if TASKS[self.task].head == "ForSequenceClassification" else ""
        keys = {pooler: "gelu", "conv_act" if self.encoder.convolves else "": "tanh"}.items()
        named = [self.encoder.config.get(key, usual) for key, usual in keys if key in self.encoder.family.settings]
        return tuple(ALIASES.get(name, name) for name in named)

    @property
    def candidates(self) -> int:
        """Candidate words of the graph for each mask; 0 for other tasks."""
        return min(CANDIDATES, self.encoder.vocab_size) if TASKS[self.task].fills_masks else 0

    @property
    def default_prompt(self) -> str | None:
        """The name of the prompt for texts without one."""
        return self.sentence.default_prompt if TASKS[self.task].embeds else None

    def sha256(self) -> str:
        """SHA-256 over the bytes of its weights: the encoder's, then those of each module after pooling and head."""
        modules = self.sentence.weights() if self.has_modules else ()
        return weights.sha256([self.encoder.weights, *modules, *(head.weights for head in self.token_heads)])

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


@dataclass(slots=True, frozen=True)
class _Model:
    """What a folder holds, whatever the task.

    Attributes:
        sentence: As its files say; they are read further for some tasks.
    """

    folder: Folder
    sentence: pooling.SentenceConfig
    encoder: Encoder


@dataclass(slots=True, frozen=True)
class _Task:
    """The task of the export, and what it takes from the settings; the fields are those of `Checkpoint`."""

    name: str
    sentence: pooling.SentenceConfig
    labels: Labels
    matryoshka: tuple[int, ...]
    active: int


def open_checkpoint(
    source: Source,
    max_length: int | None,
    notice: Callable[[str], None],
    asked: str | None = None,
    case: Case | None = None,
    outputs: Sequence[str] | None = None,
) -> Checkpoint:
    """Opens a checkpoint and reads everything but its tensors.

    Args:
        source: The checkpoint.
        max_length: The requested maximum length; None takes the checkpoint's own.
        notice: Called with each assumption.
        asked: The requested task or `REGRESSION`; None takes the task from the checkpoint.
        case: Whether its words keep their case; None takes that from the checkpoint.
        outputs: The requested outputs for the task embed, of `token_heads.OUTPUTS`; None takes all that it has.

    Raises:
        ExportError: It cannot be exported.
    """
    model = _open_model(Folder(source.path), case)
    task = _read_task(model, asked or _task_by_name(source, model, notice) or _task_of(model), notice)
    words, heads = _read_tokens(model, task, outputs, notice)
    length, sides = _find_lengths(model, task, words, max_length)
    probes.check(f"checkpoint {source.path}", words, model.encoder.vocab_size, length)
    _check_queries(model, task, words, length)
    is_reranker = TASKS[task.name].part == "activation"
    return Checkpoint(
        source=source,
        encoder=model.encoder,
        task=task.name,
        sentence=task.sentence,
        vocabulary=words,
        labels=task.labels,
        max_length=length,
        matryoshka=task.matryoshka,
        score_activation=read_activation(model.folder, model.encoder) if is_reranker else "sigmoid",
        active=task.active,
        multi_vector=sides,
        token_heads=heads,
    )


def _open_model(folder: Folder, case: Case | None) -> _Model:
    other_kinds.refuse(folder)
    sentence = pooling.read(folder)
    sentence = replace(sentence, encoder=layouts.read_layout(sentence.encoder, case))
    other_kinds.refuse_adapter(sentence.encoder)
    return _Model(folder, sentence, open_encoder(sentence.encoder))


def _task_by_name(source: Source, model: _Model, notice: Callable[[str], None]) -> str | None:
    sentence = model.sentence
    if sentence.sparse is not None or sentence.pools or not sparse.is_named(source.name, model.encoder.config):
        return None
    notice("its name says SPLADE: exporting sparse vectors; for masked words, set --task fill_mask")
    return "embed_sparse"


def _task_of(model: _Model) -> str:
    sentence, encoder = model.sentence, model.encoder
    if sentence.pools:
        return "embed"
    if sentence.sparse is not None:
        return "embed_sparse"
    if sentence.sides is not None:
        return _MULTI_VECTOR
    task = encoder.family.task_of(encoder.architecture)
    if task is None:
        raise encoder.folder.error(
            f"unknown head of class {encoder.architecture} in config.json; set "
            "--task embed for the embeddings of its encoder, or the task of its head"
        )
    if task != "classify":
        return task
    return task_of_head(encoder, is_cross_encoder=sentence.is_cross_encoder)


def _read_task(model: _Model, asked: str, notice: Callable[[str], None]) -> _Task:
    """Reads what a task needs of the settings; `asked` may be a regression, whose task is classify."""
    sentence, encoder = model.sentence, model.encoder
    if sentence.sides is not None and asked != _MULTI_VECTOR:
        raise model.folder.error(
            f"this is a multi-vector model (ColBERT), whose task is {_MULTI_VECTOR}; remove --task {asked}"
        )
    task = "classify" if asked == REGRESSION else asked
    if task in encoder.family.tasks_without:
        raise model.folder.error(f"Transformers has no {encoder.family.stem} with a head for the task {task}")
    part, active, labels = TASKS[task].part, 0, _NO_LABELS
    matryoshka: tuple[int, ...] = ()
    if part == "embedding":
        matryoshka = _matryoshka(encoder, sentence)
        for assumed in sentence.notices:
            notice(assumed)
    if part == "sparse":
        found = _sparse(model)
        sentence = replace(sentence, sparse=found)
        active = min(found.max_active_dims or encoder.vocab_size, encoder.vocab_size)
    if part == "labels":
        labels = read_labels(encoder, asked)
    return _Task(task, _project(sentence, encoder), labels, matryoshka, active)


def _sparse(model: _Model) -> sparse.Sparse:
    """How weights of words are computed. A folder that does not say it is read as Sentence Transformers reads it."""
    sentence = model.sentence
    if sentence.sparse is None and (sentence.pools or sentence.is_cross_encoder):
        file = token_heads.FILES["sparse"]
        remedy = f"; remove --task to export {file} as the output sparse" if model.folder.has(file) else ""
        raise model.folder.error(
            f"the modules in modules.json compute no weights of words; the task embed_sparse "
            f"needs SpladePooling, or a model of masked words without modules.json{remedy}"
        )
    return sentence.sparse or sparse.Sparse()


def _project(sentence: pooling.SentenceConfig, encoder: Encoder) -> pooling.SentenceConfig:
    """A multi-vector model with the projection that is among its encoder's weights, if there is one."""
    if sentence.sides is None or not sentence.sides.projection:
        return sentence
    # Sentence Transformers reads the size from the weights, whatever the metadata say.
    held = encoder.weights
    size = held.matrix_rows("linear.weight") or sentence.sides.projection
    dense = Dense(
        encoder.hidden_size, size, bias=False, activation="Identity", residual=False, weights=held, inline=True
    )
    return replace(sentence, modules=(dense, *sentence.modules))


def _matryoshka(encoder: Encoder, sentence: pooling.SentenceConfig) -> tuple[int, ...]:
    sizes, dimensions = encoder.config.get("matryoshka_dimensions") or [], sentence.dimensions(encoder.hidden_size)
    whole = isinstance(sizes, list) and all(isinstance(size, int) and size > 0 for size in sizes)
    if not whole or (sentence.truncate_dim is None and max(sizes, default=0) > dimensions):
        raise encoder.folder.error(
            f"matryoshka_dimensions in config.json must be a list of sizes from 1 "
            f"to {dimensions}, the vector size, not {sizes!r}"
        )
    return tuple(sorted({size for size in sizes if size <= dimensions}))


def _read_tokens(
    model: _Model, task: _Task, outputs: Sequence[str] | None, notice: Callable[[str], None]
) -> tuple[vocabulary.Vocabulary, tuple[TokenHead, ...]]:
    """The tokenizer, and the layers over the vectors of its tokens."""
    encoder, sentence = model.encoder, model.sentence
    for pattern in _WORDS:
        for path in encoder.folder.path.glob(pattern):
            encoder.folder.check_whole(path.name)
    words = vocabulary.read(
        encoder.folder,
        encoder.vocab_size,
        sentence.transformer.tokenizer_options,
        lowercase=sentence.transformer.lowercase,
        markers=sentence.markers,
    )
    _check_special(model, task, words)
    if task.name == "embed":
        heads = token_heads.read(model.folder, encoder.hidden_size, outputs)
        # The role of a text's last token, which BERT's tokenizers do not name.
        end = words.reference.eos_token_id
        if heads and end is not None and end < encoder.vocab_size:
            words = replace(words, special_ids={**words.special_ids, "eos": end})
        return words, heads
    if outputs is not None:
        raise model.folder.error(f"--outputs is for the task embed; this export is for {task.name}")
    if task.name == "embed_tokens" and model.folder.has(file := token_heads.FILES["tokens"]):
        notice(f"exporting the vectors of the last layer, without {file}; for those of FlagEmbedding, remove --task")
    return words, ()


def _check_special(model: _Model, task: _Task, words: vocabulary.Vocabulary) -> None:
    family, config = model.encoder.family, model.encoder.config
    if TASKS[task.name].fills_masks and "mask" not in words.special_ids:
        raise model.folder.error(f"the task {task.name} needs a mask token, and the tokenizer has none")
    if family.offset_positions and config.get("pad_token_id", 1) != words.special_ids["pad"]:
        raise model.folder.error(
            f"the tokenizer pads with ID {words.special_ids['pad']}, but {family.stem} "
            f"counts positions from pad_token_id {config.get('pad_token_id', 1)!r} in config.json"
        )


def _find_lengths(
    model: _Model, task: _Task, words: vocabulary.Vocabulary, requested: int | None
) -> tuple[int, MultiVector | None]:
    """The maximum length of an input, and how a multi-vector model reads queries and documents."""
    sentence, stated = task.sentence, task.sentence.transformer.max_length
    positions = _positions(model.encoder, task.name, words, stated)
    own = stated or words.length_limit or positions
    length = requested or min(own, positions)
    # The special tokens alone always fit.
    least = max(_MIN_LENGTH, words.reference.num_special_tokens_to_add(pair=True))
    if not least <= length <= positions:
        raise model.folder.error(
            f"the maximum length must be {least} to {positions} tokens (the positions of the model), not {length}"
        )
    if sentence.sides is None:
        return length, None
    ends, normalized = multi_vector.Ends(own, positions, requested), sentence.modules[-1:] == (Normalize(),)
    sides = multi_vector.resolve(model.folder, sentence.sides, words, ends, normalized=normalized)
    return max(sides.query_length, sides.document_length), sides


def _positions(encoder: Encoder, task: str, words: vocabulary.Vocabulary, stated: int | None) -> int:
    """Maximum tokens of an input by the model's positions; `stated` is the limit of Sentence Transformers' files."""
    positions = encoder.size("positions")
    if not encoder.has_position_table:
        # Transformers uses the tokenizer's limit alone. Sentence Transformers caps that limit at the positions, but not
        # max_seq_length.
        is_sentence_model = TASKS[task].embeds or TASKS[task].part == "activation"
        own = stated or (None if is_sentence_model else words.length_limit)
        return max(own or 0, positions)
    # RoBERTa's first position is the padding id + 1; earlier ones are never used.
    return positions - words.special_ids["pad"] - 1 if encoder.family.offset_positions else positions


def _check_queries(model: _Model, task: _Task, words: vocabulary.Vocabulary, length: int) -> None:
    """Checks that queries and documents have the same tokens; a bundle has one tokenizer."""
    queries = None if task.sentence.sparse is None else task.sentence.sparse.queries
    if queries is None or TASKS[task.name].part != "sparse" or queries.has(sparse.IDF):
        return
    own = vocabulary.read(queries, model.encoder.vocab_size)
    if (own.content, own.truncation_side) != (words.content, words.truncation_side):
        raise queries.error("the tokenizer of queries differs from that of documents")
    if own.length_limit is not None and own.length_limit < length:
        raise queries.error(
            f"queries are truncated to {own.length_limit} tokens, but documents to "
            f"{length}; set --max-length {own.length_limit}"
        )
