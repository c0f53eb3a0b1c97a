"""Bounds on a transformer's activations for any input, proven from the weights alone.

A layer normalization divides by the standard deviation, so its result has a length of at most √hidden before scale and
bias. Everything up to the next normalization is bounded by the weights it is multiplied with (Cauchy-Schwarz). The
bounds hold for every partial sum too, in whatever order and precision the products are accumulated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray
    from onnx import GraphProto, NodeProto

    Array = NDArray[np.float32]

MOVES = frozenset(
    {
        *("Concat", "Dropout", "Expand", "Flatten", "Gather", "GatherElements", "Identity", "Reshape", "Slice"),
        *("Split", "Squeeze", "Transpose", "Unsqueeze"),
    }
)
"""Operators that move numbers and change none."""


@dataclass(slots=True, frozen=True)
class Range:
    """Bounds of a tensor.

    Attributes:
        peak: Largest magnitude of an element.
        norm: Largest length of a token's vector.
        spread: Length of the vector of the largest magnitudes of each component: `norm` for a vector whose components
            may come from different tokens, as attention mixes them.
        is_mixture: Whether rows are weights of a mean: not negative, with a sum of 1.
        is_turned: Whether a token's components lie along the last axis but one.
    """

    peak: float
    norm: float = math.inf
    spread: float = math.inf
    is_mixture: bool = False
    is_turned: bool = False

    def scaled(self, factor: float) -> Range:
        """The range of the tensor times something no larger than `factor`."""
        return replace(
            self, peak=self.peak * factor, norm=self.norm * factor, spread=self.spread * factor, is_mixture=False
        )


UNKNOWN = Range(math.inf)

_ENDS = 2


def of_constant(array: Array) -> Range:
    """The range of a weight or of a scalar, which may be repeated."""
    size = np.abs(array)
    peak = float(size.max(initial=0))
    if array.ndim == 0 or array.shape[-1] == 1:
        return Range(peak)
    rows = size.reshape(-1, size.shape[-1])
    return Range(peak, float(np.linalg.norm(rows, axis=1).max()), float(np.linalg.norm(rows.max(axis=0))))


def of_graph(graph: GraphProto, constants: Mapping[str, Array]) -> dict[str, Range]:
    """The ranges of a graph's float tensors; a tensor that is not listed has no known bound."""
    bounds: dict[str, Range] = {}
    producers = {name: node for node in graph.node for name in node.output}
    for node in graph.node:
        inputs = [bounds.get(name) or _constant(constants, name) for name in node.input]
        bound = _result(node, inputs, [constants.get(name) for name in node.input])
        if (averaged := _averaged(node, producers)) is not None:
            bound = bounds.get(averaged, UNKNOWN)
        if math.isfinite(bound.peak):
            # A fused normalization has its sum as another output.
            bounds.update(dict.fromkeys(node.output[:1] if node.op_type in _SCALE_OF else node.output, bound))
    return bounds


def _averaged(node: NodeProto, producers: Mapping[str, NodeProto]) -> str | None:
    """The input of a division that computes a mean: Σ(x · w) / Σ w, with weights cast from integers."""
    sums = [producers.get(name) for name in node.input] if node.op_type == "Div" else []
    if not sums or any(one is None or one.op_type != "ReduceSum" for one in sums):
        return None
    product, weight = (producers.get(one.input[0]) for one in sums if one is not None)
    if product is None or weight is None or (product.op_type, weight.op_type) != ("Mul", "Cast"):
        return None
    terms = [name for name in product.input if name != weight.output[0]]
    return terms[0] if len(terms) == 1 else None


def _constant(constants: Mapping[str, Array], name: str) -> Range:
    array = constants.get(name)
    # A matrix is bounded where it is used: as a table, or by its columns.
    return UNKNOWN if array is None or (array.ndim > 1 and array.size > array.shape[-1]) else of_constant(array)


def _result(node: NodeProto, inputs: list[Range], arrays: list[Array | None]) -> Range:
    if node.op_type == "Gather" and arrays[0] is not None:
        return of_constant(arrays[0])
    rule = _RULES.get(node.op_type)
    return UNKNOWN if rule is None else rule(node, inputs, arrays)


def _normalised(node: NodeProto, _inputs: list[Range], arrays: list[Array | None]) -> Range:
    at = _SCALE_OF[node.op_type]
    scale, bias = (*arrays[at : at + 2], None)[:2]
    if scale is None:
        return UNKNOWN
    length = math.sqrt(scale.size)
    size, offset = np.abs(scale), np.zeros(1) if bias is None else np.abs(bias)
    return Range(
        float((size * length + offset).max()),
        float(size.max() * length + np.linalg.norm(offset)),
        float(np.linalg.norm(size) * length + np.linalg.norm(offset)),
    )


