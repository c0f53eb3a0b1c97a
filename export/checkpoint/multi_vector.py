"""Reads how a multi-vector model (ColBERT) makes vectors of queries and documents.

Three layouts: folders of Sentence Transformers' MultiVectorEncoder, of PyLate, and of Stanford's trainer, all of which
MultiVectorEncoder loads. The settings mean what they mean there.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from bertserve.export.checkpoint.modules import READERS, Dense, Normalize, integer
from bertserve.export.errors import ExportError
from bertserve.serving.tasks.parts import Expansion, MultiVector

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bertserve.export.checkpoint.folder import Folder
    from bertserve.export.checkpoint.modules import Module
    from bertserve.export.checkpoint.vocabulary import Vocabulary

Layout: TypeAlias = Literal["own", "pylate", "old pylate", "stanford"]

SETTINGS = "config_sentence_transformers.json"
METADATA = "artifact.metadata"
"""Settings of Stanford's trainer."""

SIDES_READ = ("query_length", "document_length", "query_expansion")
"""Settings of a Transformer module, which PyLate has in `SETTINGS`."""

EXPANSION_READ = ("strategy", "attend", "token", "length")
_STRATEGIES = ("fixed", "min")

PYLATE_READ = (
    *SIDES_READ,
    *("query_prefix", "document_prefix", "skiplist_words"),
    *("do_query_expansion", "attend_to_expansion_tokens", "attend_to_mask_tokens"),
)
"""Settings of PyLate in `SETTINGS`."""

METADATA_READ = (
    *("query_token_id", "doc_token_id", "query_maxlen", "doc_maxlen", "dim"),
    *("attend_to_mask_tokens", "mask_punctuation"),
)

MASK_READ = ("skiplist_words", "skiplist_tasks")
MASK_FIXED = {"keep_only_token_ids": (None,)}
_MASK = "MultiVectorMask"
_AFTER = ("Dense", "Normalize", "Dropout", _MASK)
_SIDES = ("query", "document")
_TOKENS = "token_embeddings"

_STANFORD = "HF_ColBERT"
_OTHERS = ("HFColBERT", "ColBERT", "ColBERTModel")
_USUAL_LENGTH, _USUAL_SIZE = 32, 128
_PUNCTUATION = tuple(string.punctuation)


@dataclass(slots=True, frozen=True)
class Filling:
    """How queries are filled up.

    Attributes:
        length: Tokens of a filled query.
        is_fixed: Whether longer queries are truncated to that length.
        token: Name of the token; None for the mask token.
    """

    length: int
    is_fixed: bool
    token: str | None
    attended: bool


@dataclass(slots=True, frozen=True)
class Sides:
    """How queries and documents are read.

    Attributes:
        query_length: Maximum tokens; None for the tokenizer's limit.
        document_length: Maximum tokens; None for the tokenizer's limit.
        filling: None if queries are not filled up.
        skipped: Names of tokens without a vector.
        skips: The sides on which `skipped` applies.
        markers: Prompts whose first word, or all of it, is one token.
        projection: Columns of a matrix beside the encoder's weights, which projects vectors; 0 if there is none.
        mean: Whether a score is the mean over a query's vectors.
    """

    query_length: int | None = None
    document_length: int | None = None
    filling: Filling | None = None
    skipped: tuple[str, ...] = ()
    skips: tuple[str, ...] = ("document",)
    markers: tuple[str, ...] = ()
    projection: int = 0
    mean: bool = False


def layout_of(folder: Folder) -> Layout | None:
    """The layout of a multi-vector model; None for another model.

    Raises:
        ExportError: It is a multi-vector model that MultiVectorEncoder does not load.
    """
    settings = folder.object(SETTINGS)
    kind, architectures = settings.get("model_type"), folder.object("config.json").get("architectures")
    named = [str(name) for name in architectures] if isinstance(architectures, list) else []
    is_pylate = kind == "ColBERT" or {"query_prefix", "document_prefix"} <= settings.keys()
    modules = folder.json("modules.json")
    if modules is None:
        if _STANFORD in named:
            return "stanford"
        if other := [*(name for name in named if name in _OTHERS), *([METADATA] if folder.has(METADATA) else [])]:
            raise folder.error(
                f"{other[0]} says that this is ColBERT, but a folder of its trainer names {_STANFORD} in "
                "architectures of config.json"
            )
        if is_pylate or kind == "MultiVectorEncoder":
            raise folder.error(f"{SETTINGS} says that this is ColBERT, but modules.json is missing")
        return None
    if kind == "ColBERT":
        return "pylate"
    if kind == "MultiVectorEncoder" or (kind is None and _STANFORD in named):
        return "own"
    if kind in (None, "SentenceTransformer") and is_pylate:
        return "old pylate"
    if isinstance(modules, list) and any(
        isinstance(module, dict) and str(module.get("type")).endswith(f".{_MASK}") for module in modules
    ):
        raise folder.error(
            f"modules.json has a {_MASK}, but model_type in {SETTINGS} is {kind!r}; supported: 'MultiVectorEncoder'"
        )
    return None


