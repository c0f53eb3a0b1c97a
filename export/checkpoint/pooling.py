"""Reads the files of Sentence Transformers: pooling, later modules, maximum length, prompts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args

from bertserve.export.checkpoint import multi_vector, sparse, token_heads
from bertserve.export.checkpoint.modules import (
    READERS,
    VECTOR,
    Dense,
    LayerNorm,
    Module,
    Normalize,
    integer,
    width_after,
)
from bertserve.serving.tasks.parts import POOLING_MODES, Similarity

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bertserve.export.checkpoint.folder import Folder
    from bertserve.export.checkpoint.multi_vector import Layout, Sides
    from bertserve.export.checkpoint.sparse import Sparse
    from bertserve.export.checkpoint.weights import Weights

_ASSUMED_MEAN = (
    "the checkpoint has no pooling configuration; using mean pooling, with vectors normalized only on request"
)
_ASSUMED_FIRST = (
    "the checkpoint has no modules.json, but layers of bge-m3; using the vector of the first token with length 1, as "
    "FlagEmbedding does"
)
_SETTINGS = multi_vector.SETTINGS
SETTINGS_READ = (
    *("model_type", "prompts", "default_prompt_name", "similarity_fn_name", "truncate_dim", "activation_fn"),
    "max_active_dims",
)
_OWN = "sentence_transformers."
_BEFORE = ("Transformer", "Pooling")
_KINDS = (*_BEFORE, *READERS)
_EMPTY = frozenset({"Normalize", "Dropout"})
"""Modules whose folders may hold no file."""

TRANSFORMER_FILES = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)
"""Names of the settings file of a Transformer module over the years; the first non-empty one counts."""

TRANSFORMER_READ = ("max_seq_length", "do_lower_case", "processor_kwargs", "tokenizer_args")

TRANSFORMER_FIXED: dict[str, tuple[object, ...]] = {
    "transformer_task": ("feature-extraction",),
    "modality_config": ({"text": {"method": "forward", "method_output_name": "last_hidden_state"}},),
    "module_output_name": ("token_embeddings",),
    "processing_kwargs": ({},),
    **dict.fromkeys(("query_length", "document_length", "query_expansion", "tokenizer_name_or_path"), (None,)),
}
"""Further settings of an encoder's Transformer, and the only values that can be exported."""

_OF_SIDES = {key: values for key, values in TRANSFORMER_FIXED.items() if key not in multi_vector.SIDES_READ}
"""The same for a multi-vector model, which may have lengths and an expansion."""

_SCORING = {
    **TRANSFORMER_FIXED,
    "transformer_task": ("sequence-classification",),
    "modality_config": ({"text": {"method": "forward", "method_output_name": "logits"}},),
    "module_output_name": ("scores",),
}
"""The same for a cross-encoder."""

_FILLING = {
    **TRANSFORMER_FIXED,
    "transformer_task": (sparse.FILLING,),
    "modality_config": _SCORING["modality_config"],
}
"""The same for a sparse encoder."""

TRANSFORMER_UNUSED = frozenset({"unpad_inputs", "cache_dir", "backend"})
"""Settings that change no answer."""

_LOADING = frozenset(
    {"subfolder", "token", "cache_dir", "revision", "local_files_only", "trust_remote_code", "use_fast"}
)
"""Arguments that Sentence Transformers sets itself, whatever the file says."""

_MODEL_UNUSED = _LOADING | frozenset(
    {
        *("attn_implementation", "torch_dtype", "dtype", "device_map", "low_cpu_mem_usage", "use_safetensors"),
        *("provider", "file_name", "export", "add_pooling_layer"),
    }
)
"""Arguments of `AutoModel.from_pretrained` that change only rounding."""

ARGUMENTS_UNUSED = {("model_args", "model_kwargs"): _MODEL_UNUSED, ("config_args", "config_kwargs"): _LOADING}
"""Arguments for loading model and settings, by old and new names; no others can be exported."""