def _product(node: NodeProto, inputs: list[Range], arrays: list[Array | None]) -> Range:
    left, right, weight = inputs[0], inputs[1], arrays[1]
    if weight is not None:
        is_turned = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
        axis = 1 if is_turned else 0
        # A length may be unknown, and infinite; `fmin` skips the NaN of 0 times it.
        with np.errstate(invalid="ignore"):
            lengths = np.linalg.norm(weight, axis=axis) * left.norm
            columns = np.fmin(lengths, np.linalg.norm(weight, ord=1, axis=axis) * left.peak)
        spread = float(np.linalg.norm(columns))
        # A fused attention has its bias here too; its mean of values is no larger than they are.
        return _sum([Range(float(columns.max()), spread, spread), *inputs[2:3]])
    if left.is_mixture and not right.is_turned:
        return replace(right, norm=right.spread)
    return Range(left.norm * right.norm) if right.is_turned and not left.is_turned else UNKNOWN


def _transposed(node: NodeProto, inputs: list[Range], _arrays: list[Array | None]) -> Range:
    order = next((list(attribute.ints) for attribute in node.attribute if attribute.name == "perm"), [])
    keeps_last = bool(order) and order[-1] == len(order) - 1
    return inputs[0] if keeps_last else replace(inputs[0], is_turned=not inputs[0].is_turned)


def _chosen(_node: NodeProto, inputs: list[Range], arrays: list[Array | None]) -> Range:
    # A constant is a mask's, which fp16 may hold as another number.
    is_masked = any(array is not None for array in arrays)
    return UNKNOWN if is_masked else Range(max(bound.peak for bound in inputs[1:]))


def _clipped(_node: NodeProto, inputs: list[Range], arrays: list[Array | None]) -> Range:
    ends = [abs(float(array)) for array in arrays[1:] if array is not None]
    return Range(min(inputs[0].peak, max(ends))) if len(ends) == _ENDS else UNKNOWN


def _sum(terms: list[Range]) -> Range:
    return Range(sum(term.peak for term in terms), sum(term.norm for term in terms), sum(term.spread for term in terms))


def _multiplied(_node: NodeProto, inputs: list[Range], _arrays: list[Array | None]) -> Range:
    left, right = inputs
    return min(left.scaled(right.peak), right.scaled(left.peak), key=lambda bound: bound.norm)


def _divided(_node: NodeProto, inputs: list[Range], arrays: list[Array | None]) -> Range:
    divisor = arrays[1]
    return UNKNOWN if divisor is None or not divisor.all() else inputs[0].scaled(1 / float(np.abs(divisor).min()))


def _raised(_node: NodeProto, inputs: list[Range], arrays: list[Array | None]) -> Range:
    exponent = arrays[1]
    is_known = exponent is not None and exponent.size == 1 and exponent.item() >= 0
    return Range(max(1.0, inputs[0].peak) ** exponent.item()) if exponent is not None and is_known else UNKNOWN


_SCALE_OF = {"LayerNormalization": 1, "SkipLayerNormalization": 2, "EmbedLayerNormalization": 5}
"""The position of a normalization's scale among its inputs; its bias follows it."""

_RULES: dict[str, Callable[[NodeProto, list[Range], list[Array | None]], Range]] = {
    **dict.fromkeys(_SCALE_OF, _normalised),
    **dict.fromkeys(("MatMul", "Gemm", "Attention"), _product),
    **dict.fromkeys((*MOVES, "ReduceMax"), lambda _node, inputs, _arrays: inputs[0]),
    "Transpose": _transposed,
    "Concat": lambda _node, inputs, _arrays: Range(max(bound.peak for bound in inputs)),
    "Where": _chosen,
    "Clip": _clipped,
    "Sqrt": lambda _node, inputs, _arrays: Range(math.sqrt(inputs[0].peak)),
    # Activations are nowhere larger than their input, with the bias of those that have one.
    **dict.fromkeys(
        ("Add", "Sub", "Gelu", "BiasGelu", "FastGelu", "Relu", "LeakyRelu", "Elu"),
        lambda _node, inputs, _arrays: _sum(inputs),
    ),
    "Mul": _multiplied,
    "Div": _divided,
    "Pow": _raised,
    **dict.fromkeys(("Erf", "Tanh", "Sigmoid"), lambda *_: Range(1)),
    "Softmax": lambda *_: Range(1, 1, is_mixture=True),
}
