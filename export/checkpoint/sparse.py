"""Reads how a sparse encoder computes weights of words: modules of Sentence Transformers, and OpenSearch's idf.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bertserve.export.checkpoint.modules import integer
from bertserve.export.errors import ExportError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bertserve.export.checkpoint.folder import Folder

IDF = "idf.json"
"""OpenSearch's weights of queries, by token, beside a model of masked words."""

BLOCK = 2064
"""Words whose logits are computed at once. A logit for each token and word of a large vocabulary takes gigabytes.

Larger blocks leave a core's cache. Tokens that lie a power of two apart share its lines: with 2,048 words the maximum
takes a fifth longer.
"""

POOLINGS = ("max", "sum")
LOGARITHMS = {"relu": 1, "log1p_relu": 2}
"""How often a function of SpladePooling takes the logarithm."""

POOLING_READ = ("pooling_strategy", "activation_function", "embedding_dimension", "word_embedding_dimension")

ROUTER = "router_config.json"
ROUTER_READ = ("types", "structure", "parameters")

FILLING = "fill-mask"
"""The `transformer_task` whose logits are pooled."""

_POOLING = "SpladePooling"
_ENCODERS = ("Transformer", "MLMTransformer")
_ROUTERS = ("Router", "Asym")
_LOOKUP = "SparseStaticEmbedding"
_SIDES = ("query", "document")

Listed = tuple[str, "Folder"]
"""The class of a module, and its folder."""


@dataclass(slots=True, frozen=True)
class Sparse:
    """How weights of words follow from the logits of a text's tokens.

    Attributes:
        pooling: One of `POOLINGS`, over the tokens.
        logarithms: How often log1p is applied to a positive logit.
        max_active_dims: Maximum words of a text; None for no limit.
        queries: The folder with the weights of queries, as `SparseStaticEmbedding` or `IDF`; None if queries are
            encoded as documents are.
    """

    pooling: str = "max"
    logarithms: int = 1
    max_active_dims: int | None = None
    queries: Folder | None = None


@dataclass(slots=True, frozen=True)
class Modules:
    """The modules of a sparse encoder.

    Attributes:
        says_task: Whether its settings must name the task, as those of the class `MLMTransformer` need not.
    """

    encoder: Folder
    says_task: bool
    sparse: Sparse


def blocks(vocab_size: int) -> int:
    """The number of blocks of a vocabulary."""
    return -(-vocab_size // BLOCK)


def is_named(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a folder without modules is SPLADE's by its name: nothing else in naver's folders says so."""
    names = f"{name} {config.get('_name_or_path', '')}".lower()
    return "splade" in names and "ForMaskedLM" in str(config.get("architectures"))


def are_sparse(kinds: Sequence[str]) -> bool:
    """Whether modules of these classes are a sparse encoder's. Only those use a Router here."""
    return _POOLING in kinds or any(kind in kinds for kind in _ROUTERS)


def read(folder: Folder, listed: Sequence[tuple[str, str]], settings: Mapping[str, Any]) -> Modules:
    """Reads the modules of a sparse encoder.

    Raises:
        ExportError: It computes something else than the weights of words.
    """
    most = integer(folder, dict(settings), "max_active_dims", file="config_sentence_transformers.json")
    if [kind for kind, _ in listed if kind in _ROUTERS] and len(listed) == 1:
        documents, queries = _routes(folder.sub(listed[0][1]))
    else:
        documents, queries = [(kind, folder.sub(path)) for kind, path in listed], None
    kinds = [kind for kind, _ in documents]
    if len(kinds) != 2 or kinds[0] not in _ENCODERS or kinds[1] != _POOLING:  # noqa: PLR2004  encoder and pooling
        raise folder.error(
            f"the modules {', '.join(kinds) or '(none)'} cannot be exported as a sparse "
            f"encoder; supported: {' or '.join(_ENCODERS)}, then {_POOLING}"
        )
    (kind, encoder), (_, pooler) = documents
    pooling, logarithms = _pooling(pooler)
    return Modules(encoder, kind == _ENCODERS[0], Sparse(pooling, logarithms, most, queries))


def _pooling(folder: Folder) -> tuple[str, int]:
    config = folder.object("config.json")
    if unknown := sorted(config.keys() - {*POOLING_READ}):
        raise folder.error(
            f"unknown {_POOLING} setting {unknown[0]} in config.json; supported: {', '.join(POOLING_READ)}"
        )
    pooling, function = config.get("pooling_strategy", "max"), config.get("activation_function", "relu")
    for key, value, known in (
        ("pooling_strategy", pooling, POOLINGS),
        ("activation_function", function, tuple(LOGARITHMS)),
    ):
        if value not in known:
            raise folder.error(f"{key} {value!r} in config.json cannot be exported; supported: {', '.join(known)}")
    return pooling, LOGARITHMS[function]


def _routes(folder: Folder) -> tuple[list[Listed], Folder | None]:
    """The modules for documents, and the folder with the weights of queries; None if queries take the same modules."""
    file = ROUTER if folder.has(ROUTER) else "config.json"
    config = folder.object(file)
    types, structure, parameters = (config.get(key) or {} for key in ROUTER_READ)
    where = f"checkpoint {folder.path}: the Router in {file}"
    names = [name for listed in structure.values() for name in listed] if _maps_to(structure, list) else [None]
    if not (_maps_to(types, str) and isinstance(parameters, dict) and all(isinstance(name, str) for name in names)):
        raise ExportError(f"{where} must map names to classes (types) and routes to names (structure)")
    if set(structure) != set(_SIDES):
        raise ExportError(f"{where} has the routes {', '.join(structure) or 'none'}; supported: query and document")
    if parameters.get("route_mappings"):
        raise ExportError(f"{where} has route_mappings, which cannot be exported; remove them")
    default = parameters.get("default_route")
    if default is None and parameters.get("allow_empty_key", True):
        default = next(iter(structure))
    if default != "document":
        raise ExportError(f"{where} has the default_route {default!r}; supported: 'document'")
    queries, documents = ([_read_route(folder, types, name, where) for name in structure[side]] for side in _SIDES)
    if structure["query"] == structure["document"]:
        return documents, None
    kinds = [kind for kind, _ in queries]
    if kinds != [_LOOKUP]:
        raise ExportError(
            f"{where} gives queries the modules {', '.join(kinds) or 'none'} of their own; supported: {_LOOKUP}, or "
            "those of documents"
        )
    ((_, lookup),) = queries
    if (path := lookup.object("config.json").get("path")) is not None:
        raise lookup.error(
            f"path {path!r} in config.json cannot be exported; save the model with Sentence "
            "Transformers' save_pretrained, which writes the weights themselves"
        )
    return documents, lookup


def _maps_to(value: object, kind: type) -> bool:
    return isinstance(value, dict) and all(isinstance(member, kind) for member in value.values())


def _read_route(folder: Folder, types: Mapping[str, Any], name: str, where: str) -> Listed:
    kind = str(types.get(name))
    if not kind.startswith("sentence_transformers."):
        raise ExportError(f"{where} has a {kind} module, which is custom code; custom code is never run")
    return kind.rpartition(".")[2], folder.sub(name)
