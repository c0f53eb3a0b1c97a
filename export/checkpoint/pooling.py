"""What the files of Sentence Transformers say about a checkpoint: pooling, what follows it, length, prompts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args

from export.checkpoint.modules import READERS, Module, Normalize, integer, read_module, width_after
from export.errors import ExportError
from serving.models.manifest import POOLING_MODES, Similarity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from export.checkpoint.folder import Folder
    from export.checkpoint.weights import Weights

_ASSUMED_MEAN = (
    "the checkpoint has no pooling configuration; mean pooling is used, and vectors are not normalised unless a "
    "request asks"
)
_SETTINGS = "config_sentence_transformers.json"
_OWN = "sentence_transformers."
_BEFORE = ("Transformer", "Pooling")
_KINDS = (*_BEFORE, *READERS)
_EMPTY = frozenset({"Normalize", "Dropout"})
"""Modules whose folders may hold no file."""
# In the order in which Sentence Transformers joins them.
_OLD_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(slots=True, frozen=True)
class SentenceConfig:
    """How the checkpoint's sentences are made.

    Attributes:
        encoder: The folder with the encoder's weights and tokenizer.
        pooling: How token vectors become one: what each of these makes, side by side.
        modules: What the vector passes after that.
        normalize: Whether it is scaled to length 1 at the end.
        truncate_dim: How many of its first components are left after all that; None for all.
        similarity: How vectors are meant to be compared; None where nothing says.
        pools: Whether the files say that they do; a checkpoint of another task has no such files.
        is_cross_encoder: Whether the files say that its head weighs pairs of texts.
        width: Components of the vectors that are pooled; None when the configuration names none.
        max_length: The checkpoint's own limit in tokens; None when it names none.
        lowercase: Whether texts are lower-cased before the tokenizer.
        prompts: Texts to put before inputs, by name.
        default_prompt: The name of the one that stands before a text where nobody names another; None for none.
        notices: What was assumed, for the person to know.
    """

    encoder: Folder
    pooling: tuple[str, ...] = ("mean",)
    modules: tuple[Module, ...] = ()
    normalize: bool = False
    truncate_dim: int | None = None
    similarity: Similarity | None = None
    pools: bool = True
    is_cross_encoder: bool = False
    width: int | None = None
    max_length: int | None = None
    lowercase: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    notices: tuple[str, ...] = ()

    def weights(self) -> list[Weights]:
        """The files of the modules after pooling, in their order."""
        return [module.weights for module in self.modules if not isinstance(module, Normalize)]

    def dimensions(self, hidden_size: int) -> int:
        """Components of a text's vector, made of token vectors of that many.

        Raises:
            ExportError: One step does not take what the one before makes.
        """
        if self.width not in (None, hidden_size):
            raise ExportError(
                f"checkpoint {self.encoder.path}: the pooling takes vectors of {self.width}, "
                f"the model makes vectors of {hidden_size}"
            )
        size = hidden_size * len(self.pooling)
        for module in self.modules:
            size = width_after(module, size)
        if self.truncate_dim is not None and self.truncate_dim > size:
            raise ExportError(
                f"checkpoint {self.encoder.path}: truncate_dim {self.truncate_dim} in {_SETTINGS} is more than a "
                f"vector's {size} components"
            )
        return self.truncate_dim or size


def read(folder: Folder) -> SentenceConfig:
    """Reads modules.json and what it leads to.

    The layout is that of Sentence Transformers: a list of modules, each with its own folder.

    Args:
        folder: The checkpoint.

    Raises:
        ExportError: The checkpoint computes something else than an encoder, pooling and modules that change the vector.
    """
    listed = _modules(folder)
    if listed is None and not folder.has("1_Pooling/config.json"):
        return SentenceConfig(folder, pools=False, notices=(_ASSUMED_MEAN,))
    if listed is not None and len(listed) == 1:
        return _cross_encoder(folder, folder.sub(listed[0][1]))
    encoder = folder.sub(listed[0][1]) if listed else folder
    pooler = folder.sub(listed[1][1] if listed else "1_Pooling")
    sentence, pooling = encoder.object("sentence_bert_config.json"), pooler.object("config.json")
    prompts, default = _prompts(folder)
    settings = folder.object(_SETTINGS)
    truncate_dim = integer(folder, settings, "truncate_dim", file=_SETTINGS)
    following = _following(folder, listed[2:] if listed else [])
    # The last scaling is left to the server, since a request may switch it off, unless components are cut after it.
    normalize = bool(following) and isinstance(following[-1], Normalize) and truncate_dim is None
    return SentenceConfig(
        encoder=encoder,
        pooling=_modes(pooler, pooling, prompts),
        modules=following[:-1] if normalize else following,
        normalize=normalize,
        truncate_dim=truncate_dim,
        similarity=_similarity(folder, settings),
        width=integer(pooler, pooling, "word_embedding_dimension") or integer(pooler, pooling, "embedding_dimension"),
        max_length=_max_length(encoder, sentence),
        lowercase=bool(sentence.get("do_lower_case", False)),
        prompts=prompts,
        default_prompt=default,
    )


def _cross_encoder(folder: Folder, encoder: Folder) -> SentenceConfig:
    """A model whose head is its own: only the settings of its texts are told beside it."""
    sentence = encoder.object("sentence_bert_config.json")
    prompts, default = _prompts(folder)
    if default is not None and prompts[default]:
        raise ExportError(
            f"checkpoint {folder.path}: a cross-encoder with the default prompt {default!r} cannot be exported; "
            f"take default_prompt_name out of {_SETTINGS} to serve it without"
        )
    return SentenceConfig(
        encoder=encoder,
        pools=False,
        is_cross_encoder=True,
        max_length=_max_length(encoder, sentence),
        lowercase=bool(sentence.get("do_lower_case", False)),
        prompts=prompts,
        notices=(_ASSUMED_MEAN,),
    )


def _modules(folder: Folder) -> Sequence[tuple[str, str]] | None:
    """The class and the path of each module; None where nothing lists them."""
    listed = folder.json("modules.json")
    if listed is None:
        return None
    if not isinstance(listed, list) or not all(
        isinstance(m, dict) and isinstance(m.get("type"), str) and isinstance(m.get("path"), str) for m in listed
    ):
        raise ExportError(f"checkpoint {folder.path}: modules.json must list modules, each with a type and a path")
    if foreign := [m["type"] for m in listed if not m["type"].startswith(_OWN)]:
        raise ExportError(
            f"checkpoint {folder.path}: modules.json has a {foreign[0]} module, which is code of its own; such "
            "code is never run"
        )
    kinds = [m["type"].rpartition(".")[2].replace("BERT", "Transformer") for m in listed]
    if unknown := [kind for kind in kinds if kind not in _KINDS]:
        raise ExportError(
            f"checkpoint {folder.path}: modules.json has a {unknown[0]} module, which cannot be exported; "
            f"supported: {', '.join(_KINDS)}"
        )
    alone = folder.object(_SETTINGS).get("model_type") == "CrossEncoder"
    is_encoder = tuple(kinds[:2]) == _BEFORE and not set(kinds[2:]) & set(_BEFORE)
    if not is_encoder and not (kinds == ["Transformer"] and alone):
        raise ExportError(
            f"checkpoint {folder.path}: modules.json lists {', '.join(kinds) or 'nothing'}; supported: Transformer, "
            f"Pooling and then any of {', '.join(READERS)}"
        )
    return [(kind, m["path"]) for kind, m in zip(kinds, listed, strict=True)]


def _following(folder: Folder, listed: Sequence[tuple[str, str]]) -> tuple[Module, ...]:
    # Git keeps no empty folders.
    found = [read_module(kind, folder.sub(path, may_be_missing=kind in _EMPTY)) for kind, path in listed]
    return tuple(module for module in found if module is not None)


def _modes(pooler: Folder, config: dict[str, Any], prompts: dict[str, str]) -> tuple[str, ...]:
    if not config.get("include_prompt", True) and any(prompts.values()):
        raise ExportError(
            f"checkpoint {pooler.path}: pooling that leaves the prompt out (include_prompt) cannot be exported"
        )
    named = config.get("pooling_mode")
    if named is None:
        named = [mode for flag, mode in _OLD_FLAGS.items() if config.get(flag)]
    modes = named if isinstance(named, list) else [named]
    if unknown := [mode for mode in modes if mode not in POOLING_MODES]:
        raise ExportError(
            f"checkpoint {pooler.path}: pooling_mode {unknown[0]!r} in config.json cannot be exported; supported: "
            f"{', '.join(POOLING_MODES)}"
        )
    if not modes:
        raise ExportError(
            f"checkpoint {pooler.path}: config.json names no pooling_mode; supported: {', '.join(POOLING_MODES)}"
        )
    return tuple(modes)


def _similarity(folder: Folder, settings: dict[str, Any]) -> Similarity | None:
    named = settings.get("similarity_fn_name")
    known = get_args(Similarity)
    if named not in (None, *known):
        raise ExportError(
            f"checkpoint {folder.path}: similarity_fn_name {named!r} in {_SETTINGS} is not known; supported: "
            f"{', '.join(known)}"
        )
    return named


def _max_length(encoder: Folder, sentence: dict[str, Any]) -> int | None:
    return integer(encoder, sentence, "max_seq_length", file="sentence_bert_config.json")


def _prompts(folder: Folder) -> tuple[dict[str, str], str | None]:
    """The prompts, and the name of the default one."""
    config = folder.object(_SETTINGS)
    prompts = config.get("prompts") or {}
    # Sentence Transformers takes null for the empty text.
    if isinstance(prompts, dict):
        prompts = {name: "" if text is None else text for name, text in prompts.items()}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ExportError(f"checkpoint {folder.path}: prompts in {_SETTINGS} must be texts by name")
    default = config.get("default_prompt_name")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        raise ExportError(
            f"checkpoint {folder.path}: default_prompt_name {default!r} in {_SETTINGS} is none "
            f"of its prompts ({', '.join(prompts) or 'it has none'})"
        )
    return prompts, default
