"""Parameters of a v2 request that control inference, for both HTTP and gRPC."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import msgspec

from bertserve.serving.errors import InvalidRequest
from bertserve.serving.fields.rule import Level
from bertserve.serving.inference.requests import InputType, priority_of
from bertserve.serving.tasks.windows import Long, WindowScores, windows_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import UnionType

    from bertserve.serving.inference.requests import InferRequest

READ = (
    *("truncate", "timeout", "prompt_name", "input_type"),
    *("long", "window_tokens", "window_overlap", "window_scores"),
    *("top_k", "threshold"),
)
"""The parameters that control inference."""

REQUEST = Level(
    (*READ, "priority", "binary_data_output", "triton_enable_empty_final_response"),
    place="parameters",
)
INPUT = Level(("binary_data_size", "shared_memory_region"), place="inputs[].parameters")
OUTPUT = Level(("binary_data", "classification", "shared_memory_region"), place="outputs[].parameters")
CONTROL = Level(("version",), place="parameters")
"""The known parameters of a request, of its inputs and outputs, and of model loading and unloading."""

_US_PER_MS = 1000


def read_parameters(request: InferRequest[Any], values: Mapping[str, Any]) -> None:
    """Applies the parameters of a request that control inference.

    Raises:
        InvalidRequest: A parameter has an invalid value, or the task does not support it.
    """
    request.truncate = typed(values, "truncate", bool, "true or false")
    request.timeout_ms = _timeout_ms(values)
    request.prompt_name = typed(values, "prompt_name", str, "a text")
    request.input_type = _choice(values, "input_type", get_args(InputType))
    windows = windows_of(
        _choice(values, "long", get_args(Long)),
        typed(values, "window_tokens", int, "a whole number"),
        typed(values, "window_overlap", int, "a whole number"),
        _choice(values, "window_scores", get_args(WindowScores)),
    )
    if windows is not None:
        if "windows" not in request.options.__struct_fields__:
            raise InvalidRequest("the parameter `long` is supported only for the tasks classify, rerank and tag")
        request.options = msgspec.structs.replace(request.options, windows=windows)
    top_k = typed(values, "top_k", int, "a whole number")
    threshold = _threshold(values)
    if top_k is not None or threshold is not None:
        if "threshold" not in request.options.__struct_fields__:
            raise InvalidRequest("the parameters `top_k` and `threshold` are supported only for the task embed_sparse")
        request.options = msgspec.structs.replace(request.options, top_k=top_k, threshold=threshold)
    if (priority := values.get("priority")) is not None:
        request.priority = priority_of(priority, "the parameter `priority`")


def _threshold(values: Mapping[str, Any]) -> float | None:
    value = typed(values, "threshold", int | float, "a number")
    try:
        return None if value is None else float(value)
    except OverflowError:  # JSON has integers of any length
        raise InvalidRequest("the parameter `threshold` is out of range") from None


def _timeout_ms(values: Mapping[str, Any]) -> float | None:
    value = values.get("timeout")
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise InvalidRequest("the parameter `timeout` must be a whole number of microseconds")
    return value / _US_PER_MS if value else None


def typed(values: Mapping[str, Any], name: str, kind: type | UnionType, words: str) -> Any:  # noqa: ANN401  of that type
    """A parameter of type `kind`, which error messages call `words`; None if the request does not have it."""
    value = values.get(name)
    if value is not None and (not isinstance(value, kind) or (kind is not bool and isinstance(value, bool))):
        raise InvalidRequest(f"the parameter `{name}` must be {words}")
    return value


def _choice(values: Mapping[str, Any], name: str, allowed: tuple[str, ...]) -> Any:  # noqa: ANN401  one of them
    """A parameter with one of the `allowed` values; None if the request does not have it."""
    value = values.get(name)
    if value is not None and value not in allowed:
        raise InvalidRequest(f"the parameter `{name}` must be one of {', '.join(allowed)}")
    return value
