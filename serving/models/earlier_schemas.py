"""Reads manifests of earlier schemas, which had flat fields in place of parts, as those of the present one."""

from __future__ import annotations

from typing import Any

import msgspec

from bertserve.serving.models.manifest import SCHEMA_VERSION, Manifest

UNPROVEN = {
    2: "its export did not compare token IDs with those of Transformers, so truncation_side, do_lower_case, "
    "strip_accents, added_tokens_decoder and model_input_names of tokenizer_config.json may not count",
    3: "",
}
"""The earlier schemas, and what their exports did not prove."""

_WHOLE: dict[str, object] = {"split_by": None, "parts": [], "ranks": 1, "lookups": False}
"""The fields of an artifact that is not cut into parts, which are gone as its `kind` is, that `engine` tells."""


class _Flat(msgspec.Struct):
    """What is told by the fields that became parts, and those that are told by the outputs of the graph."""

    task: str
    artifacts: list[dict[str, Any]]
    also: list[str] = []
    pooling: str | None = None
    normalize: bool = True
    matryoshka: list[int] = []
    similarity: str | None = None
    labels: list[str] = []
    multi_label: bool = False
    regression: bool = False
    activation: str = "sigmoid"
    query_weights: bool = False
    multi_vector: dict[str, Any] | None = None
    dimensions: Any = None
    candidates: Any = None
    active: Any = None


def decode(content: bytes) -> Manifest:
    """Reads a manifest of any schema; raises `msgspec.ValidationError` for other content."""
    fields = msgspec.json.decode(content, type=dict[str, Any])
    version = fields.get("schema_version")
    if version == SCHEMA_VERSION:
        return msgspec.convert(fields, Manifest)
    if version not in list(UNPROVEN):  # it may be anything
        known = ", ".join(map(str, UNPROVEN))
        raise msgspec.ValidationError(f"schema version must be {known} or {SCHEMA_VERSION}: export again")
    flat = msgspec.convert(fields, _Flat)
    kept = {name: value for name, value in fields.items() if name not in _Flat.__struct_fields__}
    return msgspec.convert(kept | _parts(flat), Manifest)


def _parts(flat: _Flat) -> dict[str, Any]:
    embedding = {"normalize": flat.normalize, "matryoshka": flat.matryoshka, "similarity": flat.similarity}
    problem = "multi_label" if flat.multi_label else "regression" if flat.regression else "single_label"
    sparse = {"query_weights": flat.query_weights, "similarity": None if flat.pooling else flat.similarity}
    sides = flat.multi_vector and {name: value for name, value in flat.multi_vector.items() if name != "dimensions"}
    return {
        "task": flat.task,
        "artifacts": whole(flat.artifacts),
        "embedding": None if flat.pooling is None else {"pooling": flat.pooling.split("+"), **embedding},
        "labels": {"names": flat.labels, "problem": problem} if flat.labels else None,
        "sparse": sparse if "embed_sparse" in {flat.task, *flat.also} else None,
        "multi_vector": sides,
        "activation": flat.activation if flat.task == "rerank" else None,
    }


def whole(artifacts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Artifacts without the fields that are gone; raises `msgspec.ValidationError` for one that is cut into parts."""
    if any(artifact.get(name, usual) != usual for artifact in artifacts for name, usual in _WHOLE.items()):
        raise msgspec.ValidationError("the model is cut into parts, which this version does not serve; export it again")
    gone = {"kind", *_WHOLE}
    return [{name: value for name, value in artifact.items() if name not in gone} for artifact in artifacts]
