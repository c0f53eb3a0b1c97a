"""Opens the encoder of a checkpoint: its config.json, its family and its weight files."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bertserve.export.checkpoint import other_kinds
from bertserve.export.checkpoint.families import FAMILIES, family_of
from bertserve.export.checkpoint.families.family import ACTIVATIONS, ALIASES, require
from bertserve.export.checkpoint.weights import find
from bertserve.export.progress import quiet

if TYPE_CHECKING:
    from bertserve.export.checkpoint.families.family import Family
    from bertserve.export.checkpoint.folder import Folder
    from bertserve.export.checkpoint.weights import Weights

_OPTIONAL_SIZES = ("num_labels", "type_vocab_size")

_MOST = {"layers": 1 << 10, "positions": 1 << 20}
"""Maximum sizes, by our names, if no tensor need have a row or column for each."""


@dataclass(slots=True, frozen=True)
class Encoder:
    """A Transformers model without the meaning of its outputs; config.json has been checked."""

    folder: Folder
    config: dict[str, Any]
    family: Family
    weights: Weights

    @property
    def architecture(self) -> str:
        """The class in its configuration, which need not be one of Transformers."""
        named = self.config.get("architectures") or f"{self.family.stem}Model"
        return str(named[0]) if isinstance(named, list) else str(named)

    def size(self, name: str) -> int:
        """One of the sizes of `Family.sizes`, by our name."""
        return int(self.config[self.family.sizes[name]])

    @property
    def hidden_size(self) -> int:
        return self.size("hidden_size")

    @property
    def vocab_size(self) -> int:
        return self.size("vocab_size")

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
    def embedding_size(self) -> int:
        """Size of a word's vector before the layers."""
        return self.hidden_size if self.family.projection == "no" else self.size("embedding_size")

    @property
    def known_segments(self) -> int:
        """Number of token types; 0 if there are none."""
        segments = self.config.get("type_vocab_size")
        return self.family.usual_segments if segments is None else int(segments)

    @property
    def activation(self) -> str:
        named = str(self.config.get(self.family.activation, self.family.usual_activation))
        return self.family.activations.get(named, ALIASES.get(named, named))

    @property
    def convolves(self) -> bool:
        """Whether DeBERTa's convolution runs beside the first layer."""
        return "conv_kernel_size" in self.family.settings and (self.config.get("conv_kernel_size") or 0) > 0

    @property
    def has_position_table(self) -> bool:
        """Whether every token takes a row of a table of positions, so that its rows limit the length."""
        # DeBERTa can leave position embeddings out.
        is_left_out = self.config.get("position_biased_input") is False
        return self.family.position_table and not ("position_biased_input" in self.family.settings and is_left_out)


def open_encoder(folder: Folder) -> Encoder:
    """Opens the encoder in a folder, and reads everything but its tensors.

    Raises:
        ExportError: It cannot be exported.
    """
    config = folder.object("config.json")
    if not config:
        raise folder.error(f"config.json is missing{other_kinds.instead_of_config(folder)}")
    other_kinds.refuse_config(folder, config)
    family = family_of(config)
    if family is None:
        raise folder.error(
            f"model_type {config.get('model_type')!r} cannot be exported{other_kinds.kind_of(config)}; "
            f"supported: {', '.join(FAMILIES)}"
        )
    encoder = _with_weights(folder, config, family)
    activation = config.get(family.activation, family.usual_activation)
    activations = [*(family.activations or (*ACTIVATIONS, *ALIASES))]
    if activation not in activations:
        raise folder.error(
            f"{family.activation} {activation!r} in config.json cannot be exported; supported: {', '.join(activations)}"
        )
    if encoder.hidden_size % encoder.size("heads"):
        raise folder.error(
            f"{family.sizes['hidden_size']} in config.json must be a multiple of {family.sizes['heads']}"
        )
    try:
        for key, only in family.fixed.items():
            require(config, key, only)
        family.derived(config)
    except ValueError as error:
        raise folder.error(f"{error}") from error
    if not family.own_prefix:
        _check_accepted(encoder)
    return encoder


def _with_weights(folder: Folder, config: dict[str, Any], family: Family) -> Encoder:
    """Finds the weights. Rejects sizes that they cannot have, before anything has them."""
    optional = {key for key in _OPTIONAL_SIZES if config.get(key) is not None}
    optional |= {"num_labels"} & config.keys()
    if family.segmentless and config.get("type_vocab_size") == 0:
        optional.remove("type_vocab_size")
    for key in [*family.sizes.values(), *sorted(optional)]:
        value = config.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise folder.error(f"{key} in config.json must be a positive integer, not {value!r}")
    weights = find(folder)
    held = sum(path.stat().st_size for path in weights.files)
    most = {key: _MOST.get(name, held) for name, key in family.sizes.items()} | dict.fromkeys(_OPTIONAL_SIZES, held)
    for key, largest in most.items():
        if (value := config.get(key) or 0) > largest:
            weights.check_whole()
            raise folder.error(
                f"{key} {value} in config.json is more than {largest}, "
                f"{'which weights of so many bytes can have' if largest == held else 'the most that can be exported'}"
            )
    return Encoder(folder, config, family, weights)


def _check_accepted(encoder: Encoder) -> None:
    """Rejects settings that Transformers rejects, which has a rule for every one of its own."""
    import transformers  # noqa: PLC0415  slow to import

    with quiet(), encoder.family.accepted(encoder.folder.path, encoder.config):
        # Labels have rules of their own, which name what is wrong with them.
        settings = {key: value for key, value in encoder.config.items() if key not in {"id2label", "label2id"}}
        getattr(transformers, f"{encoder.family.stem}Config").from_dict(deepcopy(settings))
