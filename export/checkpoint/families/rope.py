"""Rotated positions: what config.json says of them, in the forms that it had over the years."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_KINDS = ("default", "linear", "dynamic")
"""Those of Transformers that are exported.

`dynamic` differs from `default` beyond `max_position_embeddings` alone, which no text gets.
"""


def parameters(config: Mapping[str, Any], theta: float) -> dict[str, Any]:
    """The setting `rope_parameters` of Transformers.

    Args:
        config: The settings of a checkpoint, with `rope_parameters`, or with `rope_theta` and `rope_scaling`.
        theta: The base where none is named.

    Raises:
        ValueError: The angles are scaled in a way that is not known.
    """
    name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    scaling = config.get(name) or {}
    if not isinstance(scaling, dict):
        raise ValueError(f"{name} in config.json must be an object, not {scaling!r}")  # noqa: TRY004  bad input
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    theta = positive("rope_theta", scaling.get("rope_theta", config.get("rope_theta") or theta))
    factor = positive(f"the factor of {name}", scaling.get("factor", 1))
    if kind == "ntk":
        if scaling.get("mixed_b") is not None:
            raise ValueError(f"{name} of the type 'ntk' with mixed_b in config.json cannot be exported")
        # As its first code has it, whatever a text's length: a larger base, and then every angle a little smaller.
        components = config["hidden_size"] // config["num_attention_heads"]
        return {"rope_type": "linear", "rope_theta": theta * factor, "factor": factor ** (2 / components)}
    _check(name, kind, (*_KINDS, "ntk"))
    if kind == "linear":
        return {"rope_type": kind, "rope_theta": theta, "factor": factor}
    return {"rope_type": "default", "rope_theta": theta}


def nested(config: Mapping[str, Any]) -> dict[str, Any]:
    """Checks `rope_parameters` that differ between layers, and changes nothing of them.

    Raises:
        ValueError: The angles are scaled in a way that is not known.
    """
    kinds = config.get("rope_parameters") or {}
    for each in kinds.values() if isinstance(kinds, dict) else ():
        if isinstance(each, dict):
            _check("rope_parameters", each.get("rope_type", "default"), _KINDS)
    return {}


def _check(name: str, kind: object, supported: Sequence[str]) -> None:
    if kind not in supported:
        raise ValueError(
            f"{name} of the type {kind!r} in config.json cannot be exported; supported: {', '.join(supported)}"
        )


def positive(name: str, value: object) -> float:
    """The value as a number.

    Raises:
        ValueError: It is none above 0.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ValueError(f"{name} in config.json must be a positive number, not {value!r}")
    return float(value)
