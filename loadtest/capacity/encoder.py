"""Dimensions of an encoder: from a configuration, from a bundle, or built in by name."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from export.checkpoint.families import FAMILIES, family_of
from export.errors import ExportError
from loadtest.errors import BenchError
from serving.errors import BundleError
from serving.models.bundle import open_bundle
from serving.models.manifest import MANIFEST, TOKENIZER
from serving.models.verified_dir import versions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from export.checkpoint.families.family import Family
    from serving.models.bundle import Bundle

_DATA = files("loadtest.capacity") / "data"
KNOWN: dict[str, dict[str, Any]] = json.loads((_DATA / "encoders.json").read_text(encoding="utf-8"))
"""Built-in configurations by name."""

BYTES = {"fp32": 4, "fp16": 2, "int8": 1}
"""Bytes per weight."""

_GATED = 1.5
"""A gated feed-forward part has three matrices instead of two."""
_USUAL_WIDENING = 4
_LAYER_OPERATORS = ("Attention", "QAttention", "SkipLayerNormalization")


@dataclass(slots=True, frozen=True)
class Encoder:
    """Dimensions of an encoder.

    Attributes:
        name: Display name.
        layers: Layers that are computed.
        stored_layers: Layers with weights of their own.
        hidden: Hidden size.
        intermediate: Size of the feed-forward part, times 1.5 if it is gated.
        vocabulary: Size of the vocabulary.
        positions: Maximum text length, in tokens.
        config: The content of config.json; empty for a bundle.
        bundle: None for a configuration.
        notes: Assumptions.
        tokenizer: Tokenizer file next to the configuration or in the bundle; None if there is none.
    """

    name: str
    layers: int
    stored_layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    positions: int
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    bundle: Bundle | None = field(default=None, repr=False)
    notes: tuple[str, ...] = ()
    tokenizer: Path | None = None

    @property
    def parameters(self) -> int:
        """Number of weights in the layers and the embeddings, with biases and normalizations.

        >>> BERT_BASE.parameters // 1_000_000
        108
        """
        hidden, wide = self.hidden, self.intermediate
        layer = 4 * hidden * hidden + 2 * hidden * wide + 9 * hidden + wide
        return self.stored_layers * layer + (self.vocabulary + self.positions + 4) * hidden

    def weight_bytes(self, precision: str) -> int:
        """Memory of the weights."""
        return self.parameters * BYTES[precision]

    def working_bytes(self, precision: str, tokens: int) -> int:
        """Estimated memory of a batch's activations: twice the widest results of a layer."""
        number = max(2, BYTES[precision])
        return 2 * number * tokens * (5 * self.hidden + self.intermediate)


def encoder_of(given: str) -> Encoder:
    """The encoder of a command line: one of `KNOWN`, a config.json or its directory, or a bundle.

    Raises:
        BenchError: It is none of these, or its configuration lacks a dimension.
    """
    if given in KNOWN:
        return _of_config(given, KNOWN[given], given)
    path = Path(given)
    if path.is_dir() and (bundle := _bundle_folder(path)) is not None:
        return _of_bundle(bundle)
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(
            f"{file}: {error.strerror}; use a config.json or its folder, a bundle, or one of {', '.join(KNOWN)}"
        ) from error
    except ValueError as error:
        raise BenchError(f"{file}: not JSON ({error})") from error
    if not isinstance(config, dict):
        raise BenchError(f"{file}: must be an object, as in the config.json of a checkpoint")
    found = _of_config(file.absolute().parent.name, config, str(file))
    beside = file.with_name(TOKENIZER)
    return replace(found, tokenizer=beside) if beside.is_file() else found


def _of_config(name: str, config: Mapping[str, Any], where: str) -> Encoder:
    family = family_of(config)
    if family is None:
        raise BenchError(
            f"{where}: model_type {config.get('model_type')!r} is not known; supported: {', '.join(FAMILIES)}"
        )
    sizes = {ours: _size(config, theirs, where) for ours, theirs in family.sizes.items()}
    inner, stored = 1, sizes["layers"]
    if family.shared_layers:
        try:
            groups = family.derived(config)
        except (ValueError, ExportError) as error:
            raise BenchError(f"{where}: {error}") from error
        inner = groups["inner_group_num"]
        stored = groups["num_hidden_groups"] * inner
    return Encoder(
        name=name,
        layers=sizes["layers"] * inner,
        stored_layers=stored,
        hidden=sizes["hidden_size"],
        intermediate=_intermediate(family, sizes),
        vocabulary=sizes["vocab_size"],
        positions=sizes["positions"],
        config=config,
    )


def _intermediate(family: Family, sizes: Mapping[str, int]) -> int:
    return int(sizes["intermediate_size"] * (_GATED if family.gated else 1))


def _size(config: Mapping[str, Any], key: str, where: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BenchError(f"{where}: {key} must be a positive integer, not {value!r}")
    return value


def _bundle_folder(path: Path) -> Path | None:
    """The directory of a bundle, or of the newest version of a model."""
    if (path / MANIFEST).exists():
        return path.absolute()
    numbers = versions(path)
    newest = path.absolute() / str(max(numbers)) if numbers else None
    return newest if newest is not None and (newest / MANIFEST).exists() else None


def _of_bundle(folder: Path) -> Encoder:
    try:
        bundle = open_bundle(folder)
    except BundleError as error:
        raise BenchError(str(error)) from error
    manifest = bundle.manifest
    counts = next((a.operators for a in manifest.artifacts if any(a.operators.get(n) for n in _LAYER_OPERATORS)), {})
    layers = counts.get("Attention") or counts.get("QAttention") or counts.get("SkipLayerNormalization", 0) // 2
    if not layers:
        raise BenchError(f"{folder}: its manifest does not give the number of layers; use its config.json")
    wide = _USUAL_WIDENING * manifest.hidden_size
    return Encoder(
        name=f"{manifest.model} version {manifest.version}",
        layers=layers,
        stored_layers=layers,
        hidden=manifest.hidden_size,
        intermediate=wide,
        vocabulary=manifest.vocab_size,
        positions=manifest.max_length,
        bundle=bundle,
        tokenizer=folder / TOKENIZER,
        notes=(f"a bundle does not give its feed-forward size: assumed {wide}",),
    )


BERT_BASE = _of_config("bert-base", KNOWN["bert-base"], "bert-base")