def prompts_of(folder: Folder, layout: Layout, saved: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The prompts, of which there is one for each side, and those that are markers."""
    if layout == "stanford":
        metadata = folder.object(METADATA)
        keys = (("query_token_id", "[unused0]"), ("doc_token_id", "[unused1]"))
        markers = [f"{metadata.get(key) or usual} " for key, usual in keys]
        return dict(zip(_SIDES, markers, strict=True)), tuple(markers)
    settings = folder.object(SETTINGS)
    prompts = {**dict.fromkeys(_SIDES, ""), **saved}
    prefixes = {side: settings[key] or "" for side in _SIDES if (key := f"{side}_prefix") in settings}
    for side, prefix in prefixes.items():
        if not isinstance(prefix, str):
            raise folder.error(f"{side}_prefix in {SETTINGS} must be a text, not {prefix!r}")
        prompts[side] = prefix + prompts[side].removeprefix(prefix)
    return prompts, tuple(prefixes.values())


def of_stanford(folder: Folder, markers: tuple[str, ...]) -> Sides:
    """The sides by `METADATA`, whose settings have defaults."""
    metadata = folder.object(METADATA)

    def number(key: str, usual: int) -> int:
        return integer(folder, metadata, key, file=METADATA) or usual

    attended = bool(metadata.get("attend_to_mask_tokens"))
    return Sides(
        document_length=integer(folder, metadata, "doc_maxlen", file=METADATA),
        filling=Filling(number("query_maxlen", _USUAL_LENGTH), is_fixed=True, token=None, attended=attended),
        skipped=_PUNCTUATION if metadata.get("mask_punctuation", True) else (),
        markers=markers,
        projection=number("dim", _USUAL_SIZE),
    )


def of_modules(
    folder: Folder,
    layout: Layout,
    listed: Sequence[tuple[str, str]],
    transformer: Mapping[str, object],
    markers: tuple[str, ...],
) -> tuple[Sides, tuple[Module, ...]]:
    """The sides and the modules after the encoder.

    Raises:
        ExportError: A module or setting cannot be exported.
    """
    settings = folder.object(SETTINGS)
    if layout == "old pylate":  # of single vectors: MultiVectorEncoder leaves out what makes one of many
        listed = [(kind, path) for kind, path in listed if kind not in ("Pooling", "Normalize")]
    if unknown := [kind for kind, _ in listed if kind not in _AFTER]:
        raise folder.error(
            f"modules.json has a {unknown[0]} module, which cannot be exported in a multi-vector model; "
            f"supported: Transformer and then any of {', '.join(_AFTER)}"
        )
    masks = [path for kind, path in listed if kind == _MASK]
    if len(masks) > 1:
        raise folder.error(f"modules.json has {len(masks)} {_MASK} modules; supported: one")
    found = [
        READERS[kind](folder.sub(path, may_be_missing=kind == "Dropout"), _TOKENS)
        for kind, path in listed
        if kind != _MASK
    ]
    modules = tuple(module for module in found if module is not None)
    if layout == "own":
        skipped, skips = _mask(folder.sub(masks[0])) if masks else ((), ())
    else:
        if not any(isinstance(module, Dense) for module in modules):
            raise folder.error(
                f"{SETTINGS} says that this is ColBERT, but modules.json has no Dense, which Sentence "
                "Transformers would replace by random numbers"
            )
        words = settings.get("skiplist_words")
        skipped, skips = _PUNCTUATION if words is None else _words(folder, SETTINGS, words), ("document",)
        modules = (*modules, Normalize())
    sides: dict[str, Any] = {**_of_pylate(folder, settings), **transformer}
    file = "settings of the Transformer module"
    filling = _filling(folder, sides.get("query_expansion"))
    if filling is not None and layout == "own" and not masks and not filling.attended:
        # Nothing gives these tokens vectors then.
        sides["query_length"], filling = filling.length if filling.is_fixed else sides.get("query_length"), None
    return Sides(
        query_length=integer(folder, sides, "query_length", file=file),
        document_length=integer(folder, sides, "document_length", file=file),
        filling=filling,
        skipped=skipped,
        skips=skips,
        markers=markers,
        mean=settings.get("similarity_fn_name") == "meanmaxsim",
    ), modules


@dataclass(slots=True, frozen=True)
class Ends:
    """Maximum tokens of an input: by the tokenizer, by the model's positions, and of documents if requested."""

    longest: int
    positions: int
    asked: int | None


def resolve(folder: Folder, sides: Sides, words: Vocabulary, ends: Ends, *, normalized: bool) -> MultiVector:
    """The sides as a manifest states them.

    Raises:
        ExportError: A token is unknown, or a length is out of range.
    """
    filling, tokenizer = sides.filling, words.reference
    most = ends.asked or ends.positions
    document = ends.asked or min(sides.document_length or ends.longest, most)
    query = min(sides.query_length or ends.longest, most)
    expansion = None
    if filling is not None:
        query = filling.length if filling.is_fixed else max(query, filling.length)
        if filling.length > most:
            raise folder.error(f"queries are filled up to {filling.length} tokens, more than the maximum length {most}")
        if tokenizer.padding_side != "right":
            raise folder.error("queries cannot be filled up with a tokenizer that pads on the left")
        expansion = Expansion(_token(folder, filling.token, words), filling.length, filling.attended)
    ids = tokenizer.get_vocab()
    return MultiVector(
        query_length=query,
        document_length=document,
        expansion=expansion,
        skipped=tuple(sorted(ids[word] for word in set(sides.skipped) & ids.keys())),
        skips_queries="query" in sides.skips,
        skips_documents="document" in sides.skips,
        normalized=normalized,
        mean=sides.mean,
    )


def _token(folder: Folder, name: str | None, words: Vocabulary) -> int:
    """The id of the token that fills queries up: by default the mask token, or else the end of a text."""
    tokenizer = words.reference
    if name is None:
        found = tokenizer.mask_token_id if tokenizer.mask_token_id is not None else tokenizer.eos_token_id
        if found is None:
            raise folder.error("query_expansion needs a token, and the tokenizer has no mask token")
        return int(found)
    found = tokenizer.convert_tokens_to_ids(name)
    if found is None or (found == tokenizer.unk_token_id and name != tokenizer.unk_token):
        raise folder.error(f"the token {name!r} of query_expansion is not in the vocabulary")
    return int(found)


def _of_pylate(folder: Folder, settings: Mapping[str, Any]) -> dict[str, object]:
    """`SIDES_READ` by PyLate's settings: expansion is on unless they say otherwise."""
    sides = {key: settings[key] for key in SIDES_READ if key in settings}
    sides = {key: value for key, value in sides.items() if value is not None or key == "query_expansion"}
    if "query_expansion" in sides or not settings.keys() & {*PYLATE_READ}:
        return sides
    if settings.get("do_query_expansion") is False:
        return {**sides, "query_expansion": None}
    attend = settings.get("attend_to_expansion_tokens", settings.get("attend_to_mask_tokens"))
    length = integer(folder, dict(settings), "query_length", file=SETTINGS) or _USUAL_LENGTH
    sides.pop("query_length", None)
    return {**sides, "query_expansion": {"strategy": "fixed", "attend": bool(attend), "length": length}}


def _filling(folder: Folder, value: object) -> Filling | None:
    if value is None:
        return None
    where = f"checkpoint {folder.path}: query_expansion"
    if not isinstance(value, dict):
        raise ExportError(f"{where} must be an object, not {value!r}")
    if unknown := sorted(value.keys() - {*EXPANSION_READ}):
        raise ExportError(f"{where} has the unknown setting {unknown[0]}; supported: {', '.join(EXPANSION_READ)}")
    strategy, attend, token = value.get("strategy"), value.get("attend", False), value.get("token")
    length = integer(folder, value, "length", file="query_expansion")
    if strategy not in _STRATEGIES or not isinstance(attend, bool) or length is None:
        raise ExportError(
            f"{where} {value!r} cannot be exported; it needs a strategy ({' or '.join(_STRATEGIES)}) and a length, and "
            "attend must be true or false"
        )
    return Filling(length, strategy == "fixed", None if token is None else str(token), attend)


def _mask(folder: Folder) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The skipped words of a MultiVectorMask, and their sides."""
    config = folder.object("config.json")
    for key, value in config.items():
        if key in MASK_FIXED and value not in MASK_FIXED[key]:
            raise folder.error(f"{key} {value!r} in config.json cannot be exported; supported: {MASK_FIXED[key][0]!r}")
        if key not in {*MASK_READ, *MASK_FIXED}:
            raise folder.error(f"unknown {_MASK} setting {key} in config.json; supported: {', '.join(MASK_READ)}")
    tasks = config.get("skiplist_tasks")
    sides = ["document"] if tasks is None else [tasks] if isinstance(tasks, str) else tasks
    if not isinstance(sides, list) or not all(side in _SIDES for side in sides):
        raise folder.error(
            f"skiplist_tasks {tasks!r} in config.json cannot be exported; supported: {', '.join(_SIDES)}"
        )
    words = config.get("skiplist_words")
    return () if words is None else _words(folder, "config.json", words), tuple(sides)


def _words(folder: Folder, file: str, words: object) -> tuple[str, ...]:
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise folder.error(f"skiplist_words in {file} must be a list of tokens")
    return tuple(words)
