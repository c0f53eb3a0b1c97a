"""Many examples of a strategy, and requests that are nearly right."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Callable


def sizes(full: int) -> Any:
    """Parametrises a test with `examples`: a twentieth, and in the slow tests all of them."""
    return pytest.mark.parametrize("examples", [full // 20, pytest.param(full, marks=pytest.mark.endurance)])


def parts(usual: int, long: int, full: int) -> Any:
    """Parametrises a test with `examples` and their `seed`: some, more in the slow tests, and all in many parts."""
    count = full // long
    return pytest.mark.parametrize(
        ("seed", "examples"),
        [
            pytest.param(0, usual, id="few"),
            pytest.param(1, long, marks=pytest.mark.slow, id="more"),
            *[
                pytest.param(2 + part, long, marks=pytest.mark.endurance, id=f"{part + 1}of{count}")
                for part in range(count)
            ],
        ],
    )


def each(
    strategy: st.SearchStrategy[Any], examples: int, check: Callable[[Any], None], number: int | None = None
) -> None:
    """Runs a check on so many examples, the same on every run; a failure is shown in its smallest form."""

    @(lambda run: run) if number is None else seed(number)
    @settings(
        max_examples=examples,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(strategy)
    def run(value: Any) -> None:
        check(value)

    run()


_words = st.sampled_from(
    [
        *(
            "inputs",
            "input",
            "parameters",
            "text",
            "texts",
            "model",
            "top_k",
            "truncate",
            "data",
            "shape",
            "id",
            "ids",
            "x",
        ),
        # Others' words, slips of the pen, and names that no header holds.
        *("model_name", "options", "late_chunking", "return_len", "priority", "sequence_id", "classification"),
        *("shared_memory_region", "topn", "documens", "paramaters", "", "a b", "é", "a\r\nb: c", "x" * 65),
    ]
)
_leaves = (
    st.none()
    | st.booleans()
    | st.integers(-3, 70)
    | st.integers()
    | st.sampled_from([2**31, -(2**31), 2**63, 10**30])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
    | _words
    | st.sampled_from(["true", "False", "[MASK]", "word " * 80, "BYTES", "INT64", "embedding", "\0"])
)
_values = st.recursive(
    _leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_words, inner, max_size=3), max_leaves=6
)


@st.composite
def nearly(draw: st.DrawFn, example: Any) -> bytes:
    """A JSON body that differs from an example in a few places: of its values, or of its bytes."""
    message = json.loads(json.dumps(example))
    for _ in range(draw(st.integers(0, 3))):
        message = _changed(draw, message)
    body = json.dumps(message, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    if draw(st.integers(0, 3)) == 0:
        body = draw(spoiled(body))
    return body


@st.composite
def spoiled(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes with some of them cut off, replaced, doubled or added."""
    at, end = sorted(draw(st.tuples(*[st.integers(0, len(data))] * 2)))
    middle = draw(st.sampled_from([b"", data[at:end] * 2]) | st.binary(max_size=12))
    return data[:at] + middle + data[end:]


def _changed(draw: st.DrawFn, value: Any) -> Any:
    """A value in which one part was replaced, removed, doubled or added."""
    if not isinstance(value, dict | list) or not draw(st.integers(0, 4)):
        return draw(_values)
    keys = sorted(value) if isinstance(value, dict) else list(range(len(value)))
    key = draw(st.sampled_from(keys)) if keys else None
    how = draw(st.sampled_from(["change", "change", "change", "remove", "more"]))
    if isinstance(value, dict):
        return _object(draw, value, key, how)
    if how == "more" or key is None:
        return value * draw(st.integers(2, 40))
    return [*value[:key], *([] if how == "remove" else [_changed(draw, value[key])]), *value[key + 1 :]]


def _object(draw: st.DrawFn, value: dict[str, Any], key: Any, how: str) -> dict[str, Any]:
    if how == "more" or key is None:
        return {**value, draw(_words): draw(_values)}
    if how == "remove":
        return {name: part for name, part in value.items() if name != key}
    return {**value, key: _changed(draw, value[key])}
