"""Modules of Sentence Transformers after pooling, as their folders describe them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from bertserve.export.checkpoint import weights

if TYPE_CHECKING:
    from collections.abc import Callable

    from bertserve.export.checkpoint.folder import Folder

ACTIVATIONS = ("Identity", "Tanh", "Sigmoid", "ReLU", "GELU", "SiLU", "LeakyReLU", "ELU")
"""Activations of Dense that can be exported, by PyTorch's names, with PyTorch's defaults."""

_TOO_LARGE = 1 << 30

VECTOR = "sentence_embedding"

READ: dict[str, tuple[str, ...]] = {
    "Dense": ("in_features", "out_features", "bias", "activation_function", "use_residual"),
    "LayerNorm": ("dimension",),
    "Normalize": (),
    "Dropout": (),
}
"""Settings of each module's config.json that are read, beside `FIXED`. Settings of Dropout change no answer."""

FIXED = {"module_input_name": VECTOR, "module_output_name": VECTOR}
"""The input of a module, and the only value that can be exported; in multi-vector models it is `token_embeddings`."""


@dataclass(slots=True, frozen=True)
class Dense:
    """A matrix product with bias and activation, optionally with a residual.

    Attributes:
        width: Size of input vectors.
        outputs: Size of output vectors.
        activation: One of `ACTIVATIONS`.
        residual: Whether the input is added; if the sizes differ, through a matrix of its own.
        inline: Whether they are the encoder's files, which hold other tensors too.
    """

    width: int
    outputs: int
    bias: bool
    activation: str
    residual: bool
    weights: weights.Weights
    inline: bool = False


@dataclass(slots=True, frozen=True)
class LayerNorm:
    """A layer normalization with PyTorch's epsilon."""

    width: int
    weights: weights.Weights


@dataclass(slots=True, frozen=True)
class Normalize:
    """Scales vectors to length 1."""


Module: TypeAlias = Dense | LayerNorm | Normalize


def width_after(module: Module, width: int) -> int:
    """The vector size after a module.

    Raises:
        ExportError: The module expects another input size.
    """
    if isinstance(module, Normalize):
        return width
    if module.width != width:
        raise module.weights.folder.error(
            f"this {type(module).__name__} expects vectors of size {module.width}, but gets size {width}"
        )
    return module.outputs if isinstance(module, Dense) else width


def integer(folder: Folder, config: dict[str, Any], key: str, *, file: str = "config.json") -> int | None:
    """A positive integer of a configuration, below 2^30; None if absent.

    Raises:
        ExportError: It is something else.
    """
    value = config.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 0 < value < _TOO_LARGE):
        raise folder.error(f"{key} in {file} must be a positive integer, not {value!r}")
    return value


def _dense(folder: Folder, vector: str) -> Dense:
    config = _config(folder, "Dense", vector)
    width, outputs = _required(folder, config, "in_features"), _required(folder, config, "out_features")
    bias, residual = _flag(folder, config, "bias", usual=True), _flag(folder, config, "use_residual", usual=False)
    named = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    module, _, activation = str(named).rpartition(".")
    if activation not in ACTIVATIONS or not f"{module}.".startswith("torch.nn."):
        raise folder.error(
            f"activation_function {named!r} in config.json cannot be exported; supported: "
            f"{', '.join(ACTIVATIONS)} of torch.nn"
        )
    return Dense(width, outputs, bias, activation, residual, weights.find(folder))


def _layer_norm(folder: Folder, vector: str) -> LayerNorm:
    width = _required(folder, _config(folder, "LayerNorm", vector), "dimension")
    return LayerNorm(width, weights.find(folder))


def _normalize(folder: Folder, vector: str) -> Normalize:
    _config(folder, "Normalize", vector)
    return Normalize()


READERS: dict[str, Callable[[Folder, str], Module | None]] = {
    "Dense": _dense,
    "LayerNorm": _layer_norm,
    "Normalize": _normalize,
    "Dropout": lambda _folder, _vector: None,
}
"""Readers of modules by class, from a folder and the name of their input and output; None if training alone uses it."""


def _config(folder: Folder, kind: str, vector: str) -> dict[str, Any]:
    config = folder.object("config.json")
    # Old folders of multi-vector models have a Dense without names.
    name = vector if kind == "Dense" else VECTOR
    for key in FIXED:
        # An output of null has the input's name; an input of null has none.
        name = config.get(key, name) if key == "module_input_name" else config.get(key) or name
        if name != vector:
            raise folder.error(f"a {kind} with the {key} {name!r} cannot be exported; supported: {vector!r}")
    return {key: config[key] for key in READ[kind] if key in config}


def _required(folder: Folder, config: dict[str, Any], key: str) -> int:
    value = integer(folder, config, key)
    if value is None:
        raise folder.error(f"config.json must set {key}, the vector size")
    return value


def _flag(folder: Folder, config: dict[str, Any], key: str, *, usual: bool) -> bool:
    value = config.get(key, usual)
    if not isinstance(value, bool):
        raise folder.error(f"{key} in config.json must be true or false, not {value!r}")
    return value
