"""Rotary positions: the settings of config.json in all their historical forms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bertserve.export.checkpoint.families.family import require

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_KINDS = ("default", "linear", "dynamic")
"""Kinds of Transformers that can be exported.

`dynamic` differs from `default` only beyond `max_position_embeddings`, which no text exceeds.
"""

READ = ("rope_parameters", "rope_scaling", "rope_theta")
"""The settings that `parameters` reads."""

FIXED = {"partial_rotary_factor": 1}

_SCALING = frozenset({"rope_type", "type", "rope_theta", "factor", "mixed_b", *FIXED})


def parameters(config: Mapping[str, Any], theta: float) -> dict[str, Any]:
    """The setting `rope_parameters` of Transformers.

    Args:
        config: The settings of a checkpoint, with `rope_parameters`, or with `rope_theta` and `rope_scaling`.
        theta: The default base.

    Raises:
        ValueError: The scaling is unknown.
    """
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    scaling = config.get(name) or {}
    if not isinstance(scaling, dict):
        raise ValueError(f"{name} in config.json must be an object, not {scaling!r}")  # noqa: TRY004  bad input
    if unknown := sorted(scaling.keys() - _SCALING):
        raise ValueError(f"{name} with {unknown[0]} in config.json cannot be exported")
    for key, only in FIXED.items():
        require(scaling, key, only)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    theta = positive("rope_theta", scaling.get("rope_theta", config.get("rope_theta", theta)))
    factor = positive(f"the factor of {name}", scaling.get("factor", 1))
    if kind == "ntk":
        if scaling.get("mixed_b") is not None:
            raise ValueError(f"{name} of type 'ntk' with mixed_b in config.json cannot be exported")
        # As in its first code, for every length: a larger base, and then slightly smaller angles.
        components = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        return {"rope_type": "linear", "rope_theta": theta * factor, "factor": factor ** (2 / components)}
    _check(name, kind, (*_KINDS, "ntk"))
    if kind == "linear":
        return {"rope_type": kind, "rope_theta": theta, "factor": factor}
    return {"rope_type": "default", "rope_theta": theta}


def check_nested(config: Mapping[str, Any]) -> None:
    """Checks `rope_parameters` that differ between layers, and `rope_scaling` of all of them.

    Raises:
        ValueError: The scaling is unknown.
    """
    kinds, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    each_kind = [("rope_parameters", each) for each in kinds.values()] if isinstance(kinds, dict) else []
    for name, each in [*each_kind, ("rope_scaling", scaling)]:
        if isinstance(each, dict):
            _check(name, each.get("rope_type", each.get("type", "default")), _KINDS)
            require(each, "partial_rotary_factor", 1)
            if each.get("rope_theta") is not None:
                positive(f"rope_theta of {name}", each["rope_theta"])


def _check(name: str, kind: object, supported: Sequence[str]) -> None:
    if kind not in supported:
        raise ValueError(
            f"{name} of type {kind!r} in config.json cannot be exported; supported: {', '.join(supported)}"
        )


def positive(name: str, value: object) -> float:
    """The value as a number.

    Raises:
        ValueError: It is not above 0.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ValueError(f"{name} in config.json must be a positive number, not {value!r}")
    return float(value)
