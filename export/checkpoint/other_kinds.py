"""Checkpoints of other kinds of retrieval, recognised so that none is taken for an encoder or a language model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from export.errors import ExportError

if TYPE_CHECKING:
    from export.checkpoint.folder import Folder
    from export.checkpoint.labels import Asked

_SPLADE = "SPLADE (a weight for each word of the vocabulary)"
_COLBERT = "ColBERT (a projected vector for each token, compared one by one)"

_SAVED_BY = {"SparseEncoder": _SPLADE, "MultiVectorEncoder": _COLBERT, "ColBERT": _COLBERT}
"""By `model_type` of config_sentence_transformers.json."""

_MODULES = {
    **dict.fromkeys(("SpladePooling", "MLMTransformer", "SparseStaticEmbedding", "SparseAutoEncoder"), _SPLADE),
    **dict.fromkeys(("MultiVectorMask", "TokenPooling", "ColBERT"), _COLBERT),
}
"""By the class of a module of modules.json."""

_ARCHITECTURES = frozenset({"HF_ColBERT", "HFColBERT", "ColBERT", "ColBERTModel"})


def refuse(folder: Folder, name: str, asked: Asked | None) -> None:
    """Refuses what looks like a model of another kind.

    Args:
        folder: The checkpoint.
        name: What it is called.
        asked: What it is to be exported for. Old SPLADE folders are told by their names alone, from a language
            model for masked words: asking for one lets them pass.

    Raises:
        ExportError: It is such a model.
    """
    if (kind := _kind(folder)) is not None:
        raise ExportError(f"checkpoint {folder.path}: this is {kind}, which cannot be served yet")
    config = folder.object("config.json")
    names = f"{name} {config.get('_name_or_path', '')}".lower()
    if asked != "fill_mask" and "splade" in names and "ForMaskedLM" in str(config.get("architectures")):
        raise ExportError(
            f"checkpoint {folder.path}: by its name this is {_SPLADE}, which cannot be served yet; give --task "
            "fill_mask if it is a model for masked words"
        )


def _kind(folder: Folder) -> str | None:
    settings = folder.object("config_sentence_transformers.json")
    if (kind := _SAVED_BY.get(str(settings.get("model_type")))) is not None:
        return kind
    modules = folder.json("modules.json")
    listed = modules if isinstance(modules, list) else []
    kinds = [str(module.get("type")).rpartition(".")[2] for module in listed if isinstance(module, dict)]
    if (kind := next((_MODULES[kind] for kind in kinds if kind in _MODULES), None)) is not None:
        return kind
    architectures = folder.object("config.json").get("architectures")
    named = set(map(str, architectures)) if isinstance(architectures, list) else set()
    # The first is written by ColBERT's own trainer, the pair of prefixes by PyLate.
    marks = folder.has("artifact.metadata") or {"query_prefix", "document_prefix"} <= settings.keys()
    return _COLBERT if marks or named & _ARCHITECTURES else None