_ARGUMENTS = frozenset(name for names in ARGUMENTS_UNUSED for name in names)

POOLING_READ = ("pooling_mode", "word_embedding_dimension", "embedding_dimension", "include_prompt")

OLD_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Pooling modes before `pooling_mode`, in the order in which Sentence Transformers concatenates them."""


@dataclass(slots=True, frozen=True)
class Transformer:
    """Settings of a Transformer module for texts.

    Attributes:
        max_length: The checkpoint's own limit in tokens; None if unspecified.
        lowercase: Whether texts are lower-cased before the tokenizer.
        tokenizer_options: Arguments for its tokenizer, beside the length.
        sides: Those of a multi-vector model.
    """

    max_length: int | None = None
    lowercase: bool = False
    tokenizer_options: Mapping[str, Any] = field(default_factory=dict)
    task: object = None
    sides: Mapping[str, object] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class SentenceConfig:
    """How the checkpoint computes sentence embeddings.

    Attributes:
        encoder: The folder with the encoder's weights and tokenizer.
        pooling: Pooling modes, whose results are concatenated.
        modules: Modules after pooling.
        normalize: Whether the last step is L2 normalization.
        truncate_dim: Number of first components that remain after all that; None for all.
        pools: Whether the files define pooling; a checkpoint of another task has no such files.
        is_cross_encoder: Whether the files define a cross-encoder.
        sparse: How a sparse encoder computes weights of words; None for other checkpoints.
        sides: How a multi-vector model reads queries and documents; None for other checkpoints.
        width: Size of the pooled vectors; None if unspecified.
        notices: Assumptions, for the user.
    """

    encoder: Folder
    pooling: tuple[str, ...] = ("mean",)
    modules: tuple[Module, ...] = ()
    normalize: bool = False
    truncate_dim: int | None = None
    similarity: Similarity | None = None
    pools: bool = True
    is_cross_encoder: bool = False
    sparse: Sparse | None = None
    sides: Sides | None = None
    width: int | None = None
    transformer: Transformer = Transformer()
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    notices: tuple[str, ...] = ()

    def weights(self) -> list[Weights]:
        return [
            module.weights
            for module in self.modules
            if isinstance(module, LayerNorm) or (isinstance(module, Dense) and not module.inline)
        ]

    @property
    def markers(self) -> tuple[str, ...]:
        """Prompts that begin with a token of their own."""
        return () if self.sides is None else self.sides.markers

    def dimensions(self, hidden_size: int) -> int:
        """Size of a text's vector, for token vectors of this size.

        Raises:
            ExportError: One module does not accept what the one before returns.
        """
        if self.width not in (None, hidden_size):
            raise self.encoder.error(
                f"pooling expects vectors of size {self.width}, but the model returns size {hidden_size}"
            )
        size = hidden_size * len(self.pooling)
        for module in self.modules:
            size = width_after(module, size)
        if self.truncate_dim is not None and self.truncate_dim > size:
            raise self.encoder.error(
                f"truncate_dim {self.truncate_dim} in {_SETTINGS} is more than the vector size {size}"
            )
        return self.truncate_dim or size


def read(folder: Folder) -> SentenceConfig:
    """Reads modules.json of Sentence Transformers and the folders of its modules.

    Raises:
        ExportError: The checkpoint computes something else than an encoder, pooling and modules on the vector.
    """
    if (layout := multi_vector.layout_of(folder)) is not None:
        return _read_multi_vector(folder, layout)
    listed = _modules(folder)
    if listed is None:
        return _read_unlisted(folder)
    if sparse.are_sparse([kind for kind, _ in listed]):
        return _read_sparse(folder, listed)
    encoder = folder.sub(listed[0][1])
    if len(listed) == 1:
        return _read_cross_encoder(folder, encoder)
    pooler = folder.sub(listed[1][1])
    pooling = pooler.object("config.json")
    transformer = _read_transformer(encoder, TRANSFORMER_FIXED)
    prompts, default = _read_prompts(folder)
    settings = folder.object(_SETTINGS)
    truncate_dim = integer(folder, settings, "truncate_dim", file=_SETTINGS)
    following = _read_following(folder, listed[2:])
    # The last normalization belongs to the server, because a request may switch it off, unless truncation follows.
    normalize = bool(following) and isinstance(following[-1], Normalize) and truncate_dim is None
    return SentenceConfig(
        encoder=encoder,
        pooling=_modes(pooler, pooling, prompts),
        modules=following[:-1] if normalize else following,
        normalize=normalize,
        truncate_dim=truncate_dim,
        similarity=_similarity(folder, settings),
        width=integer(pooler, pooling, "word_embedding_dimension") or integer(pooler, pooling, "embedding_dimension"),
        transformer=transformer,
        prompts=prompts,
        default_prompt=default,
    )


def _read_unlisted(folder: Folder) -> SentenceConfig:
    """A folder without modules.json: Sentence Transformers uses mean pooling.

    FlagEmbedding writes such folders when it trains bge-m3, and uses the first token.
    """
    pooler = folder.sub("1_Pooling", may_be_missing=True)
    if pooler.has("config.json") and (modes := _modes(pooler, pooler.object("config.json"), {})) != ("mean",):
        raise folder.error(
            f"1_Pooling/config.json says {', '.join(modes)}, but modules.json is missing, so "
            "Sentence Transformers would use mean pooling; add modules.json, or remove 1_Pooling"
        )
    if any(map(folder.has, token_heads.FILES.values())):
        return SentenceConfig(folder, pooling=("cls",), normalize=True, pools=False, notices=(_ASSUMED_FIRST,))
    found = sparse.Sparse(queries=folder) if folder.has(sparse.IDF) else None
    return SentenceConfig(folder, pools=pooler.has("config.json"), sparse=found, notices=(_ASSUMED_MEAN,))


def _read_sparse(folder: Folder, listed: Sequence[tuple[str, str]]) -> SentenceConfig:
    """A sparse encoder pools the logits of its vocabulary head."""
    settings = folder.object(_SETTINGS)
    found = sparse.read(folder, listed, settings)
    transformer = _read_transformer(found.encoder, _FILLING)
    if found.says_task and transformer.task != sparse.FILLING:
        raise found.encoder.error(
            f"a Transformer before SpladePooling must have the transformer_task "
            f"{sparse.FILLING!r}, not {transformer.task!r}"
        )
    prompts, default = _read_prompts(folder)
    return SentenceConfig(
        encoder=found.encoder,
        pools=False,
        sparse=found.sparse,
        similarity=_similarity(folder, settings),
        transformer=transformer,
        prompts=prompts,
        default_prompt=default,
        notices=(_ASSUMED_MEAN,),
    )


def _read_multi_vector(folder: Folder, layout: Layout) -> SentenceConfig:
    """A multi-vector model projects the vector of each token."""
    saved = {} if layout == "stanford" else _read_prompts(folder, may_be_null=True)[0]
    prompts, markers = multi_vector.prompts_of(folder, layout, saved)
    default = "document" if prompts["document"] else None
    if layout == "stanford":
        sides = multi_vector.of_stanford(folder, markers)
        return SentenceConfig(
            folder, modules=(Normalize(),), pools=False, sides=sides, prompts=prompts, default_prompt=default
        )
    # PyLate's Dense is that of Sentence Transformers.
    first, *others = _entries(folder, (_OWN, "pylate.models.Dense.")) or [("", "")]
    if first[0] != _BEFORE[0]:
        raise folder.error(
            f"modules.json begins with {first[0] or 'nothing'}; a multi-vector model begins with {_BEFORE[0]}"
        )
    encoder = folder.sub(first[1])
    transformer = _read_transformer(encoder, _OF_SIDES, multi_vector.SIDES_READ)
    sides, modules = multi_vector.of_modules(folder, layout, others, transformer.sides, markers)
    return SentenceConfig(
        encoder=encoder,
        modules=modules,
        pools=False,
        sides=sides,
        transformer=transformer,
        prompts=prompts,
        default_prompt=default,
    )


def _read_cross_encoder(folder: Folder, encoder: Folder) -> SentenceConfig:
    """A cross-encoder has a head of its own: only its text settings are read."""
    transformer = _read_transformer(encoder, _SCORING)
    prompts, default = _read_prompts(folder)
    if default is not None and prompts[default]:
        raise folder.error(
            f"a cross-encoder with the default prompt {default!r} cannot be exported; "
            f"remove default_prompt_name from {_SETTINGS} to serve it without a prompt"
        )
    return SentenceConfig(
        encoder=encoder,
        pools=False,
        is_cross_encoder=True,
        transformer=transformer,
        prompts=prompts,
        notices=(_ASSUMED_MEAN,),
    )


def _entries(folder: Folder, trusted: tuple[str, ...] = (_OWN,)) -> list[tuple[str, str]] | None:
    """The class and path of each module, of any kind; None without modules.json."""
    listed = folder.json("modules.json")
    if listed is None:
        return None
    if not isinstance(listed, list) or not all(
        isinstance(m, dict) and isinstance(m.get("type"), str) and isinstance(m.get("path"), str) for m in listed
    ):
        raise folder.error("modules.json must list modules, each with a type and a path")
    if foreign := [m["type"] for m in listed if not m["type"].startswith(trusted)]:
        raise folder.error(f"modules.json has a {foreign[0]} module, which is custom code; custom code is never run")
    return [(m["type"].rpartition(".")[2].replace("BERT", "Transformer"), m["path"]) for m in listed]


def _modules(folder: Folder) -> Sequence[tuple[str, str]] | None:
    """The class and path of each module; None without modules.json."""
    listed = _entries(folder)
    if listed is None:
        return None
    kinds = [kind for kind, _ in listed]
    if sparse.are_sparse(kinds):
        return listed
    if unknown := [kind for kind in kinds if kind not in _KINDS]:
        raise folder.error(
            f"modules.json has a {unknown[0]} module, which cannot be exported; supported: {', '.join(_KINDS)}"
        )
    alone = folder.object(_SETTINGS).get("model_type") == "CrossEncoder"
    is_encoder = tuple(kinds[:2]) == _BEFORE and not set(kinds[2:]) & set(_BEFORE)
    if not is_encoder and not (kinds == ["Transformer"] and alone):
        raise folder.error(
            f"modules.json lists {', '.join(kinds) or 'nothing'}; supported: Transformer, "
            f"Pooling and then any of {', '.join(READERS)}"
        )
    return listed


def _read_following(folder: Folder, listed: Sequence[tuple[str, str]]) -> tuple[Module, ...]:
    # Git keeps no empty folders.
    found = [READERS[kind](folder.sub(path, may_be_missing=kind in _EMPTY), VECTOR) for kind, path in listed]
    modules = [module for module in found if module is not None]
    # Scaling twice changes nothing.
    pairs = zip(modules, [None, *modules], strict=False)
    return tuple(module for module, before in pairs if not (isinstance(module, Normalize) and module == before))


def _modes(pooler: Folder, config: dict[str, Any], prompts: dict[str, str]) -> tuple[str, ...]:
    if not config.get("include_prompt", True) and any(prompts.values()):
        raise pooler.error("pooling that excludes the prompt (include_prompt) cannot be exported")
    if unknown := sorted(config.keys() - {*POOLING_READ, *OLD_FLAGS}):
        raise pooler.error(
            f"unknown Pooling setting {unknown[0]} in config.json; supported: {', '.join((*POOLING_READ, *OLD_FLAGS))}"
        )
    named = config.get("pooling_mode", [mode for flag, mode in OLD_FLAGS.items() if config.get(flag)] or "mean")
    modes = named if isinstance(named, list) else [named]
    if unknown := [mode for mode in modes if mode not in POOLING_MODES]:
        raise pooler.error(
            f"pooling_mode {unknown[0]!r} in config.json cannot be exported; supported: {', '.join(POOLING_MODES)}"
        )
    if not modes:
        raise pooler.error(f"config.json names no pooling_mode; supported: {', '.join(POOLING_MODES)}")
    return tuple(modes)


def _similarity(folder: Folder, settings: dict[str, Any]) -> Similarity | None:
    named = settings.get("similarity_fn_name")
    known = get_args(Similarity)
    if named not in (None, *known):
        raise folder.error(f"similarity_fn_name {named!r} in {_SETTINGS} is not known; supported: {', '.join(known)}")
    return named


def _read_transformer(
    encoder: Folder, fixed: Mapping[str, tuple[object, ...]], sides: tuple[str, ...] = ()
) -> Transformer:
    """Reads the first non-empty settings file, as Sentence Transformers does; `sides` are further settings."""
    file = next((name for name in TRANSFORMER_FILES if encoder.object(name)), TRANSFORMER_FILES[0])
    settings = encoder.object(file)
    for key, value in settings.items():
        if key in fixed and value not in (None, *fixed[key]):
            raise encoder.error(f"{key} {value!r} in {file} cannot be exported; supported: {fixed[key][0]!r}")
        if key not in {*TRANSFORMER_READ, *sides, *fixed, *TRANSFORMER_UNUSED, *_ARGUMENTS}:
            raise encoder.error(
                f"unknown Transformer setting {key} in {file}; supported: "
                f"{', '.join((*TRANSFORMER_READ, *sides, *fixed))}"
            )
    options = _arguments(encoder, file, settings, ("tokenizer_args", "processor_kwargs"))
    for names, unused in ARGUMENTS_UNUSED.items():
        if changing := sorted(_arguments(encoder, file, settings, names).keys() - unused):
            raise encoder.error(f"{changing[0]} in {names[1]} of {file} cannot be exported; remove it")
    lengths = {"max_seq_length": options.get("model_max_length", settings.get("max_seq_length"))}
    return Transformer(
        integer(encoder, lengths, "max_seq_length", file=file),
        bool(settings.get("do_lower_case")),
        {key: value for key, value in options.items() if key not in _LOADING and key != "model_max_length"},
        settings.get("transformer_task"),
        {key: settings[key] for key in sides if key in settings},
    )


def _arguments(encoder: Folder, file: str, settings: dict[str, Any], names: tuple[str, str]) -> dict[str, Any]:
    """Arguments under their old or new name; the old one takes precedence, as in Sentence Transformers."""
    name = next((name for name in names if settings.get(name) is not None), names[1])
    arguments = settings.get(name) or {}
    if not isinstance(arguments, dict):
        raise encoder.error(f"{name} in {file} must be an object, not {arguments!r}")
    return arguments


def _read_prompts(folder: Folder, *, may_be_null: bool = False) -> tuple[dict[str, str], str | None]:
    config = folder.object(_SETTINGS)
    prompts = config.get("prompts", {})
    if prompts is None and may_be_null:
        prompts = {}
    # Sentence Transformers treats null as the empty text.
    if isinstance(prompts, dict):
        prompts = {name: "" if text is None else text for name, text in prompts.items()}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise folder.error(f"prompts in {_SETTINGS} must map names to texts, not {prompts!r}")
    default = config.get("default_prompt_name")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        raise folder.error(
            f"unknown default_prompt_name {default!r} in {_SETTINGS}; prompts: {', '.join(prompts) or 'none'}"
        )
    return prompts, default
