"""The parameters of a v2 request that say how to infer, from either wire."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import msgspec

from serving.errors import InvalidRequest
from serving.fields.owners import V2_CONTROL, V2_INPUT, V2_OUTPUT, V2_PARAMETERS
from serving.fields.rule import Level
from serving.inference.requests import InputType
from serving.tasks.messages import windows_of
from serving.tasks.windows import Long, WindowScores

if TYPE_CHECKING:
    from collections.abc import Mapping

    from serving.tasks.base import A, TaskOptions
    from serving.tasks.windows import Windows

READ = (
    *("truncate", "timeout", "prompt_name", "input_type"),
    *("long", "window_tokens", "window_overlap", "window_scores"),
)
"""The parameters that say how to infer."""

REQUEST = Level(
    (*READ, "priority", "binary_data_output", "triton_enable_empty_final_response"),
    owners=V2_PARAMETERS,
    place="parameters",
)
INPUT = Level(("binary_data_size", "shared_memory_region"), owners=V2_INPUT, place="inputs[].parameters")
OUTPUT = Level(
    ("binary_data", "classification", "shared_memory_region"), owners=V2_OUTPUT, place="outputs[].parameters"
)
CONTROL = Level(("version",), owners=V2_CONTROL, place="parameters")
"""The parameters that are read of a request, of its inputs and outputs, and of a model's loading and unloading."""

_US_PER_MS = 1000


class InferParameters(msgspec.Struct, frozen=True):
    """What a request's parameters ask for; each as `InferRequest` has it."""

    truncate: bool | None = None
    timeout_ms: float | None = None
    prompt_name: str | None = None
    input_type: InputType | None = None
    windows: Windows | None = None

    def options(self, options: TaskOptions[A]) -> TaskOptions[A]:
        """A task's options with what the parameters ask for.

        Raises:
            InvalidRequest: The task does not read windows where it is asked to.
        """
        if self.windows is None:
            return options
        if "windows" not in options.__struct_fields__:
            raise InvalidRequest("the parameter `long` is for the tasks classify, rerank and tag")
        return msgspec.structs.replace(options, windows=self.windows)


_NONE = InferParameters()


def infer_parameters(values: Mapping[str, Any]) -> InferParameters:
    """Reads the parameters of a request.

    Raises:
        InvalidRequest: One that is read has a value that it cannot have.
    """
    if not values:
        return _NONE
    return InferParameters(
        truncate=typed(values, "truncate", bool, "true or false"),
        timeout_ms=_timeout_ms(values),
        prompt_name=typed(values, "prompt_name", str, "a text"),
        input_type=_choice(values, "input_type", get_args(InputType)),
        windows=windows_of(
            _choice(values, "long", get_args(Long)),
            typed(values, "window_tokens", int, "a whole number"),
            typed(values, "window_overlap", int, "a whole number"),
            _choice(values, "window_scores", get_args(WindowScores)),
        ),
    )


def _timeout_ms(values: Mapping[str, Any]) -> float | None:
    value = values.get("timeout")
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise InvalidRequest("the parameter `timeout` must be a whole number of microseconds")
    return value / _US_PER_MS if value else None


def typed(values: Mapping[str, Any], name: str, kind: type, words: str) -> Any:  # noqa: ANN401  of that type
    """A parameter of a type, called so in `words`; None where the request does not have it."""
    value = values.get(name)
    if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        raise InvalidRequest(f"the parameter `{name}` must be {words}")
    return value


def _choice(values: Mapping[str, Any], name: str, allowed: tuple[str, ...]) -> Any:  # noqa: ANN401  one of them
    """A parameter that has one of a few values; None where the request does not have it."""
    value = values.get(name)
    if value is not None and value not in allowed:
        raise InvalidRequest(f"the parameter `{name}` must be one of {', '.join(allowed)}")
    return value
