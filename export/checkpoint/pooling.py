"""What the files of Sentence Transformers say about a checkpoint: pooling, length, prompts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from export.errors import ExportError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from export.checkpoint.folder import Folder

PoolingMode = Literal["mean", "cls"]

_ASSUMED_MEAN = "the checkpoint has no pooling configuration; mean pooling is used"
_MODULES = ("Transformer", "Pooling", "Normalize")
_OLD_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(slots=True, frozen=True)
class SentenceConfig:
    """How the checkpoint's sentences are made.

    Attributes:
        encoder: The folder with the encoder's weights and tokenizer.
        pooling: How token vectors become one.
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
    pooling: PoolingMode
    pools: bool = True
    is_cross_encoder: bool = False
    width: int | None = None
    max_length: int | None = None
    lowercase: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    notices: tuple[str, ...] = ()


def read(folder: Folder) -> SentenceConfig:
    """Reads modules.json and what it leads to.

    The layout is that of Sentence Transformers: a list of modules, each with its own folder.

    Args:
        folder: The checkpoint.

    Raises:
        ExportError: The checkpoint computes something else than an encoder, mean or cls pooling, and
            at most a normalisation.
    """
    modules = _modules(folder)
    if modules is None and not folder.has("1_Pooling/config.json"):
        return SentenceConfig(folder, "mean", pools=False, notices=(_ASSUMED_MEAN,))
    if modules is not None and len(modules) == 1:
        return _cross_encoder(folder, folder.sub(modules[0]["path"]))
    encoder = folder.sub(modules[0]["path"]) if modules else folder
    pooler = folder.sub(modules[1]["path"] if modules else "1_Pooling")
    sentence, pooling = encoder.object("sentence_bert_config.json"), pooler.object("config.json")
    prompts, default = _prompts(folder)
    return SentenceConfig(
        encoder=encoder,
        pooling=_mode(pooler, pooling, prompts),
        width=_integer(pooler, pooling, "word_embedding_dimension") or _integer(pooler, pooling, "embedding_dimension"),
        max_length=_integer(encoder, sentence, "max_seq_length"),
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
            "take default_prompt_name out of config_sentence_transformers.json to serve it without"
        )
    return SentenceConfig(
        encoder=encoder,
        pooling="mean",
        pools=False,
        is_cross_encoder=True,
        max_length=_integer(encoder, sentence, "max_seq_length"),
        lowercase=bool(sentence.get("do_lower_case", False)),
        prompts=prompts,
        notices=(_ASSUMED_MEAN,),
    )


def _modules(folder: Folder) -> Sequence[dict[str, str]] | None:
    listed = folder.json("modules.json")
    if listed is None:
        return None
    if not isinstance(listed, list) or not all(
        isinstance(m, dict) and isinstance(m.get("type"), str) and isinstance(m.get("path"), str) for m in listed
    ):
        raise ExportError(f"checkpoint {folder.path}: modules.json must list modules, each with a type and a path")
    kinds = [m["type"].rpartition(".")[2].replace("BERT", "Transformer") for m in listed]
    if unknown := [kind for kind in kinds if kind not in _MODULES]:
        raise ExportError(
            f"checkpoint {folder.path}: modules.json has a {unknown[0]} module, which cannot be exported; "
            f"supported: {', '.join(_MODULES)}"
        )
    alone = folder.object("config_sentence_transformers.json").get("model_type") == "CrossEncoder"
    if kinds == ["Transformer"] and alone:
        return listed
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        raise ExportError(
            f"checkpoint {folder.path}: modules.json lists {', '.join(kinds) or 'nothing'}; "
            "supported: Transformer, Pooling and at most one Normalize, in this order"
        )
    return listed


def _mode(pooler: Folder, config: dict[str, Any], prompts: dict[str, str]) -> PoolingMode:
    if not config.get("include_prompt", True) and any(prompts.values()):
        raise ExportError(f"checkpoint {pooler.path}: pooling that leaves the prompt out is not supported")
    modes = _modes(config)
    if modes in (["mean"], ["cls"]):
        return "mean" if modes == ["mean"] else "cls"
    raise ExportError(
        f"checkpoint {pooler.path}: config.json asks for {'+'.join(modes) or 'no'} pooling; supported: mean or cls"
    )


def _modes(config: dict[str, Any]) -> list[str]:
    named = config.get("pooling_mode")
    if named is None:
        return [mode for flag, mode in _OLD_FLAGS.items() if config.get(flag)]
    words = named if isinstance(named, list) else str(named).split("+")
    return [str(word).removesuffix("_token").removesuffix("_tokens") for word in words]


def _integer(folder: Folder, config: dict[str, Any], key: str) -> int | None:
    value = config.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise ExportError(f"checkpoint {folder.path}: {key} must be an integer, not {value!r}")
    return value


def _prompts(folder: Folder) -> tuple[dict[str, str], str | None]:
    """The prompts, and the name of the default one."""
    config = folder.object("config_sentence_transformers.json")
    prompts = config.get("prompts") or {}
    # Sentence Transformers takes null for the empty text.
    if isinstance(prompts, dict):
        prompts = {name: "" if text is None else text for name, text in prompts.items()}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ExportError(
            f"checkpoint {folder.path}: prompts in config_sentence_transformers.json must be texts by name"
        )
    default = config.get("default_prompt_name")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        raise ExportError(
            f"checkpoint {folder.path}: default_prompt_name {default!r} in config_sentence_transformers.json is none "
            f"of its prompts ({', '.join(prompts) or 'it has none'})"
        )
    return prompts, default
